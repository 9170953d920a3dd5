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
"""Grows when the same study gives other results than before, for example by a changed default."""


PUBLISHED: Final = {
    "training": {"optimizer": "adamw"},
    "wire": {"activations": "none", "gradients": "none"},
    "recovery": {"policy": "checkfree", "snapshot": {"first": 0}},
}
"""Defaults of a study's run that differ from a run file's: AdamW, no codecs at boundaries, and
stages guessed as in the papers."""


class StudyError(ValueError):
    """A study, or a file of its runs, can't be used; the message says why and what to do."""


class Variant(Section):
    """A variant of the study's run: what it changes."""

    name: str = Field(min_length=1, max_length=80)
    run: dict[str, Any] = Field(default_factory=dict, description="changes to the study's run")
    losses: Losses | None = Field(default=None, description="instead of the study's")
    reference: str = Field(default="", description="instead of the study's")
    ablation: Ablation = Ablation()


class Study(Section):
    """The contents of a study's file. As in a run file, paths are relative to the folder where the
    command runs."""

    title: str
    seeds: list[int] = Field(min_length=1)
    run: dict[str, Any] = Field(description="a run file")
    text: str = Field(
        default="corpus/austen",
        description="text to prepare if the run's data is missing; empty: that is an error",
    )
    vocabulary: int = Field(default=2048, ge=2, description="tokens of that data")
    losses: Losses = Losses()
    variants: list[Variant] = Field(min_length=1)
    baseline: str = Field(description="the variant that the others are compared with")
    reference: str = Field(default="", description="the variant whose cost counts as 1")
    target: int = Field(ge=1, description="step of the baseline whose loss is to be reached")
    plotted: list[str] = Field(default_factory=list, description="variants in plots; empty: all")
    labels: dict[str, str] = Field(default_factory=dict, description="names of variants in plots")
    texts: dict[str, str] = Field(
        default_factory=dict, description="folders of other text to validate on at the end, by name"
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
        """Return a digest of all that the result depends on. `content`: the data's content hash.

        Settings at their defaults are left out, so that a new setting doesn't change keys of old
        results. So is the folder of a checkpoint: `model.content` has its digests.
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
    """Read and check the file of a study. Raises StudyError."""
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
            raise StudyError(f"{path}: no variant is named {wanted!r}: choose one of {names}")
    if len(set(names)) < len(names):
        raise StudyError(f"{path}: two variants have the same name: {names}")
    return study


def jobs(study: Study) -> list[Job]:
    """Return all runs of a study, seed by seed, so that an interrupted study can be compared.
    Raises StudyError."""
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
    """Return the results in a file, by key; an unfinished last line is ignored. Raises
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
    """Append a result, in place of an unfinished line that a killed process has left."""
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(result).encode() + b"\n")
