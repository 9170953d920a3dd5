import re
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data.corpus import Corpus

PERSUASION = Path(__file__).parents[3] / "corpus" / "austen" / "persuasion.txt"


def planaria(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "data"
    result = planaria("data", "prepare", PERSUASION, "--out", out, "--vocabulary", 512)
    assert result.exit_code == 0, result.output
    return out


def test_prepare_makes_what_inspect_shows(data: Path) -> None:
    corpus = Corpus.open(data, verify=True)
    assert corpus.vocabulary == 512
    result = planaria("data", "inspect", data, "--verify", "--context", 40)
    assert result.exit_code == 0
    assert f"content:   {corpus.content}" in result.output
    assert f"hash {corpus.index.tokenizer}" in result.output
    assert "checksums: correct" in result.output
    tokens = corpus.index.splits["train"].tokens
    assert re.search(rf"train +│ +\d+ │ +{tokens:,} │", result.output)
    _, shown = result.output.split("\nfirst documents to train on, 40 tokens of each at most:\n")
    assert shown.startswith("Pers") and shown.count("\nChapter") >= 1


def test_preparing_again_changes_nothing(data: Path) -> None:
    before = (data / "index.json").stat()
    result = planaria("data", "prepare", PERSUASION, "--out", data, "--vocabulary", 512)
    assert result.exit_code == 0
    assert "already has this data" in result.output
    assert (data / "index.json").stat() == before
    result = planaria("data", "prepare", PERSUASION, "--out", data, "--vocabulary", 400)
    assert result.exit_code == 1
    assert "--force" in result.stderr


def test_a_runs_samples_are_those_of_its_batches(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        f'steps = 50\n[data]\npath = "{data}"\n[training]\nbatch = 6\nmicrobatch = 3\n'
        '[[changes]]\nstep = 4\nwas = ["training.batch=8", "training.microbatch=2"]\n'
    )
    output = planaria("data", "inspect", run).output
    assert re.search(rf"│ +{4 * 8 + 46 * 6} │", output), output


def test_a_folder_is_named_as_it_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder, run = tmp_path / "[en]", tmp_path / "run.toml"
    shutil.copytree(data, folder)
    run.write_text(f'[data]\npath = "{folder}"\n')
    again = planaria("data", "prepare", PERSUASION, "--out", folder, "--vocabulary", 512)
    assert f"{folder} already has this data" in again.output
    rows = [line.split("│") for line in planaria("data", "inspect", run).output.splitlines()]
    assert "".join(row[1].strip() for row in rows if len(row) == 7) == str(folder)


def test_what_was_read_and_left_out_is_said(tmp_path: Path) -> None:
    rows = [f'{{"text": "Once {i} upon a time."}}\n' for i in range(9)] + ['{"text": null}\n']
    (tmp_path / "a.jsonl").write_text("".join(rows))
    (tmp_path / "._a.jsonl").write_text("hidden")
    size = (tmp_path / "a.jsonl").stat().st_size
    arguments = ("data", "prepare", tmp_path, "--out", tmp_path / "out")
    result = planaria(*arguments, "--skip-bad", 0, "--longest-record", 1000)
    assert result.exit_code == 0, result.output
    line = (
        f"files read: 1, rows: 10, bytes: {size}; left out: hidden files: 1 (6 bytes), bad rows: 1"
    )
    assert line in result.stdout
    assert planaria(*arguments, "--longest-record", 5).exit_code == 1


def test_ctrl_c_is_a_line_and_status_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planaria.node.data.prepare.prepare", interrupted)
    result = planaria("data", "prepare", PERSUASION, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted: the same command continues from what is done" in result.stderr


def test_options_reach_the_recipe(data: Path, tmp_path: Path) -> None:
    text = tmp_path / "acts.jsonl"
    text.write_text("".join(f'{{"story": "Once {i} upon a time."}}\n' for i in range(9)))
    acts = tmp_path / "acts.txt"
    acts.write_text("".join(f"Act {i}\nEnter a fool.\n" for i in range(11)))
    result = planaria(
        *("data", "prepare", text, acts, "--out", tmp_path / "out", "--text-field", "story"),
        *("--document-separator", "Act ", "--validation", 0.5),
        *("--tokenizer", data, "--bos", "no", "--end-token", "<|endoftext|>"),
    )
    assert result.exit_code == 0, result.output
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.vocabulary == 512
    documents = [split.documents for split in corpus.index.splits.values()]
    assert sum(documents) == 20
    assert min(documents) > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "inspect", "{tmp}/none"), "there is no prepared data at"),
        (("data", "prepare", "{tmp}/none", "--out", "{tmp}/x"), "no file or folder"),
        (("data", "prepare", "{tmp}", "--out", "{tmp}/x", "--vocabulary", "2"), "too small"),
        (("audit", "{tmp}"), "there is no ledger in"),
    ],
)
def test_errors_are_sentences(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = planaria(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 1
    *_, last = result.stderr.splitlines()  # after the progress bar, if any
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in result.output
