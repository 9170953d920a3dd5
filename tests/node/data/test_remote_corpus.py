"""Tests of prepared data on a web server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from planaria.node.data import remote_corpus
from planaria.node.data.blocks import BLOCK
from planaria.node.data.corpus import TRAIN, VALIDATION, Corpus, CorpusError
from planaria.node.data.mixture import Mixture, inputs_and_targets
from planaria.node.data.remote_corpus import local_folder_of, make_stand_in
from tests.range_server import Served, range_server

CONTEXT = 32
SHARD = "train-00000.bin"


@pytest.fixture
def served(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A web server with a copy of the prepared prose."""
    monkeypatch.setattr(remote_corpus, "PAUSES", (0.0, 0.0))
    copied = shutil.copytree(data, tmp_path / "there")
    with range_server(copied) as served:
        yield served


def opened(served: Served, folder: Path) -> Corpus:
    make_stand_in(served.url, folder)
    return Corpus.open(folder)


def test_samples_are_those_that_lie_there_and_no_more_is_read(
    data: Path, served: Served, tmp_path: Path
) -> None:
    here, away = Corpus.open(data), opened(served, tmp_path / "here")
    assert away.content == here.content
    last = here.count(TRAIN, CONTEXT) - 1
    for split, ids in ((TRAIN, [0, last, 7, 0, BLOCK // 2 // CONTEXT]), (VALIDATION, [3])):
        assert np.array_equal(
            inputs_and_targets(away, split, CONTEXT, ids),
            inputs_and_targets(here, split, CONTEXT, ids),
        )
    read, size = served.sent(SHARD), (data / SHARD).stat().st_size
    assert read == 2 * BLOCK + size % BLOCK < size, "the first two blocks, and the last one"


def test_all_of_it_can_be_verified(served: Served, tmp_path: Path) -> None:
    (served.folder / "chat_template.jinja").write_text("of one that chats")
    make_stand_in(served.url, tmp_path / "here")
    assert (tmp_path / "here/chat_template.jinja").read_text() == "of one that chats"
    Corpus.open(tmp_path / "here", verify=True)
    assert served.sent(SHARD) == (served.folder / SHARD).stat().st_size


def test_what_is_expected_is_there_when_it_is_wanted(
    data: Path, served: Served, tmp_path: Path
) -> None:
    away = opened(served, tmp_path / "here")
    away.prefetch(TRAIN, CONTEXT, [5, 900])
    assert np.array_equal(
        inputs_and_targets(away, TRAIN, CONTEXT, [5, 900]),
        inputs_and_targets(Corpus.open(data), TRAIN, CONTEXT, [5, 900]),
    )
    (served.folder / SHARD).unlink()
    inputs_and_targets(away, TRAIN, CONTEXT, [5, 900])


def test_several_corpora_some_elsewhere(data: Path, served: Served, tmp_path: Path) -> None:
    here, away = Corpus.open(data), opened(served, tmp_path / "here")
    both_local, mixed = Mixture([here, here], [1, 2]), Mixture([here, away], [1, 2])
    ids = [0, here.count(TRAIN, CONTEXT) + 3]
    assert mixed.elsewhere and not both_local.elsewhere
    mixed.prefetch(TRAIN, CONTEXT, ids)
    for mine, theirs in zip(
        inputs_and_targets(both_local, TRAIN, CONTEXT, ids),
        inputs_and_targets(mixed, TRAIN, CONTEXT, ids),
        strict=True,
    ):
        assert np.array_equal(mine, theirs)


def test_a_block_that_is_damaged_is_named_and_others_are_read(
    served: Served, tmp_path: Path
) -> None:
    file = served.folder / SHARD
    damaged = bytearray(file.read_bytes())
    damaged[BLOCK + 5] ^= 1
    file.write_bytes(damaged)
    away = opened(served, tmp_path / "here")
    away.sample(TRAIN, CONTEXT, 0)
    with pytest.raises(CorpusError, match=rf"block 1 of http.*/{SHARD} is damaged"):
        away.sample(TRAIN, CONTEXT, BLOCK // 2 // CONTEXT + 1)


def test_a_list_of_checksums_is_kept_and_verified(served: Served, tmp_path: Path) -> None:
    folder, listed = tmp_path / "here", f"{SHARD}.blocks"
    opened(served, folder).sample(TRAIN, CONTEXT, 0)
    Corpus.open(folder).sample(TRAIN, CONTEXT, 0)
    assert [name for name, _ in served.asked].count(listed) == 1
    (folder / listed).write_bytes(b"x" * (folder / listed).stat().st_size)
    Corpus.open(folder).sample(TRAIN, CONTEXT, 0)
    (folder / listed).unlink()
    (served.folder / listed).write_bytes(b"x" * len((served.folder / listed).read_bytes()))
    with pytest.raises(CorpusError, match=r"train-00000\.bin\.blocks is damaged"):
        Corpus.open(folder).sample(TRAIN, CONTEXT, 0)


def test_what_fails_is_tried_again_and_not_for_ever(served: Served, tmp_path: Path) -> None:
    away = opened(served, tmp_path / "here")
    served.failing = len(remote_corpus.PAUSES)
    away.sample(TRAIN, CONTEXT, 0)
    served.failing = 100
    with pytest.raises(CorpusError, match=rf"can't read bytes {BLOCK} to .* of http.*503"):
        away.sample(TRAIN, CONTEXT, BLOCK // 2 // CONTEXT + 1)
    served.failing = 0
    away.sample(TRAIN, CONTEXT, BLOCK // 2 // CONTEXT + 1)


def test_a_server_that_serves_no_ranges_is_named(served: Served, tmp_path: Path) -> None:
    away = opened(served, tmp_path / "here")
    served.ranges = False
    with pytest.raises(CorpusError, match="its server doesn't serve ranges of bytes"):
        away.sample(TRAIN, CONTEXT, 0)


def test_a_stand_in_is_of_what_is_there_now(served: Served, tmp_path: Path) -> None:
    folder = local_folder_of(f"{served.url}/", tmp_path)
    assert folder == local_folder_of(served.url, tmp_path)
    assert local_folder_of(str(tmp_path / "x"), tmp_path) == tmp_path / "x"
    (served.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"http.*/tokenizer\.json is damaged"):
        local_folder_of(served.url, tmp_path)
    with pytest.raises(CorpusError, match=r"can't read .*/nothing/index\.json: there is no such"):
        local_folder_of(f"{served.url}/nothing", tmp_path)
    with pytest.raises(CorpusError, match=r"can't read http.*: Cannot connect to host"):
        local_folder_of("http://127.0.0.1:1/prose", tmp_path)
    with pytest.raises(CorpusError, match="exists, but isn't a link to data"):
        make_stand_in(served.url, served.folder)


class Forbidden(fsspec.AbstractFileSystem):
    """As s3fs without credentials."""

    protocol = "forbidden"

    def exists(self, path: str, **how: Any) -> bool:
        raise PermissionError("no credentials")


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    fsspec.register_implementation("forbidden", Forbidden, clobber=True)
    with pytest.raises(CorpusError, match=r"can't read forbidden://a/.*: no credentials"):
        make_stand_in("forbidden://a/prose", tmp_path / "here")


def test_blocks_are_kept_in_bounds(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_corpus, "CACHED", 2 * BLOCK)
    read = []
    monkeypatch.setattr(remote_corpus.Blocks, "_ask", lambda _, shard, number: read.append(number))
    away = opened(served, tmp_path / "here")
    for number in (0, 1, 0, 2, 0, 1):
        away.prefetch(TRAIN, CONTEXT, [number * BLOCK // 2 // CONTEXT])
    assert read == [0, 1, 2, 1], "the one that was wanted least recently goes"
