import fcntl
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import count, starmap
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import distributed
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planaria.node.data.executors
import planaria.node.data.recipe
import planaria.node.data.shard_writers
from planaria.node.data import corpus as module
from planaria.node.data.corpus import Corpus, CorpusError, RowError, file_checksum, read_index
from planaria.node.data.documents import (
    LINES_PER_DOCUMENT,
    documents,
    files_of,
    lines_to_documents,
)
from planaria.node.data.executors import Spread, over_dask, over_processes
from planaria.node.data.mixture import inputs_and_targets
from planaria.node.data.parts import Tokenizing, held_out_rank
from planaria.node.data.prepare import END_OF_DOCUMENT, prepare
from planaria.node.data.recipe import Recipe

AUSTEN = Path(__file__).parents[3] / "corpus" / "austen"
TEXTS = [
    f"Letter {i}. It was <|endoftext|> on the {i * 7}th that naïve “Anne” wrote: £{i**3}, 漢字."
    for i in range(40)
]


def write_jsonl(path: Path, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(TEXTS)))
    return path


def write_parquet(path: Path, field: str = "text") -> Path:
    rows = pyarrow.table({"id": range(len(TEXTS)), field: TEXTS})
    pyarrow.parquet.write_table(rows, path, row_group_size=7)
    return path


def make(
    out: Path, texts: list[str] = TEXTS, vocabulary: int = 300, validation: float = 0.2
) -> Corpus:
    source = out.parent / f"{out.name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = Recipe([str(source)], vocabulary=vocabulary, validation=validation)
    return prepare(recipe, out)[0]


def stream(corpus: Corpus, split: str) -> np.ndarray:
    shards = corpus.index.splits[split].shards
    kind = np.dtype(corpus.index.dtype).newbyteorder("<")
    parts = [np.fromfile(corpus.path / shard.name, kind) for shard in shards]
    return np.concatenate(parts).astype(np.int64)


def decoded(corpus: Corpus, split: str) -> list[str]:
    """Decode the documents of a split from its tokens."""
    tokens = stream(corpus, split)
    assert tokens[-1] == corpus.index.end_of_document
    ends = np.flatnonzero(tokens == corpus.index.end_of_document)
    tokenizer = corpus.tokenizer()
    parts = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture
def copy(corpus: Corpus, tmp_path: Path) -> Path:
    """A copy of the prepared data, to damage."""
    return Path(shutil.copytree(corpus.path, tmp_path / "copy"))


# Documents


def documents_of(source: str, *how: Any, **named: Any) -> Iterator[Any]:
    """Yield the documents of a source; raise CorpusError for the first bad row, too."""
    for file in files_of(source).files:
        for document in documents(file, *how, **named):
            if isinstance(document, RowError):
                raise document
            yield document


