"""Tests of the contest: seconds per step by its meter, and the figures of its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from planaria.node.model.shape import model_config
from planaria.node.run_file import load
from planaria.node.wire.tensors import encode
from planaria_lab import contest
from planaria_lab.contest import (
    BANDWIDTH,
    CONTEXT,
    COUNT,
    DELAY,
    FOLDER,
    METHODS,
    PUBLISHED,
    SEQUENCES,
    STAGES,
    Method,
    as_published,
    baselines_table,
    contest_rows,
    message_bytes,
    ratio_of,
    ratio_runs,
    ratios_table,
    step_ratio,
    tables,
    window_seconds,
)
from planaria_lab.convergence.study import jobs
from planaria_lab.convergence.study import load as load_study
from planaria_lab.origin import KEYS
from planaria_lab.simulator.swarm import HEAD

MEGABYTE = 1e6, 1e6
CROSSING = 8e6 / BANDWIDTH


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "contest.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_published_seconds_are_found_within_two_percent(kind: str) -> None:
    assert as_published(kind) == pytest.approx(PUBLISHED[kind].seconds, rel=0.02)


def test_a_lone_microbatch_takes_each_link_twice() -> None:
    hops = 2 * (STAGES - 1)
    for meter in contest.METERS:
        seconds = window_seconds(MEGABYTE, 1, 0.3, meter=meter)
        assert seconds == pytest.approx(hops * (CROSSING + DELAY) + STAGES * 0.3)


def test_gradients_of_another_size_take_their_own_time() -> None:
    seconds = window_seconds((1e6, 3e6), 1, 0.0)
    assert seconds == pytest.approx((STAGES - 1) * (4 * CROSSING + 2 * DELAY))


def test_the_contests_wire_is_held_by_each_message_and_shared_by_both_directions() -> None:
    inner = 2 * 64 * (CROSSING + DELAY)
    assert inner <= window_seconds(MEGABYTE, 64, 0.0, schedule="late") <= 1.05 * inner
    duplex = window_seconds(MEGABYTE, 64, 0.0, meter="duplex", schedule="late", depth=8)
    assert 64 * CROSSING <= duplex <= 1.1 * 64 * CROSSING


@pytest.mark.parametrize("microbatches", [16, 64])
@pytest.mark.parametrize("size", [1e4, 1e7])
def test_late_gradients_and_links_as_they_are_cost_nothing(microbatches: int, size: float) -> None:
    sizes = size, size / 2
    contested = window_seconds(sizes, microbatches, 0.01)
    assert window_seconds(sizes, microbatches, 0.01, schedule="late") < contested
    assert window_seconds(sizes, microbatches, 0.01, meter="duplex") < contested


def test_slow_stages_hide_the_links() -> None:
    seconds = window_seconds((10.0, 10.0), 64, 3.0, meter="duplex", depth=2)
    assert seconds == pytest.approx((64 + STAGES - 1) * 3.0, rel=0.02)


def test_a_gradient_that_would_be_two_steps_late_is_refused() -> None:
    with pytest.raises(ValueError, match=r"microbatches = 8: with 16 in flight .* take 16"):
        window_seconds(MEGABYTE, 8, 0.0, schedule="late", depth=2)
    with pytest.raises(ValueError, match="microbatches = 0, depth = 1: both must be 1 or more"):
        window_seconds(MEGABYTE, 0, 0.0)


@pytest.mark.parametrize("method", [METHODS[0], Method(160, "int8", "int4")])
def test_messages_are_as_large_as_what_is_encoded(method: Method) -> None:
    figures = torch.zeros(CONTEXT, method.rank or 1024)
    beside = 0 if method.rank is None else 3 * CONTEXT
    sizes = message_bytes(method, load(FOLDER / "run.toml"), SEQUENCES)
    for size, codec, rest in zip(sizes, method[1:], (beside, 0), strict=True):
        _, (payload,) = encode([figures], codec)
        assert size == payload.nbytes + rest + HEAD + COUNT


def curve(*losses: float) -> Mapping[str, Any]:
    return {"validation": [(100 * i, 100 * i, loss) for i, loss in enumerate(losses)]}


def test_steps_are_counted_to_the_loss_of_the_wide_run() -> None:
    runs = {
        ("bf16", 0): curve(8.0, 6.0, 5.0, 4.5),
        ("slower", 0): curve(8.0, 7.0, 5.5, 4.5),
        ("never", 0): curve(8.0, 7.0, 6.5, 6.0),
    }
    assert step_ratio(runs, "bf16") == 1.0
    assert step_ratio(runs, "slower") == pytest.approx(1.25)
    assert step_ratio(runs, "never") is None
    assert step_ratio(runs, "unknown") is None


def test_a_rank_counts_as_the_next_lower_share_with_runs() -> None:
    plain = curve(8.0, 6.0, 5.0, 4.5)
    wide = {("bf16", 0): plain, ("rank 64, int8, gradients int4", 0): curve(8.0, 7.0, 5.5, 4.5)}
    narrow = {("bf16", 0): plain, ("int8", 0): plain}
    assert ratio_of(Method(160, "bf16", "bf16"), 1024, narrow, wide) == pytest.approx(1.25)
    assert ratio_of(Method(40, "bf16", "bf16"), 1024, narrow, wide) is None, "no lower share"
    assert ratio_of(Method(160, "int4", "int4"), 1024, narrow, wide) is None, "no such runs"
    assert ratio_of(Method(None, "int8", "int8"), 1024, narrow, wide) == 1.0


def test_the_page_has_the_tables_that_its_rows_make() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for table in (baselines_table(), tables(rows()), ratios_table(*ratio_runs())):
        assert table in page


def test_the_rows_are_what_the_meter_finds() -> None:
    method = Method(160, "int8", "int4")
    kept = [row for row in rows() if row["method"] == str(method)]
    made = [vars(row) for row in contest_rows([method])]
    assert made == [{key: row[key] for key in row if key not in KEYS} for row in kept]
    assert len(rows()) == 4 * len(METHODS)


def test_the_run_file_has_the_contests_model_and_batch() -> None:
    run = load(FOLDER / "run.toml")
    config = model_config(run.model, 0)
    ends, stage = config.parameters
    assert (config.stages, config.dim, config.layers, config.context) == (8, 1024, 8, CONTEXT)
    assert 0.99 * 203_828_352 < ends + config.stages * stage <= 203_828_352
    assert run.training.batch == SEQUENCES


def test_the_studies_differ_in_rank_and_rate_alone() -> None:
    study, rates = (load_study(FOLDER / name) for name in ("study.toml", "rates/study.toml"))
    assert [job.run.model.subspace for job in jobs(study)] == 2 * [None, 64, 80, 128]
    assert not {*study.seeds} & {*rates.seeds}
    assert {job.run.model for job in jobs(rates)} == {job.run.model for job in jobs(study)}
    assert {job.run.training.lr for job in jobs(rates)} == {2e-3, 6e-3, 1.2e-2, 2.4e-2}
    assert {job.run.training.optimizer for job in (*jobs(rates), *jobs(study))} == {"muon"}
