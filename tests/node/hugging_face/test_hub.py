"""Tests of models that are fetched from a hub, and of exports to one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.node.data.progress import untracked
from planaria.node.local.plan import plan_run
from planaria.node.run_file import RunFileError, dumps, from_fields, override
from tests.forked import Forked
from tests.hub import Hub, commit_of, files_of, serving
from tests.node.hugging_face.test_folders import exported
from tests.node.hugging_face.test_from_saves import run_of, shape_in
from tests.node.stage.shapes import GROUPED
from tests.node.state.small_saves import saved

FIND = (
    "import sys; from planaria.node.hugging_face.begin_from_model import find_checkpoint; "
    "print(find_checkpoint(sys.argv[1]))"
)


def find(hub: Hub, name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Find a checkpoint in a new process, since huggingface_hub reads its environment at import."""
    environment = {**os.environ, **hub.environment, "HF_HOME": str(home)}
    command = [sys.executable, "-c", FIND, name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("form", ["one file", "shards", "both"])
def test_of_a_repository_only_what_transformers_reads_is_fetched(tmp_path: Path, form: str) -> None:
    model = tmp_path / "model"
    exported(model, GROUPED, most=1 << 30 if form == "one file" else 100_000)
    files = files_of(model)
    shards = {name for name in files if name.startswith("model-")}
    if form == "both":
        files["model.safetensors"] = b"\0" * 100
    weights = {"model.safetensors"} if form != "shards" else shards
    others = {"consolidated.safetensors", "model.fp16.safetensors", "onnx/config.json", "x.bin"}
    with serving() as hub:
        hub.files["org/name"] = files | dict.fromkeys(others, b"large")
        done = find(hub, "org/name@v1.0", tmp_path / "home")
    folder = Path(done.stdout.strip())
    assert folder.name == commit_of("org/name"), done.stderr
    assert "v1.0" in hub.fetched
    index = {name for name in files if name.endswith(".index.json")}
    wanted = weights | index | {"config.json", "generation_config.json"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert wanted <= set(hub.fetched)
    assert not others & set(hub.fetched)


def test_what_cannot_be_had_says_why_and_how_to_get_it(tmp_path: Path) -> None:
    with serving() as hub:
        unknown = find(hub, "org/other@v2", tmp_path / "home")
    alone = find(hub, "org/name", tmp_path / "home")
    assert (
        "`hf download org/other --revision v2 --local-dir FOLDER`, and name that" in unknown.stderr
    )
    assert "`hf download org/name --local-dir FOLDER`, and name that" in alone.stderr


def test_a_run_without_data_says_that_its_model_is_missing(tmp_path, monkeypatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    run = from_fields({"model": {"from": "some/model"}})
    with pytest.raises(RunFileError, match="hf download some/model --local-dir FOLDER"):
        plan_run(run, tmp_path / "out", None, "cpu", print, untracked)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with saves of a small model."""
    folder = tmp_path_factory.mktemp("run")
    saved(folder / "saves", shape_in(2))
    of_no_data = override(run_of(2), data__path=str(folder / "none"))
    (folder / "run.toml").write_text(dumps(of_no_data))
    return folder


def export(run: Path, hub: Hub, out: Path, *options: str) -> tuple[int, str]:
    """Run `planaria export`, and return its exit status and output."""
    output = out.with_suffix(".said")
    words = ["--out", str(out), "--run", str(run / "run.toml"), *options]
    environment = {**hub.environment, "HF_HOME": str(out.parent / "home")}
    command = Forked(output, "export", str(run / "saves"), *words, environment=environment)
    return command.wait(600), output.read_text()


@pytest.mark.parametrize(("options", "seen"), [([], "public"), (["--private"], "private")])
def test_an_export_goes_to_the_hub_and_what_goes_is_said(tmp_path, run, options, seen) -> None:
    with serving() as hub:
        status, output = export(run, hub, tmp_path / "out", "--push", "me/mine", *options)
        files = files_of(tmp_path / "out")
        assert status == 0, output
        assert hub.files["me/mine"] == files
        assert hub.private["me/mine"] == (seen == "private")
        assert f"to {hub.url}/me/mine, which is {seen}:" in output
        for name, content in files.items():
            assert f"{name}, {len(content):,} bytes" in output


def test_a_public_repository_is_not_taken_for_a_private_one(tmp_path, run) -> None:
    with serving() as hub:
        hub.files["me/mine"] = {}
        status, output = export(run, hub, tmp_path / "out", "--push", "me/mine", "--private")
        assert hub.files["me/mine"] == {}
    assert status != 0
    assert "--private: me/mine is there already, and public" in output
    assert (tmp_path / "out" / "model.safetensors").exists()
    status, output = export(run, hub, tmp_path / "again", "--push", "me/mine")
    assert status != 0
    assert f"`hf upload me/mine {tmp_path / 'again'}` tries again" in output


def test_without_a_login_nothing_is_exported(tmp_path, run) -> None:
    hub = Hub("http://127.0.0.1:9", token="")
    _, output = export(run, hub, tmp_path / "out", "--push", "me/mine")
    assert "log in with `hf auth login`, or set HF_TOKEN" in output
    assert not (tmp_path / "out").exists()