def test_every_kind_of_input_gives_the_same_documents(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    jsonl = write_jsonl(tmp_path / "a.jsonl")
    parquet = write_parquet(tmp_path / "a.parquet")
    text = tmp_path / "a.txt"
    text.write_text("".join(f"=====\n{t}\n" for t in TEXTS))
    folders = []
    for file in (jsonl, parquet):
        folders.append(tmp_path / f"folder-{file.suffix[1:]}")
        folders[-1].mkdir()
        shutil.copy(file, folders[-1])
    assert list(documents_of(str(jsonl))) == TEXTS
    assert list(documents_of(str(parquet))) == TEXTS
    assert list(documents_of(str(text), separator=re.compile("=+\n?"))) == TEXTS
    assert list(documents_of(str(folders[0]))) == TEXTS
    for folder in folders:
        assert list(documents_of(f"hf:{folder}")) == TEXTS


def test_datasets_by_configuration_and_split(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_jsonl(tmp_path / "letters.jsonl", field="story")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n"
        "  - split: unseen\n    path: letters.jsonl\n---\n"
    )
    assert list(documents_of(f"hf:{tmp_path}:small@unseen", "story")) == TEXTS
    with pytest.raises(CorpusError, match=r"row 0 has no field 'text' but id, story"):
        list(documents_of(f"hf:{tmp_path}:small@unseen"))
    with pytest.raises(CorpusError, match=r"can't read the dataset hf:.*train"):
        list(documents_of(f"hf:{tmp_path}:small"))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/0.txt", "ignored.md"):
        (tmp_path / name).write_text(name)
    assert list(documents_of(str(tmp_path))) == ["a.txt", "b.txt", "sub/0.txt"]


def test_text_is_cut_at_chapter_headings() -> None:
    lines = ["A NOVEL\n", "\n", "CHAPTER I\n", "\n", "One.\n", "Chapter and verse.\n", "\n"]
    lines += ["  Chapter 2\n", *["word\n", "\n"] * LINES_PER_DOCUMENT]
    first, second, third = lines_to_documents(lines)
    assert first == "A NOVEL"
    assert second == "CHAPTER I\n\nOne.\nChapter and verse."
    assert third.startswith("  Chapter 2\nword\n")


def test_text_without_headings_is_cut_at_blank_lines() -> None:
    lines = ["word\n", "word\n", "\n"] * LINES_PER_DOCUMENT
    parts = list(lines_to_documents(lines))
    assert len(parts) == 3
    assert all(part.startswith("word") and part.endswith("word") for part in parts)
    assert sum(part.count("word") for part in parts) == 2 * LINES_PER_DOCUMENT


def test_a_separator_of_ones_own_is_the_only_one() -> None:
    lines = ["CHAPTER I\n", *["word\n", "\n"] * LINES_PER_DOCUMENT, "Act 1\n", "CHAPTER II\n"]
    assert len(list(lines_to_documents(lines, re.compile("Act ")))) == 2
    assert list(lines_to_documents(lines, re.compile("Act ")))[1] == "1\nCHAPTER II"
    assert list(lines_to_documents(lines, re.compile("(?=Act )")))[1] == "Act 1\nCHAPTER II"


def test_the_shipped_novels_are_cut_into_their_chapters() -> None:
    chapters = {"pride-and-prejudice": 61, "northanger-abbey": 31, "persuasion": 24}
    for name, number in chapters.items():
        front, *rest = documents(str(AUSTEN / f"{name}.txt"))
        assert len(rest) == number
        numbers = [re.match(r"chapter (\d+)\n", text, re.IGNORECASE) for text in rest]
        assert [int(m[1]) for m in numbers if m] == list(range(1, number + 1))
        assert all(3000 < len(text) < 40_000 for text in rest)
        assert all((front + text).isascii() for text in rest)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            b"a\ncaf\xe9",
            r"a\.txt, line 2 is not UTF-8 \(byte 0xe9\): convert .*: iconv -f WIN.* > NEW",
        ),
        ("a.jsonl", b"[1]", r"line 1 has no field 'text' but list"),
        ("a.jsonl", b'{"text": 3}', r"line 1: 'text' is no text but int"),
        ("a.parquet", b"PAR", r"can't read .*a\.parquet"),
        ("a.pdf", b"", r"a\.pdf does not end in \.txt"),
    ],
)
def test_inputs_that_make_no_sense_are_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        list(documents_of(str(tmp_path / name)))


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no file or folder nowhere"):
        list(documents_of("nowhere"))
    with pytest.raises(CorpusError, match=r"the folder .* has no file that ends in \.txt"):
        list(documents_of(str(tmp_path)))
    with pytest.raises(CorpusError, match="no field 'story' but id, text"):
        list(documents_of(str(write_parquet(tmp_path / "a.parquet")), "story"))


