from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.node.run_file import from_fields, override
from planaria_lab.convergence.runner import resolved
from planaria_lab.convergence.schedule import Losses
from planaria_lab.convergence.study import (
    FORMAT,
    PUBLISHED,
    RESULTS,
    StudyError,
    append_result,
    jobs,
    load,
    read_results,
)
from planaria_lab.convergence.training import Ablation

STUDY = """
title = "two ways"
seeds = [0, 1]
baseline = "none"
target = 5
[run]
steps = 8
[run.recovery]
policy = "checkfree"
relearn.passes = 0
[losses]
at = ["2@4"]
[[variants]]
name = "none"
losses = {}
[[variants]]
name = "relearned"
run.recovery.relearn.passes = 3
ablation.relearn_share = 0.5
"""


def study(tmp_path: Path, text: str = STUDY) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


def test_a_variant_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    none, relearned, *others = jobs(load(study(tmp_path)))
    assert [job.seed for job in (none, relearned, *others)] == [0, 0, 1, 1]
    assert (none.losses.at, relearned.losses.at) == ([], ["2@4"])
    assert relearned.run.recovery.policy == "checkfree"
    assert (none.run.recovery.relearn.passes, relearned.run.recovery.relearn.passes) == (0, 3)
    assert relearned.ablation.relearn_share == 0.5
    assert relearned.run.seed == 0


def test_a_key_changes_with_all_that_the_result_depends_on(tmp_path: Path) -> None:
    keys = {job.key("data") for job in jobs(load(study(tmp_path)))}
    keys |= {job.key("other data") for job in jobs(load(study(tmp_path)))}
    more = STUDY.replace("steps = 8", "steps = 9").replace("2@4", "2@5")
    keys |= {job.key("data") for job in jobs(load(study(tmp_path, more)))}
    assert len(keys) == 12
    renamed = STUDY.replace("two ways", "three").replace('"relearned"', '"again"')
    assert keys.issuperset(job.key("data") for job in jobs(load(study(tmp_path, renamed))))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 8", "steps = 0", "variant 'none'.*\n.*steps"),
        ("relearn_share", "relearn_part", "relearn_part"),
        ('policy = "checkfree"', 'omega = "norm"', "'none'.*\n.*recovery.omega: is no key"),
        ("relearn_share = 0.5", "relearn_moments = true", "give relearn_adam its rate"),
        ('baseline = "none"', 'baseline = "nobody"', "no variant is named 'nobody'"),
        ('name = "relearned"', 'name = "b"\nreference = "a"', "no variant is named 'a'"),
        ('name = "relearned"', 'name = "none"', "same name"),
        ("[losses]", "[losses", "not valid TOML"),
        ("target = 5", "", "target"),
    ],
)
def test_an_invalid_study_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        jobs(load(study(tmp_path, STUDY.replace(old, new))))


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert read_results(path) == {}
    append_result(path, {"key": "a", "seed": 0})
    with path.open("a") as file:
        file.write('{"key": "b", "se')
    assert list(read_results(path)) == ["a"]
    append_result(path, {"key": "b", "seed": 1})
    assert list(read_results(path)) == ["a", "b"]
    assert path.read_text().count("\n") == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"key": "a"}\nnonsense\n{"key": "b"}\n')
    with pytest.raises(StudyError, match="line 2 of"):
        read_results(path)


CONTENT = {
    ("corpus/austen", 512): "93adfa567266516072c333b152ace724",
    ("data/texts", 2048): "b528803bca3fe8669f23f71a35833040",
}
"""(Text, vocabulary) -> content hash of the data that shipped studies train on."""
STUDIES = sorted((Path(__file__).parents[2] / "results").glob("*/study.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_each_row_is_still_of_its_study(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an empty folder: no data is prepared
    asked = load(path)
    vocabulary = {"model__vocabulary": asked.vocabulary}
    results = read_results(path.with_name(RESULTS))
    content = CONTENT[asked.text, asked.vocabulary] if results else "0" * 32
    data = {**vocabulary, "data__content": content}
    wanted = [replace(job, run=override(job.run, **data)) for job in jobs(asked)]
    keys = {key for key, _ in resolved(wanted)}
    assert results.keys() <= keys


def test_results_were_made_with_these_defaults() -> None:
    """If the digest differs because a default has changed, increase FORMAT. For a new setting that
    changes nothing, don't. Then put the new digest here."""
    defaults = [
        section.model_dump(mode="json", exclude={"data", "name", "swarm", "saves", "trust"})
        for section in (from_fields(PUBLISHED), Losses(), Ablation())
    ]
    digest = hashlib.sha256(json.dumps(defaults, sort_keys=True).encode()).hexdigest()[:16]
    assert (FORMAT, digest) == (3, "85157205e683321f")
