"""A study: a TOML file that lists runs to compare, and the file of their results."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError

from planaria.node.run_file import RunFile, RunFileError, Section, from_fields
from planaria_lab.convergence.schedule import Losses
from planaria_lab.convergence.training import Ablation

RESULTS = "runs.jsonl"
FORMAT = 3
"""Grows when the same study gives other results than before: with a default that matters, too."""


PUBLISHED: Final = {
    "training": {"optimizer": "adamw"},
    "wire": {"activations": "none", "gradients": "none"},
    "recovery": {"policy": "checkfree", "snapshot": {"first": 0}},
}
"""What a study's run begins with, over a run file's defaults: boundaries as they are computed,
Adam, and stages guessed as the papers have it."""


class StudyError(ValueError):
    """The study can't be used; the message names file, key, value and remedy."""


class Variant(Section):
    """The differences of some of the runs."""

    name: str = Field(min_length=1, max_length=80)
    run: dict[str, Any] = Field(default_factory=dict, description="over the study's run")
    losses: Losses | None = Field(default=None, description="instead of the study's")
    reference: str = Field(default="", description="instead of the study's")
    ablation: Ablation = Ablation()


class Study(Section):
    """A study as its file says it. Paths in it are as in a run file: from the folder where the
    command runs."""

    title: str
    seeds: list[int] = Field(min_length=1)
    run: dict[str, Any] = Field(description="a run file")
    text: str = Field(
        default="corpus/austen",
        description="prepared where the run's data is not; empty: that is an error",
    )
    vocabulary: int = Field(default=2048, ge=2, description="tokens, of that data")
    losses: Losses = Losses()
    variants: list[Variant] = Field(min_length=1)
    baseline: str = Field(description="the variant that the others are compared with")
    reference: str = Field(default="", description="the variant whose cost counts as 1")
    target: int = Field(ge=1, description="step whose loss, without failures, is to be reached")
    plotted: list[str] = Field(default_factory=list, description="variants; all when empty")
    labels: dict[str, str] = Field(
        default_factory=dict, description="what plots call a variant, if not by its name"
    )
    texts: dict[str, str] = Field(
        default_factory=dict, description="folders of other text to be tried at the end, by name"
    )


@dataclass(frozen=True)
class Job:
    """One run: a variant with a seed."""

    variant: str
    seed: int
    run: RunFile
    losses: Losses
    ablation: Ablation
    texts: Mapping[str, str]

    def key(self, content: str) -> str:
        """Stands for all that the result depends on; `content` is the data's content hash.

        What is at its default is left out, so that a new setting leaves old results their keys. So
        is the folder of a checkpoint: `model.content` has its digests.
        """
        keys = self.run.identifying_fields("data", "name", "swarm", "saves")
        keys.get("model", {}).pop("from", None)
        fields = [
            FORMAT,
            content,
            keys,
            self.losses.model_dump(mode="json", exclude_defaults=True),
            self.ablation.model_dump(mode="json", exclude_defaults=True),
            dict(self.texts),
        ]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def load(path: Path) -> Study:
    """Raises StudyError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StudyError(f"can't read the study {path}: {error.strerror}") from error
    try:
        study = Study.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not valid TOML: {error}") from error
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']} (value: {e['input']!r})"
            for e in error.errors()
        ]
        raise StudyError(f"{path} is not a valid study:\n" + "\n".join(lines)) from error
    names = [variant.name for variant in study.variants]
    named = [study.baseline, study.reference, *study.plotted, *study.labels]
    for wanted in filter(None, [*named, *(variant.reference for variant in study.variants)]):
        if wanted not in names:
            raise StudyError(f"{path}: no variant is named {wanted!r}: choose of {names}")
    if len(set(names)) < len(names):
        raise StudyError(f"{path}: two variants have the same name, of {names}")
    return study


def jobs(study: Study) -> list[Job]:
    """Seed by seed, so that a study that is cut short can be compared. Raises StudyError."""
    listed = []
    for seed in study.seeds:
        for variant in study.variants:
            try:
                base = {**_merged(PUBLISHED, study.run), "seed": seed}
                run = from_fields(_merged(base, variant.run))
            except RunFileError as error:
                raise StudyError(f"variant {variant.name!r}: {error}") from error
            losses = variant.losses if variant.losses is not None else study.losses
            listed.append(Job(variant.name, seed, run, losses, variant.ablation, study.texts))
    return listed


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        former = merged.get(key)
        both = isinstance(value, dict) and isinstance(former, dict)
        merged[key] = _merged(former, value) if both else value  # type: ignore[arg-type]
    return merged


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by key; a last line that was cut off counts as not there. Raises
    StudyError."""
    by_key: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return by_key
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            result = json.loads(line)
            by_key[result["key"]] = result
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise StudyError(f"line {number} of {path} is damaged: {error}; delete it") from error
    return by_key


def append_result(path: Path, result: Mapping[str, Any]) -> None:
    """After cutting off what a run that was killed has left of a line."""
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(result).encode() + b"\n")
