"""Several corpora as one, by shares.

Sample ids are unique: those of the first corpus come first, from 0, then those of the next one.
windows.py decides which corpus has which turn.

A registry reads the indexes, and has neither numpy nor tokenizers.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from planaria.node.data.corpus import (
    TRAIN,
    UNSCORED,
    VALIDATION,
    Corpus,
    CorpusError,
    Index,
    hash_of,
    read_index,
)
from planaria.node.data.mixture_cycle import Share
from planaria.node.data.tokenizer import TOKENIZER, same_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from planaria.node.data.batches import Batches
    from planaria.node.data.windows import Windows
    from planaria.node.run_file import DataSection

SEARCHED: Final = "PLANARIA_DATA"
"""Environment variable with folders in which prepared data is looked for."""


class Mixture:
    """Corpora with a common tokenizer that take turns. Any thread may read it.

    `content` identifies their contents and their turns. Raises CorpusError when they don't go
    together.
    """

    def __init__(self, corpora: Sequence[Corpus], turns: Sequence[int]) -> None:
        check_tokenizers([(corpus.path, corpus.index) for corpus in corpora])
        self.corpora, self.turns = list(corpora), list(turns)
        self.index = _joint_index([corpus.index for corpus in corpora], turns)
        self.content, self.vocabulary = self.index.content, self.index.vocabulary

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the corpora have in common. Raises CorpusError."""
        return self.corpora[0].tokenizer()

    @property
    def path(self) -> Path:
        """Folder of the first corpus, which has the tokenizer."""
        return self.corpora[0].path

    def verify_in_background(self) -> None:
        """Like `Corpus.verify_in_background`."""
        for corpus in self.corpora:
            corpus.verify_in_background()

    @property
    def elsewhere(self) -> bool:
        return any(corpus.elsewhere for corpus in self.corpora)

    def prefetch(self, split: str, context: int, indices: Iterable[int]) -> None:
        """Prefetch the mixture's samples, like `Corpus`. Raises IndexError, CorpusError."""
        for corpus, own in self.by_corpus(split, context, indices):
            if corpus.elsewhere:
                corpus.prefetch(split, context, [own])

    def shares(self, context: int) -> list[Share]:
        """The number of training samples of each corpus, and their turns. Raises CorpusError."""
        counts = self._sample_counts(TRAIN, context)
        return [Share(count, turns) for count, turns in zip(counts, self.turns, strict=True)]

    def validation_ids(self, context: int, positions: Iterable[int]) -> NDArray[np.int64]:
        """Ids of the validation samples at these positions, int64; corpora take turns, from their
        first samples on. Raises CorpusError."""
        import numpy as np

        from planaria.node.data.windows import Turns

        counts = np.array(self._sample_counts(VALIDATION, context), np.int64)
        whose, turns = Turns(self.turns).at(np.fromiter(positions, np.uint64))
        firsts: NDArray[np.int64] = np.cumsum([0, *counts])[whose]
        return firsts + turns.astype(np.int64) % counts[whose]

    @property
    def masked(self) -> bool:
        return any(corpus.masked for corpus in self.corpora)

    def by_corpus(
        self, split: str, context: int, indices: Iterable[int] | NDArray[np.int64]
    ) -> Iterator[tuple[Corpus, int]]:
        """The corpus of each sample, and its index there. Raises IndexError, CorpusError."""
        starts = list(accumulate(self._sample_counts(split, context), initial=0))
        for index in map(int, indices):
            of = bisect_right(starts, index) - 1
            if not 0 <= of < len(self.corpora):
                raise IndexError(f"the {split} splits have no sample {index} of context {context}")
            yield self.corpora[of], index - starts[of]

    def _sample_counts(self, split: str, context: int) -> list[int]:
        return [corpus.count(split, context) for corpus in self.corpora]


Data: TypeAlias = Corpus | Mixture
"""Training data of a run."""


def training_windows(data: Data, seed: int, context: int, batches: Batches) -> Windows:
    """The windows of samples that a run's steps train on. Raises CorpusError, ValueError."""
    from planaria.node.data.windows import Windows

    return Windows(seed, data.shares(context), batches)


