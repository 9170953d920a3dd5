"""State of the page as one JSON object: a pure function of the registry's description and of
events. A replay (replay.py) uses the same function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from planaria.bootstrap.operator_orders import order_in_words
from planaria.bootstrap.registry_pb2 import PAUSE, TRAIN, Description
from planaria.node.model.learning_rate import rate_of
from planaria.node.report.events import Severity, fields
from planaria.node.report.history import Curve, History
from planaria.node.report.run_state import RunState, SeatState
from planaria.node.run_file import RunFile

NODES_SHOWN = 24
"""Limit of nodes shown per stage; the others are counted."""
LINKS_SHOWN = 200
LINES_SHOWN = 40
NEWS_SHOWN = 120
FIGURES = 6
"""Significant digits of a loss on the page."""


class Moment(NamedTuple):
    """Time and period of a page's state."""

    now: float  # Unix seconds
    began: float  # Unix seconds of the first record of the run
    ended: float | None = None  # Unix seconds; None: still running
    tokens_per_second: float | None = None  # None: by the nodes' reports
    price: float | None = None  # of a node hour, in any currency


def page_state(
    description: Description, history: History, run: RunFile, moment: Moment
) -> dict[str, Any]:
    """The page's state; times in Unix seconds. `run` has `model.stages`. The values of keys are
    independent, so that only changed ones need be sent."""
    state = RunState(description, history.story)
    stages = [_stage(state, at) for at in range(run.model.body_stages + 1)]
    word, sentence = _condition(state, stages, history)
    return {
        "run": {
            "id": description.run,
            "name": run.name,
            "steps": run.steps,
            "policy": run.recovery.policy,
            "began": moment.began,
            "ended": moment.ended,
            "price": moment.price,
        },
        "condition": {"word": word, "sentence": sentence},
        "progress": _progress(state, history, run, moment),
        "view": {"number": description.view.number, "reason": description.view.reason},
        "stages": stages,
        "standbys": _nodes(state.at(None), description.view.driver),
        "links": _links(state),
        "loss": {
            "training": _curve_points(history.loss),
            "validation": _curve_points(history.validation),
            "marks": [mark._asdict() for mark in history.marks],
        },
        "news": [
            {"time": item.time, "severity": item.severity.name.lower(), "sentence": item.sentence}
            for item in list(history.news)[-NEWS_SHOWN:]
        ],
        "samples": [fields(sample) for sample in history.samples],
        "troubles": [*state.troubles(), *state.unsent(), *state.omitted()][:LINES_SHOWN],
        "cuts": _cuts(state),
        "quarantine": _quarantine(state, moment.now),
        "evictions": [
            {"time": moment.now - eviction.seconds, "sentence": sentence}
            for eviction, sentence in state.evictions()
        ],
        "decisions": list(description.decisions)[-LINES_SHOWN:],
    }


def _progress(state: RunState, history: History, run: RunFile, moment: Moment) -> dict[str, Any]:
    step, rate = state.committed, moment.tokens_per_second
    if rate is None:
        rate = state.tokens_per_second
    left = (run.steps - step) * history.seconds_a_step
    last = next((point for point in reversed(history.validation.points) if point), None)
    price = moment.price
    return {
        "step": step,
        "loss": _rounded_loss(state.loss),
        "validation": _rounded_loss(last[1]) if last else None,
        "learning_rate": rate_of(max(1, step), run),
        "tokens": run.batches.samples_until(step) * run.model.config.context,
        "tokens_per_second": round(rate, 1) if 0 < rate < math.inf else None,
        "seconds_left": round(left) if left > 0 and moment.ended is None else None,
        "nodes": len(state.description.members),
        "node_hours": round(history.node_seconds / 3600, 4),
        "spent": None if price is None else round(price * history.node_seconds / 3600, 4),
        "rebuilds": sum(history.rebuilt.values()),
    }


