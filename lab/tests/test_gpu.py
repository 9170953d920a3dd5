"""Tests of measurements on a GPU: which piece is next, and what a row contains."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria_lab import gpu
from planaria_lab.gpu import LONGEST, Piece, Place, key_of, measure, next_piece, pieces, run_pieces
from planaria_lab.origin import lacking, origin

CPU = torch.device("cpu")


def nothing(_: Place) -> dict[str, Any]:
    return {}


LISTED = [Piece("long", 6, nothing), Piece("short", 2, nothing), Piece("other", 4, nothing)]


@pytest.mark.parametrize(
    ("done", "minutes", "name"),
    [
        ((), 60, "long"),
        ((), 5.9, "short"),
        (("long",), 60, "short"),
        (("short",), 5, "other"),
        (("short",), 3, None),
        (("long", "short", "other"), 60, None),
    ],
)
def test_the_first_piece_that_fits_is_next(
    done: tuple[str, ...], minutes: float, name: str | None
) -> None:
    chosen = next_piece(LISTED, done, minutes)
    assert (chosen.name if chosen else None) == name


@pytest.mark.parametrize("cpu", [False, True])
def test_each_piece_has_a_name_of_its_own_and_fits_into_a_command(cpu: bool) -> None:
    listed = pieces(cpu)
    assert len({piece.name for piece in listed}) == len(listed)
    assert next_piece([piece._replace(minutes=LONGEST + 1) for piece in listed], (), 60) is None
    assert all(piece.minutes <= LONGEST for piece in listed)


def test_what_failed_or_is_of_another_card_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "gpu.jsonl"
    before = [
        {"key": key_of("long", CPU)},
        {"key": "short on another card"},
        {"key": key_of("other", CPU), "error": "OutOfMemoryError"},
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in before) + '{"key": "cut o')
    measured: list[str] = []

    def apart(piece: Piece, *_: object) -> dict[str, Any]:
        measured.append(piece.name)
        return {"error": "again"} if piece.name == "other" else {}

    monkeypatch.setattr(gpu, "pieces", lambda cpu: LISTED)
    monkeypatch.setattr(gpu, "apart", apart)
    assert run_pieces(60, rows, Place(CPU, tmp_path)) == 1
    assert measured == ["short", "other"]


def test_a_row_has_its_origin_also_of_what_fails(tmp_path: Path) -> None:
    def failing(_: Place) -> dict[str, Any]:
        raise SystemExit("ended: a node")

    row = measure(Piece("swarm", 1, failing), Place(CPU, tmp_path))
    assert row["error"] == "SystemExit: ended: a node"
    assert not lacking(row)
    assert row["machine"] == origin()["machine"]


def test_figures_are_measured_on_this_processor(data: Path) -> None:
    place = Place(CPU, data)
    codecs = gpu.of_codecs(place)
    assert codecs["codecs"]["none"] == {"bytes": 4 << 18}
    assert codecs["measured"]["int8"]["decode"] > 0
    figures = gpu.of_stage("124M", {}, place)
    assert (figures["tokens"], figures["blocks"]) == (4 * 32, 4)
    assert min(figures["measured"][name] for name in ("ratio", "mfu", "product_flops")) > 0
    packed = gpu.of_stage("8B", {"lora": {"base": "nf4"}}, place)
    assert 0 < packed["trained"] < figures["trained"]
    published = gpu.of_published(place)
    assert published["tokens"] == 8 * 32
    assert published["losses"] == pytest.approx([math.log(512)] * 2, rel=0.02)


def test_the_runs_of_the_paper_are_studies_of_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **_: commands.append(command))
    assert gpu.run_studies(1, [tmp_path / "a.toml", tmp_path / "b.toml"], CPU) == 0
    assert [command[5] for command in commands] == [str(tmp_path / f"{n}.toml") for n in "ab"]