def inputs_and_targets(
    data: Data,
    split: str,
    context: int,
    ids: Iterable[int] | NDArray[np.int64],
    apart: bool = False,
) -> tuple[NDArray[np.int64], ...]:
    """Inputs and targets of these samples, int64 [n, context] each; a target that isn't scored is
    UNSCORED. With `apart` also which inputs begin a document, 1 or 0. Raises IndexError,
    CorpusError."""
    import numpy as np

    samples = list(data.by_corpus(split, context, ids))
    rows = [corpus.sample(split, context, own) for corpus, own in samples]
    tokens = np.array(rows, np.int64).reshape(-1, context + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if data.masked:
        scored = [corpus.scored(split, context, own) for corpus, own in samples]
        targets = np.where(np.array(scored, np.bool_).reshape(-1, context), targets, UNSCORED)
    if not apart:
        return inputs, targets
    begins = [corpus.begins(split, context, own) for corpus, own in samples]
    return inputs, targets, np.array(begins, np.int64).reshape(-1, context)


def count_scored(data: Data, context: int, ids: NDArray[np.int64]) -> int:
    """Number of scored targets in these training samples. Raises IndexError, CorpusError."""
    if not data.masked:
        return len(ids) * context
    samples = data.by_corpus(TRAIN, context, ids)
    return sum(int(corpus.scored(TRAIN, context, own).sum()) for corpus, own in samples)


def joint_content(contents: Sequence[str], turns: Sequence[int]) -> str:
    """Content hash of corpora that take these turns, xxh3_128 in hex; a single one keeps its
    own."""
    if len(contents) == 1:
        return contents[0]
    return hash_of([list(pair) for pair in zip(contents, turns, strict=True)])


def check_tokenizers(indexes: Sequence[tuple[Path, Index]]) -> None:
    """Check that all corpora were prepared with the same tokenizer. Raises CorpusError."""
    (first_path, first_index), *others = indexes
    for path, index in others:
        files = first_path / TOKENIZER, path / TOKENIZER
        if index.tokenizer != first_index.tokenizer and not same_tokenizer(*files):
            raise CorpusError(
                f"{path} was prepared with another tokenizer than {first_path}: prepare it with "
                f"--tokenizer {first_path / TOKENIZER}"
            )


def corpus_folders(section: DataSection, given: Sequence[Path] = ()) -> list[Path]:
    """Folders of a run's corpora. `given` overrides the run file: these folders are the corpora, or
    contain them, under any names. Raises CorpusError."""
    if not given:
        return section.folders
    inside = (sorted(folder.iterdir()) if folder.is_dir() else () for folder in given)
    prepared = [folder for folder in chain(given, *inside) if (folder / "index.json").is_file()]
    by_content = {read_index(folder).content: folder for folder in prepared}
    if not section.corpora:
        if section.content not in by_content and len(given) > 1:
            raise CorpusError(
                f"the run has one corpus, but {_in_words(given)} are several folders: name one"
            )
        return [by_content.get(section.content, given[0])]
    missing = [corpus for corpus in section.corpora if corpus.content not in by_content]
    if missing:
        raise CorpusError(
            f"{_in_words(given)} lacks data of the run: a copy of {missing[0].path} "
            f"(content {missing[0].content}) is missing; each corpus is a folder of its own in "
            "there, or is named itself"
        )
    return [by_content[corpus.content] for corpus in section.corpora]


def find_by_content(section: DataSection) -> list[str]:
    """Folders of a run's corpora in those that `PLANARIA_DATA` names, one or several separated by
    blanks; empty: not all are there."""
    named = os.environ.get(SEARCHED, "")
    names = [named] if Path(named).is_dir() else named.split()  # one may have blanks in its name
    given = [Path(name).absolute() for name in names if name]
    wanted = [corpus.content for corpus in section.corpora] or [section.content]
    try:
        folders = corpus_folders(section, given) if given else []
        contents = [read_index(folder).content for folder in folders]
    except (CorpusError, OSError):
        return []
    return [str(folder) for folder in folders] if contents == wanted else []


def _in_words(folders: Sequence[Path]) -> str:
    return " with ".join(map(str, folders))


def index_of(section: DataSection, given: Sequence[Path] = ()) -> Index:
    """Index of all of a run's data, the first corpus's with a joint hash. Raises CorpusError."""
    folders = corpus_folders(section, given)
    indexes = [read_index(path) for path in folders]
    check_tokenizers(list(zip(folders, indexes, strict=True)))
    return _joint_index(indexes, section.turns)


def _joint_index(indexes: Sequence[Index], turns: Sequence[int]) -> Index:
    """Joint index of corpora with a common tokenizer; its splits are the first one's."""
    content = joint_content([index.content for index in indexes], turns)
    return indexes[0].model_copy(update={"content": content})


def open_data(section: DataSection, given: Sequence[Path] = ()) -> Data:
    """The run's prepared data, from `given` or else the run file's folders. Raises CorpusError."""
    corpora = [Corpus.open(path) for path in corpus_folders(section, given)]
    return corpora[0] if len(corpora) == 1 else Mixture(corpora, section.turns)