def _condition(
    state: RunState, stages: Sequence[dict[str, Any]], history: History
) -> tuple[str, str]:
    """The run's condition: in one word, and in a sentence."""
    story, view = history.story, state.description.view
    stopped = next((seat.message for seat in state.reports if seat.stopped), "")
    if stopped or story.stopped is not None:
        return "stopped", stopped or (story.stopped.reason if story.stopped else "")
    if order := order_in_words(view):
        word = {PAUSE: "paused", TRAIN: "waiting"}.get(view.order, "stopped")
        return word, order.removeprefix(f"{word} ")
    if story.finished is not None or any(seat.finished for seat in state.reports):
        return "finished", "all steps are committed"
    vacant = [str(stage["stage"]) for stage in stages if not stage["count"]]
    reason = (state.driving.message if state.driving else "") or view.reason
    if not state.seats:
        return "waiting", reason or "no node has joined yet"
    if vacant:
        noun = "stages" if len(vacant) > 1 else "stage"
        why = f": {reason}" if reason else ""
        return "waiting", f"no node serves {noun} {', '.join(vacant)}{why}"
    if story.rebuilds or any(stage["state"] == "rebuilding" for stage in stages):
        return "rebuilding", reason
    return ("training" if view.driver else "waiting"), reason


def _stage(state: RunState, at: int) -> dict[str, Any]:
    seats = state.at(at)
    states = sorted({seat.state for seat in seats}, key=_WORST.index)
    driver = state.description.view.driver if at == 0 else ""
    return {
        "stage": at,
        "state": states[0] if states else "vacant",
        "count": len(seats),
        "nodes": _nodes(seats, driver),
    }


_WORST = (
    *("hangs", "not heard", "suspected", "rebuilding", "joining", "waiting", "halted", "idle"),
    *("running", "averaging", "ready"),
)
"""States of a node, the most important first."""


def _nodes(seats: Sequence[SeatState], driver: str) -> list[Any]:
    return [
        {
            "node": entry.member.node,
            "state": seat.state,
            "step": seat.report.committed,
            "microbatches": seat.report.microbatches,
            "speed": round(entry.member.speed, 1) if math.isfinite(entry.member.speed) else None,
            "memory": entry.report.memory,
            "bytes_in": entry.report.bytes_in,
            "bytes_out": entry.report.bytes_out,
            "host": entry.member.host,
            "device": entry.member.device,
            "address": entry.member.address,
            "silence": round(entry.since_renewal, 1),
            "driver": bool(driver) and entry.member.node == driver,
            "leaving": entry.member.leaving,
        }
        for seat in seats[:NODES_SHOWN]
        for entry in [seat.entry]
    ]


def _links(state: RunState) -> list[Any]:
    """Measured links between present members, with the stages that they connect."""
    stage_of = {seat.entry.member.node: seat.stage for seat in reversed(state.seats)}
    links: list[dict[str, Any]] = [
        {
            "from": entry.member.node,
            "to": link.peer,
            "stages": [stage_of[entry.member.node], stage_of[link.peer]],
            "rtt_ms": round(link.rtt_ms, 2),
            "mbps": round(link.mbps, 1),
        }
        for entry in state.description.members
        for link in entry.report.links
        if link.peer in stage_of and math.isfinite(link.rtt_ms) and math.isfinite(link.mbps)
    ]
    return sorted(links, key=lambda link: link["mbps"])[:LINKS_SHOWN]


def _curve_points(curve: Curve) -> list[list[float] | None]:
    return [point and [point[0], float(f"{point[1]:.{FIGURES}g}")] for point in curve.points]


def _rounded_loss(loss: float) -> float | None:
    return float(f"{loss:.{FIGURES}g}") if math.isfinite(loss) else None


def _cuts(state: RunState) -> list[dict[str, Any]]:
    """Pairs of members that can't reach each other."""
    cuts = []
    for cut, _ in zip(state.cuts(), range(LINES_SHOWN), strict=False):
        severity = Severity.WARNING if cut.via else Severity.ERROR
        sentence = f"{cut.a} reaches {cut.b} through {cut.via}"
        if not cut.via:
            sentence = f"{cut.a} and {cut.b} can't reach each other: {cut.state}"
        cuts.append({"sentence": sentence, "severity": severity.name.lower()})
    return cuts


def _quarantine(state: RunState, now: float) -> list[dict[str, Any]]:
    """For the page: quarantined instances, and until when; null: permanently."""
    return [
        {
            "node": instance.node,
            "until": None if math.isinf(instance.seconds) else round(now + instance.seconds),
            "times": instance.times,
            "why": instance.why,
        }
        for instance in state.quarantined()[:LINES_SHOWN]
    ]