@pytest.mark.parametrize(
    ("library", "source"), [("datasets", "hf:someone/something"), ("pyarrow", "a.parquet")]
)
def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, source: str
) -> None:
    write_parquet(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    remedy = rf"can't read {source}: {library} is not installed: pip install 'planaria\[data\]'"
    with pytest.raises(CorpusError, match=remedy):
        list(documents_of(source))


# Preparing


def test_every_document_is_in_one_split_and_decodes(corpus: Corpus) -> None:
    train, validation = decoded(corpus, "train"), decoded(corpus, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    splits = corpus.index.splits
    assert splits["train"].documents == len(train)
    assert splits["validation"].documents == len(validation)
    assert splits["train"].text_bytes == sum(len(text.encode()) for text in train)
    assert 2 <= len(validation) <= 16


def test_the_same_input_gives_the_same_content(corpus: Corpus, tmp_path: Path) -> None:
    assert make(tmp_path / "again").content == corpus.content
    assert make(tmp_path / "other", TEXTS[:-1]).content != corpus.content


def test_the_tokenizer_does_not_learn_from_what_is_held_out(tmp_path: Path) -> None:
    def text(ordinal: int) -> str:
        hidden = ordinal % 5 == 0
        words = "qwqwqw " * 50 if hidden else "plain words " * 50
        candidates = (f"{words}{ordinal} {n}" for n in count())
        return next(t for t in candidates if (held_out_rank(ordinal, t) < 0.2) == hidden)

    corpus = make(tmp_path / "data", [text(i) for i in range(20)])
    vocabulary = corpus.tokenizer().get_vocab()
    assert any("plain" in token for token in vocabulary)
    assert not any("qw" in token for token in vocabulary)
    assert corpus.index.splits["validation"].documents == 4


def test_a_given_tokenizer_is_used_and_copied(corpus: Corpus, tmp_path: Path) -> None:
    given_file = corpus.path / "tokenizer.json"
    recipe = Recipe([str(AUSTEN / "persuasion.txt")], tokenizer=given_file)
    other, _ = prepare(recipe, tmp_path / "data")
    assert (other.path / "tokenizer.json").read_bytes() == given_file.read_bytes()
    assert other.vocabulary == corpus.vocabulary
    assert sum(split.documents for split in other.index.splits.values()) == 25


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    recipe = Recipe([str(AUSTEN / "persuasion.txt")], tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match="can't read the tokenizer"):
        prepare(recipe, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_large_vocabularies_take_four_bytes(corpus: Corpus, tmp_path: Path) -> None:
    fields = json.loads((corpus.path / "tokenizer.json").read_text())
    wide = {"id": 70_000, "content": "that", "single_word": False, "lstrip": False}
    wide |= {"rstrip": False, "normalized": False, "special": False}
    fields["added_tokens"].append(wide)
    fields["model"]["vocab"]["that"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    source = write_jsonl(tmp_path / "a.jsonl")
    recipe = Recipe([str(source)], tmp_path / "tokenizer.json", 300, 0.2, end_token=END_OF_DOCUMENT)
    wide_corpus, _ = prepare(recipe, tmp_path / "data")
    assert (wide_corpus.index.dtype, wide_corpus.vocabulary) == ("uint32", 70_001)
    assert stream(wide_corpus, "train").max() == 70_000
    texts = decoded(wide_corpus, "train") + decoded(wide_corpus, "validation")
    assert sorted(texts) == sorted(TEXTS)


def test_out_is_only_replaced_by_force_and_only_if_it_is_prepared_data(tmp_path: Path) -> None:
    out = tmp_path / "data"
    out.mkdir()  # an empty folder is accepted
    first = make(out)
    other = Recipe([str(write_jsonl(tmp_path / "b.jsonl"))], vocabulary=310, validation=0.2)
    same = Recipe([str(tmp_path / "data.jsonl")], vocabulary=300, validation=0.2)
    assert prepare(same, out)[1] is False
    with pytest.raises(CorpusError, match=f"content {first.content[:8]}.*--force"):
        prepare(other, out)
    assert Corpus.open(out, verify=True).content == first.content
    replaced, written = prepare(other, out, force=True)
    assert written
    assert replaced.content == Corpus.open(out, verify=True).content != first.content
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(CorpusError, match="isn't prepared data"):
        prepare(other, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_nothing_is_left_of_a_preparation_that_fails(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    with source.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "Is it?"}]}')
    with pytest.raises(CorpusError, match="there are documents of several kinds"):
        prepare(Recipe([str(source)]), tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of very different sizes."""
    folder = tmp_path_factory.mktemp("stories")
    for number, size in enumerate((30, 1, 7, 0, 12)):
        lines = [json.dumps({"text": f"story {number}.{i}"}) + "\n" for i in range(size)]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


def test_it_is_the_same_data_however_the_work_is_spread(stories: Path, tmp_path: Path) -> None:
    def make_with(spread: Spread | None, name: str) -> Corpus:
        recipe = Recipe([str(stories), str(stories / "2.jsonl")], vocabulary=280, validation=0.2)
        return prepare(recipe, tmp_path / name, spread=spread)[0]

    alone = make_with(None, "alone")
    ranks = [
        (text, held_out_rank(ordinal, text) < 0.2)
        for ordinal, text in enumerate(
            text
            for name in (*sorted(stories.iterdir()), stories / "2.jsonl")
            for text in documents(str(name))
        )
    ]
    for split in ("train", "validation"):
        assert decoded(alone, split) == [t for t, out in ranks if out == (split == "validation")]
    for name, spread in ("three", over_processes(3)), ("two", over_processes(2)):
        assert make_with(spread, name).content == alone.content
    assert not list(tmp_path.glob(".*"))


def test_it_is_the_same_data_on_a_dask_cluster(stories: Path, tmp_path: Path) -> None:
    recipe = Recipe([str(stories)], vocabulary=280, validation=0.2)
    alone, _ = prepare(recipe, tmp_path / "alone")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        over_dask(cluster.scheduler_address) as spread,
    ):
        assert prepare(recipe, tmp_path / "dask", spread=spread)[0].content == alone.content


class NotInstalled:
    """Work whose code the other side doesn't have."""

    def __call__(self, number: int) -> int:
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, ("no_such_package",)


def test_a_dask_cluster_that_lacks_a_package_is_told_which() -> None:
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        over_dask(cluster.scheduler_address) as spread,
        pytest.raises(CorpusError, match=r"says No module named 'no_such_package': install the"),
    ):
        list(spread(NotInstalled(), [1, 2]))


def test_a_dask_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planaria.node.data.executors, "WORKERS_COME", 0.5)
    nowhere = "tcp://127.0.0.1:9"
    with pytest.raises(CorpusError, match=f"no Dask scheduler answers at {nowhere}"):
        over_dask(nowhere).__enter__()


def test_another_try_does_only_what_was_not_done(stories: Path, tmp_path: Path) -> None:
    source = tmp_path / "stories"
    shutil.copytree(stories, source)
    whole = (source / "2.jsonl").read_text()
    (source / "2.jsonl").write_text(f'{whole}{{"messages": [{{"role": "user"}}]}}')
    recipe = Recipe([str(source)], tokenizer=make(tmp_path / "other").path / "tokenizer.json")
    with pytest.raises(
        CorpusError, match=r"there are documents of several kinds.*\.data\.parts for the next try"
    ):
        prepare(recipe, tmp_path / "data")
    parts = tmp_path / ".data.parts"
    made = {part: part.stat().st_mtime_ns for part in parts.glob("*/part.json")}
    assert len(made) == 2
    (source / "2.jsonl").write_text(whole)

    def keeping(do: Callable[..., Any], *columns: Sequence[Any]) -> Iterator[Any]:
        results = list(starmap(do, zip(*columns, strict=True)))
        assert {part: part.stat().st_mtime_ns for part in made} == made
        return iter(results)

    again, _ = prepare(recipe, tmp_path / "data", spread=keeping)
    assert again.content == prepare(recipe, tmp_path / "fresh")[0].content
    assert not parts.exists()


@pytest.mark.parametrize("spread", [None, over_processes(2)])
def test_bad_rows_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spread: Spread | None
) -> None:
    """Bad rows count in the ordinals of documents, by which documents are held out."""
    bad = [{"text": None}, {"text": "\ud800"}, {"body": "a"}]
    rows: list[dict[str, Any]] = []
    for name in ("a", "b"):
        of_file = [row for i in range(20) for row in ({"text": f"{name} {i}"}, *bad[i : i + 1])]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in of_file))
        rows += of_file
    recipe = Recipe([str(tmp_path)], vocabulary=280, validation=0.2)
    corpus, _ = prepare(recipe, tmp_path / "out", spread=spread)
    good = [(i, str(row["text"])) for i, row in enumerate(rows) if row not in bad]
    held_out = [text for ordinal, text in good if held_out_rank(ordinal, text) < 0.2]
    assert decoded(corpus, "validation") == held_out
    assert decoded(corpus, "train") == [text for _, text in good if text not in held_out]
    assert corpus.index.source is not None
    assert (corpus.index.source.rows, corpus.index.source.left_out) == (46, {"bad rows": (6, 0)})
    assert "left out 6 of 46 rows: " in caplog.text
    assert "a.jsonl, line 2: 'text' is null" in caplog.text


