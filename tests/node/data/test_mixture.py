from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from planaria.node.data.corpus import Corpus, CorpusError
from planaria.node.data.mixture import (
    Mixture,
    corpus_folders,
    find_by_content,
    index_of,
    inputs_and_targets,
    open_data,
)
from planaria.node.data.prepare import END_OF_DOCUMENT, prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import resolve
from planaria.node.run_file import RunFile, dumps, loads

WORDS = ("apple pear plum cherry " * 40, "seven eight nine ten " * 40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora with the same tokenizer."""
    folder, made = tmp_path_factory.mktemp("mixture"), []
    for name, words, documents in (("fruit", WORDS[0], 30), ("numbers", WORDS[1], 20)):
        source = folder / f"{name}.txt"
        texts = [f"CHAPTER {n}. {words}" for n in range(documents)]
        source.write_text("\n".join(texts), encoding="utf-8")
        tokenizer = made[0] / "tokenizer.json" if made else None
        prepare(Recipe([str(source)], tokenizer, 300, 0.2), folder / name)
        made.append(folder / name)
    return made


def run_of(folders: list[Path], shares: tuple[float, float] = (3, 1)) -> RunFile:
    tables = [
        f"[[data.corpora]]\npath = '{path}'\nshare = {share}\n"
        for path, share in zip(folders, shares, strict=True)
    ]
    return loads("".join(tables))


def test_samples_of_both_have_ids_of_their_own(folders: list[Path]) -> None:
    fruit, numbers = map(Corpus.open, folders)
    both = open_data(run_of(folders).data)
    count = fruit.count("train", 16)
    assert [share.samples for share in both.shares(16)] == [count, numbers.count("train", 16)]
    samples = inputs_and_targets(both, "train", 16, [0, count - 1, count, count + 3])
    of_fruit = inputs_and_targets(fruit, "train", 16, [0, count - 1])
    of_numbers = inputs_and_targets(numbers, "train", 16, [0, 3])
    np.testing.assert_array_equal(samples, np.concatenate((of_fruit, of_numbers), axis=1))
    total = sum(share.samples for share in both.shares(16))
    for outside in (-1, total):
        with pytest.raises(IndexError, match=f"no sample {outside}"):
            inputs_and_targets(both, "train", 16, [outside])
    assert [each.shape for each in inputs_and_targets(both, "train", 16, [])] == [(0, 16)] * 2


def test_what_is_held_out_of_both_is_taken_in_turn_again_and_again(folders: list[Path]) -> None:
    fruit, numbers = map(Corpus.open, folders)
    both = open_data(run_of(folders).data)
    of_fruit, of_numbers = (corpus.count("validation", 16) for corpus in (fruit, numbers))
    ids = both.validation_ids(16, range(8 * (of_fruit + of_numbers)))
    own = ids[ids < of_fruit]
    assert len(own) == 6 * (of_fruit + of_numbers)
    np.testing.assert_array_equal(own, np.arange(len(own)) % of_fruit)
    others = ids[ids >= of_fruit] - of_fruit
    np.testing.assert_array_equal(others, np.arange(len(others)) % of_numbers)


def test_the_content_of_a_mixture_is_that_of_its_corpora_and_shares(folders: list[Path]) -> None:
    contents = {
        index_of(run_of(some, shares).data).content
        for some, shares in ((folders, (3, 1)), (folders, (1, 3)), (folders[::-1], (3, 1)))
    }
    assert len(contents) == 3
    assert index_of(run_of(folders, (0.75, 0.25)).data).content in contents
    data = open_data(run_of(folders).data)
    assert data.content == index_of(run_of(folders).data).content
    alone = loads(f"data.path = '{folders[0]}'").data
    assert index_of(alone).content == Corpus.open(folders[0]).content == open_data(alone).content


def test_a_resolved_run_says_what_each_corpus_holds(folders: list[Path], tmp_path: Path) -> None:
    run = resolve(run_of(folders))
    assert [c.content for c in run.data.corpora] == [Corpus.open(f).content for f in folders]
    assert loads(dumps(run)) == run == resolve(run)
    assert run.model.vocabulary == Corpus.open(folders[0]).vocabulary
    for path, name in zip(folders, ("b", "a"), strict=True):
        shutil.copytree(path, tmp_path / name)
    assert corpus_folders(run.data, [tmp_path]) == [tmp_path / "b", tmp_path / "a"]
    assert corpus_folders(run.data, folders[::-1]) == folders
    assert isinstance(open_data(run.data, [tmp_path]), Mixture)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(CorpusError, match=f"a copy of {folders[0]} .* is missing; each corpus"):
        corpus_folders(run.data, [tmp_path])


def test_data_is_found_by_content_where_the_environment_says(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = resolve(loads(f"data.path = '{folders[1]}'\nmodel.stages = 2")).data
    assert find_by_content(described) == []
    monkeypatch.setenv("PLANARIA_DATA", f"{tmp_path / 'none'} {folders[0].parent}")
    assert find_by_content(described) == [str(folders[1])]
    assert find_by_content(resolve(run_of(folders[::-1])).data) == [*map(str, folders[::-1])]
    assert corpus_folders(described, [folders[0].parent]) == [folders[1]]
    assert find_by_content(described.model_copy(update={"content": "0" * 32})) == []
    monkeypatch.setenv("PLANARIA_DATA", str(folders[0]))
    assert find_by_content(described) == [], "what is there is other data"
    shutil.copytree(folders[1], spaced := tmp_path / "my data")
    monkeypatch.setenv("PLANARIA_DATA", str(spaced))
    assert find_by_content(described) == [str(spaced)]


def test_corpora_of_different_tokenizers_are_refused(folders: list[Path], tmp_path: Path) -> None:
    prepare(Recipe([str(folders[1].parent / "numbers.txt")], None, 280, 0.2), tmp_path / "own")
    with pytest.raises(CorpusError, match=r"prepare it with --tokenizer .*fruit/tokenizer.json"):
        resolve(run_of([folders[0], tmp_path / "own"]))
    with pytest.raises(CorpusError, match="another tokenizer"):
        open_data(run_of([folders[0], tmp_path / "own"]).data)
    rewritten = tmp_path / "tokenizer.json"
    rewritten.write_text(json.dumps(json.loads((folders[0] / "tokenizer.json").read_text())))
    text = str(folders[1].parent / "numbers.txt")
    recipe = Recipe([text], rewritten, validation=0.2, end_token=END_OF_DOCUMENT)
    prepare(recipe, tmp_path / "again")
    resolve(run_of([folders[0], tmp_path / "again"]))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_corpus_that_is_not_there_is_named(folders: list[Path], missing: int) -> None:
    paths = list(folders)
    paths[missing] = Path("nowhere")
    with pytest.raises(CorpusError, match=r"there is no prepared data at .*nowhere"):
        resolve(run_of(paths))
