"""Tests of how a node treats folders that its registry names."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus, CorpusError, read_index
from planaria.node.launch.begin import find_corpus
from planaria.node.launch.errors import NodeError
from planaria.node.launch.own_folders import (
    checkpoint_dir,
    data_below,
    folder_below,
    folder_options,
    own_folder,
)
from planaria.node.launch.resolve import resolve
from planaria.node.run_file import RunFile, RunFileError, loads, override
from planaria.node.serve import find_checkpoint
from tests.node.test_serve import setup

ELSEWHERE = ["/etc", "..", "../secrets", "inside/../..", "a/../../b", ".", "", "/proc/self/cwd"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_leads_out_of_the_nodes_own_folder_is_refused(own: Path, name: str) -> None:
    why = r"recovery\.checkpoint\.dir = .* is not below .*own.*: --checkpoint-dir DIR says"
    with pytest.raises(NodeError, match=why):
        folder_below(own, "recovery.checkpoint.dir", name, "--checkpoint-dir")


def test_a_symbolic_link_leads_out_of_it_too(own: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (own / "link").symlink_to(tmp_path / "elsewhere")
    (own / "inside").symlink_to(own / "there")
    for name in ("link", "link/deeper", "inside/../../elsewhere"):
        with pytest.raises(NodeError, match="a registry may not name it: --data DIR"):
            folder_below(own, "data.path", name, "--data")
    assert folder_below(own, "data.path", "inside/x", "--data") == own / "there" / "x"
    (own / "ring").symlink_to(own / "ring")
    assert folder_below(own, "data.path", "ring", "--data") == own / "ring"


def test_a_name_is_one_below_the_folder(own: Path) -> None:
    assert folder_below(own, "data.path", "data/prose", "--data") == own / "data" / "prose"
    assert folder_below(own, "data.path", "~/x", "--data") == own / "~" / "x"
    assert folder_below(own, "data.path", str(own / "x"), "--data") == own / "x"


def test_data_is_looked_for_below_it(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """If the registry names a place elsewhere, nothing is read there."""
    caplog.set_level(logging.INFO)
    run = resolve(loads(f"data.path = '{data}'\nmodel.stages = 2"))
    mine = replace(setup().options, out=tmp_path, stage=None)
    assert find_corpus(run, mine) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("this node has no prepared data (--data DIR)")
    assert record.levelno == logging.INFO
    with pytest.raises(NodeError, match=r"data\.path = .*--data DIR says where it is"):
        find_corpus(run, replace(mine, stage=0))
    corpus = find_corpus(run, replace(mine, data=[str(data)]))
    assert isinstance(corpus, Corpus) and corpus.path == data
    below_it = override(run, data__path="prose")
    assert find_corpus(below_it, mine) is None
    folder = own_folder(tmp_path, below_it)
    folder.mkdir()
    (folder / "prose").symlink_to(data)
    with pytest.raises(NodeError, match="--data DIR"):
        find_corpus(below_it, replace(mine, stage=0))
    (folder / "prose").unlink()
    (folder / "prose").mkdir()
    for file in data.iterdir():
        (folder / "prose" / file.name).write_bytes(file.read_bytes())
    corpus = find_corpus(below_it, mine)
    assert isinstance(corpus, Corpus) and corpus.path == folder / "prose"


def test_data_that_the_environment_names_is_used_where_it_is_the_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resolve(loads(f"data.path = '{data}'\nmodel.stages = 2"))
    other = run.model_copy(update={"data": run.data.model_copy(update={"content": "0" * 32})})
    mine = replace(setup().options, out=tmp_path, stage=None)
    monkeypatch.setenv("PLANARIA_DATA", str(data))
    corpus = find_corpus(run, mine)
    assert isinstance(corpus, Corpus) and corpus.path == data
    assert find_corpus(other, mine) is None, "a node without the data serves other stages"


def test_each_corpus_is_a_name_below_it(own: Path) -> None:
    corpora = "[[data.corpora]]\npath = 'a'\n[[data.corpora]]\npath = 'b'\nshare = 2\n"
    assert data_below(own, loads(corpora).data).names == [str(own / "a"), str(own / "b")]
    with pytest.raises(NodeError, match=r"data\.path = '/etc'"):
        data_below(own, loads(corpora.replace("'b'", "'/etc'")).data)


@pytest.mark.parametrize("place", ["file:///etc", "https://169.254.169.254/x", "s3://bucket/x"])
def test_no_run_file_has_data_at_a_url(place: str) -> None:
    for text in (f"data.path = '{place}'", f"[[data.corpora]]\npath = '{place}'"):
        with pytest.raises(RunFileError, match="is not a folder"):
            loads(text)


def test_an_index_names_no_shard_elsewhere(data: Path, tmp_path: Path) -> None:
    """A stranger may have made the data, and fetched shards are written beside the index."""
    text = (data / "index.json").read_text()
    for name in ("../train-00000.bin", "/etc/passwd", "a/b", ".."):
        (tmp_path / "index.json").write_text(text.replace("train-00000.bin", name, 1))
        with pytest.raises(CorpusError, match="is damaged"):
            read_index(tmp_path)


def test_the_model_is_where_the_nodes_owner_says(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    run = RunFile.model_validate({"model": {"from": "/etc", "vocabulary": 64}})
    assert find_checkpoint(run, None, tmp_path) is None
    assert "model.from = '/etc'" in caplog.text and "--model DIR says" in caplog.text
    with pytest.raises(NodeError, match=r"each node needs the checkpoint.*--model DIR"):
        find_checkpoint(override(run, recovery__policy="redundant"), None, tmp_path)
    with pytest.raises(NodeError, match=f"--model: .*{tmp_path}"):
        find_checkpoint(run, tmp_path, tmp_path)
    with pytest.raises(NodeError, match="doesn't begin from a checkpoint; omit it"):
        find_checkpoint(RunFile(), tmp_path, tmp_path)


def test_checkpoints_are_where_the_nodes_owner_says(own: Path, tmp_path: Path) -> None:
    run = loads("recovery.policy = 'checkpoint'\nrecovery.checkpoint.dir = 'shared'")
    assert checkpoint_dir(run, own, None) == own / "shared"
    assert checkpoint_dir(run, own, tmp_path) == tmp_path
    for name in ("/etc", ""):
        with pytest.raises(NodeError, match="--checkpoint-dir DIR says where it is"):
            checkpoint_dir(override(run, recovery__checkpoint__dir=name), own, None)
    assert checkpoint_dir(RunFile(), own, None) is None
    with pytest.raises(NodeError, match=r"recovery.policy = auto .*; leave it out"):
        checkpoint_dir(RunFile(), own, tmp_path)


def test_up_says_to_its_nodes_what_its_run_file_names(tmp_path: Path, monkeypatch) -> None:
    """Names are relative to the folder where `planaria up` was started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    run = loads(
        "data.path = 'prose'\nmodel.from = 'model'\n"
        "recovery.policy = 'checkpoint'\nrecovery.checkpoint.dir = 'shared'"
    )
    shared = ["--checkpoint-dir", str(tmp_path / "shared")]
    prose = ["--data", str(tmp_path / "prose")]
    assert folder_options(run) == [*prose, "--model", "model", *shared]
    (tmp_path / "model").rmdir()
    assert folder_options(run) == [*prose, *shared]
    corpora = loads("[[data.corpora]]\npath = '/a'\n[[data.corpora]]\npath = '/b b'")
    assert folder_options(corpora) == ["--data", "/a", "--data", "/b b"]