def test_too_many_bad_rows_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten bad rows are always left out, and more up to a share of the rows of all files."""
    for name, good, bad in (("a", 20, 11), ("b", 80, 0)):
        rows = ['{"text": "Good."}\n'] * good + ["{\n"] * bad
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    recipe = Recipe([str(tmp_path)], vocabulary=280, validation=0.2)
    with pytest.raises(
        CorpusError,
        match=r"11 of 111 rows can't be prepared, which is more than --skip-bad 0\.01 leaves out: "
        r".*a\.jsonl, line 21 is not JSON.*; .*line 22 is not JSON.*kept in .*for the next try",
    ):
        prepare(recipe, tmp_path / "out")
    more = replace(recipe, skip_bad=0.1)
    assert prepare(more, tmp_path / "out")[0].index.source.rows == 111  # type: ignore[union-attr]
    with pytest.raises(CorpusError, match=r"found 1 documents.*\(left out: .*line 1: 'text' is "):
        make(tmp_path / "few", [None, "a"])  # type: ignore[list-item]
    monkeypatch.setattr(planaria.node.data.recipe, "HOPELESS", 5)
    (tmp_path / "a.jsonl").write_text("{\n" * 30 + '{"text": "Good."}\n' * 5000)
    with pytest.raises(CorpusError, match=r"5 of the first 5 rows can't be prepared: .*line 1 is"):
        prepare(more, tmp_path / "hopeless")


def test_data_that_is_there_already_is_known_before_anything_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    recipe = Recipe([str(source)], vocabulary=300)
    first, written = prepare(recipe, tmp_path / "out")
    assert written
    tokenized, write = Counter[str](), Tokenizing.write

    def counted(tokenizing: Tokenizing, file: str, *how: Any) -> Any:
        tokenized[file] += 1
        return write(tokenizing, file, *how)

    monkeypatch.setattr(Tokenizing, "write", counted)
    again = partial(prepare, recipe, tmp_path / "out")
    assert again() == (ANY, False)
    assert not tokenized
    os.utime(source, (1, 1))
    assert again() == (ANY, False)
    assert tokenized[str(source)] == 1
    assert again() == (ANY, False)
    assert tokenized[str(source)] == 1
    with pytest.raises(CorpusError, match="--force"):
        prepare(replace(recipe, vocabulary=290), tmp_path / "out")
    assert Corpus.open(tmp_path / "out", verify=True).content == first.content


def test_ctrl_c_ends_processes_at_work_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    results = over_processes(2)(_sleep, [0, 600, 600])
    assert next(results) == 0
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert capfd.readouterr().err == ""
    assert list(over_processes(2)(_interrupts, [0])) == [(signal.SIG_DFL, False)]


def _sleep(seconds: int) -> int:
    threading.Event().wait(seconds)
    return seconds


def _interrupts(_: int) -> tuple[object, bool]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return signal.getsignal(signal.SIGINT), signal.SIGINT in blocked


def test_a_process_that_is_killed_is_named() -> None:
    with pytest.raises(CorpusError, match=r"one of 2 processes was killed.*--jobs 1"):
        list(over_processes(2)(_kill_itself, [0, 1, 2]))


def _kill_itself(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_process_prepares_a_folder_at_a_time(tmp_path: Path) -> None:
    (tmp_path / ".data.parts").mkdir()
    with (tmp_path / ".data.parts" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CorpusError, match=r"another process prepares .*data: wait for it"):
            make(tmp_path / "data")


def test_both_sides_need_a_document(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"found 1 documents.*--document-separator"):
        make(tmp_path / "one", TEXTS[:1])
    with pytest.raises(CorpusError, match="found 0 documents"):
        make(tmp_path / "none", ["  \n"])


@pytest.mark.parametrize(
    ("documents", "validation", "held_out"),
    [(2, 0.05, 1), (3, 0.05, 1), (3, 0.0001, 1), (3, 0.9999, 2), (30, 0.1, range(2, 5))],
)
def test_of_a_few_documents_about_the_share_is_held_out(
    tmp_path: Path, documents: int, validation: float, held_out: int | range
) -> None:
    """This holds whatever the ranks of the documents are; other texts have other ranks."""
    numbers = held_out if isinstance(held_out, range) else [held_out]
    for first in range(6):
        corpus = make(tmp_path / f"{first}", TEXTS[first:][:documents], 300, validation)
        train, validate = decoded(corpus, "train"), decoded(corpus, "validation")
        assert len(validate) in numbers
        assert sorted(train + validate) == sorted(TEXTS[first:][:documents])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation": 0.0}, "between 0 and 1, not 0.0"),
        ({"validation": 1.0}, "between 0 and 1, not 1.0"),
        ({"vocabulary": 256}, "--vocabulary 256 is too small"),
        ({"document_separator": "("}, r"'\(' is not a regular expression"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        prepare(Recipe(**({"inputs": [str(AUSTEN)]} | fields)), tmp_path / "data")  # type: ignore[arg-type]


@pytest.fixture
def served(stories: Path) -> Iterator[str]:
    """Run a web server with the stories, and yield its URL."""
    handler = partial(QuietHandler, directory=str(stories))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_inputs_may_lie_elsewhere(stories: Path, served: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "other").path / "tokenizer.json"

    def content(name: str, *inputs: str) -> str:
        return prepare(Recipe(inputs, tokenizer, validation=0.2), tmp_path / name)[0].content

    here = content("here", str(stories))
    assert content("folder", f"{served}/") == here
    assert content("files", *(f"{served}/{number}.jsonl" for number in range(5))) == here
    rows = pyarrow.table({"text": TEXTS})
    system = fsspec.filesystem("memory")
    with system.open("/texts/a.parquet", "wb") as file:
        pyarrow.parquet.write_table(rows, file)
    assert list(documents_of("memory://texts")) == TEXTS


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("SERVED/missing.jsonl", r"can't read http.*/missing\.jsonl: there is no such file"),
        ("SERVED/missing/", r"there is no file at http.*/missing/ that ends in"),
        ("memory://nothing/", r"there is no file at memory://nothing/ that ends in \.txt"),
        ("thing://bucket/a.txt", r"can't read thing://bucket/a\.txt: Protocol not known: thing"),
    ],
)
def test_places_without_a_file_are_named(served: str, place: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        list(documents_of(place.replace("SERVED", served)))


# Reading


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planaria.node.data.shard_writers, "SHARD_TOKENS", 23)
        return make(tmp_path_factory.mktemp("sharded") / "data")


@settings(deadline=None)
@given(st.data())
def test_samples_tile_the_split_whatever_its_shards(
    sharded: Corpus, corpus: Corpus, data: st.DataObject
) -> None:
    split = data.draw(st.sampled_from(["train", "validation"]))
    tokens = stream(sharded, split)
    np.testing.assert_array_equal(tokens, stream(corpus, split))
    assert len(sharded.index.splits[split].shards) == -(-len(tokens) // 23) > 3
    context = data.draw(st.integers(1, len(tokens) - 1))
    number = sharded.count(split, context)
    assert number == (len(tokens) - 1) // context
    index = data.draw(st.integers(0, number - 1))
    sample = sharded.sample(split, context, index)
    assert sample.dtype == np.int64
    np.testing.assert_array_equal(sample, tokens[index * context : (index + 1) * context + 1])
    batch = inputs_and_targets(sharded, split, context, [index, number - 1, index])
    expected = np.stack([sample, sharded.sample(split, context, number - 1), sample])
    np.testing.assert_array_equal(batch, (expected[:, :-1], expected[:, 1:]))


def test_samples_that_are_not_there(corpus: Corpus) -> None:
    for index in (-1, corpus.count("train", 16)):
        with pytest.raises(IndexError, match=f"no sample {index} of context 16"):
            corpus.sample("train", 16, index)
    tokens = corpus.index.splits["validation"].tokens
    assert corpus.count("validation", tokens - 1) == 1
    with pytest.raises(CorpusError, match=f"has {tokens} tokens, but one sample.*shorten"):
        corpus.count("validation", tokens)


def test_missing_and_damaged_data_is_named_with_a_remedy(copy: Path, tmp_path: Path) -> None:
    shard, index = copy / "train-00000.bin", copy / "index.json"
    intact, text = shard.read_bytes(), index.read_text()

    def refused(message: str, verify: bool = False) -> None:
        with pytest.raises(CorpusError, match=message) as error:
            Corpus.open(copy, verify)
        assert f"planaria data prepare INPUT... --out {copy}" in str(error.value)

    Corpus.open(copy, verify=True)
    shard.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    Corpus.open(copy)
    refused(r"train-00000\.bin is damaged: its checksum is \w{32}, the index says ", verify=True)
    shard.write_bytes(intact[:-2])
    refused(f"has {len(intact) - 2} bytes where the index says {len(intact)}")
    shard.unlink()
    refused(r"train-00000\.bin is missing")
    index.write_text(text.replace('"format": 1', '"format": 9'))
    refused("prepared in format 9, and this planaria reads format 1")
    index.write_text(text.replace('"vocabulary": 300', '"vocabulary": 301'))
    refused("its content hash is wrong")
    index.write_text("[]")
    refused(r"index\.json is damaged")
    index.write_text(text[:50])
    refused(r"index\.json is damaged")
    index.unlink()
    refused("there is no prepared data at")


def test_texts_that_are_not_prepared_are_named_with_the_command(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl")
    for path in (tmp_path, file):
        with pytest.raises(CorpusError, match=rf"planaria data prepare {path} --out ANOTHER_FO"):
            read_index(path)


def test_small_files_are_small_and_regular(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST_TOKENIZER", 1000)
    with pytest.raises(CorpusError, match=r"can't read the tokenizer .* it has more than 1000"):
        Corpus.open(copy).tokenizer()
    (copy / "index.json").unlink()
    os.mkfifo(copy / "index.json")
    with pytest.raises(CorpusError, match=r"can't read .*index\.json: it is no regular file"):
        read_index(copy)


# Data that is damaged while a node reads it


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def test_a_shard_that_is_cut_short_under_its_reader_is_named(copy: Path) -> None:
    corpus, shard = Corpus.open(copy), copy / "train-00000.bin"
    size, last = shard.stat().st_size, corpus.count("train", 16) - 1
    inputs_and_targets(corpus, "train", 16, [0, last])
    os.truncate(shard, 10)
    for index in (0, last):
        with pytest.raises(CorpusError, match=rf"{shard} has 10 bytes where the index says {size}"):
            corpus.sample("train", 16, index)


@pytest.mark.parametrize("read_before", [False, True])
def test_a_token_that_is_another_one_now_is_noticed_before_it_is_used(
    copy: Path, read_before: bool
) -> None:
    corpus, shard = Corpus.open(copy), copy / "train-00000.bin"
    sample, intact = Corpus.open(copy).sample("train", 16, 0), shard.read_bytes()
    if read_before:
        corpus.sample("train", 16, 0)
    overwrite(shard, 4, bytes([intact[4] ^ 1]))
    expected = corpus.index.splits["train"].shards[0].checksum
    checksum = file_checksum(shard)
    problem = f"{shard} is damaged: its checksum is {checksum}, the index says {expected}"
    for _ in range(2):
        with pytest.raises(CorpusError, match=re.escape(problem)):
            corpus.sample("train", 16, 0)
    overwrite(shard, 4, intact[4:5])
    np.testing.assert_array_equal(corpus.sample("train", 16, 0), sample)


def test_a_token_that_the_model_does_not_know_is_refused(copy: Path) -> None:
    """The checksums are right, so the data was prepared wrongly."""
    shard = copy / "train-00000.bin"
    overwrite(shard, 4, (300).to_bytes(2, "little"))
    index = read_index(copy)
    index.splits["train"].shards[0].checksum = file_checksum(shard)
    index.content = index.content_hash()
    (copy / "index.json").write_text(index.model_dump_json())
    with pytest.raises(CorpusError, match="has token 300, but by its index tokens are below 300"):
        Corpus.open(copy).sample("train", 16, 0)


def test_a_shard_that_is_replaced_by_its_like_is_read_on(copy: Path, tmp_path: Path) -> None:
    corpus, shard = Corpus.open(copy), copy / "train-00000.bin"
    sample = corpus.sample("train", 16, 0)
    shutil.copyfile(shard, tmp_path / "same")
    (tmp_path / "same").replace(shard)
    np.testing.assert_array_equal(corpus.sample("train", 16, 0), sample)
    shard.unlink()
    with pytest.raises(CorpusError, match=rf"can't read {shard}: No such file"):
        corpus.sample("train", 16, 0)


def test_each_shard_is_verified_once(sharded: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus.open(sharded.path)
    reads: Counter[str] = Counter()
    verified = corpus._all_shards()
    for shard in verified:
        monkeypatch.setattr(
            shard, "_check_size", lambda _, name=shard.file.name: reads.update([name])
        )
    corpus.verify_in_background()
    corpus.verify_in_background()
    for split in ("train", "validation"):
        inputs_and_targets(corpus, split, 16, range(corpus.count(split, 16)))
    assert corpus._verifier is not None
    corpus._verifier.join()
    assert reads == Counter(shard.file.name for shard in verified)


def test_what_the_background_finds_is_logged(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus, shard = Corpus.open(copy), copy / "validation-00000.bin"
    overwrite(shard, 0, bytes([shard.read_bytes()[0] ^ 1]))
    corpus.verify_in_background()
    assert corpus._verifier is not None
    corpus._verifier.join()
    assert f"{shard} is damaged" in caplog.text
    corpus.sample("train", 16, 0)
