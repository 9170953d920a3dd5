"""What is on the page, as one JSON object: a pure function of what the registry knows and of what
has happened. A finished run's page is made by the same function (see replay.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from planaria.bootstrap.membership import place_of
from planaria.bootstrap.registry_pb2 import Description, Member, MemberDescription, SeatReport
from planaria.bootstrap.truncation import cut_from
from planaria.node.model.learning_rate import of_run
from planaria.node.report.events import Severity
from planaria.node.report.history import Curve, History
from planaria.node.report.live_view import seats_of, state_of, told_of
from planaria.node.run_file import RunFile
from planaria.node.wire.naming import node_of

NODES_SHOWN = 24
"""Of a stage; the others are counted."""
LINKS_SHOWN = 200
LINES_SHOWN = 40
NEWS_SHOWN = 120
FIGURES = 6
"""Of a loss on the page."""


class Moment(NamedTuple):
    """When the page is of, and of what."""

    now: float  # Unix seconds
    began: float  # Unix seconds, since when something is known of the run
    ended: float | None = None  # Unix seconds; None: it may go on
    tokens_per_second: float | None = None  # None: as its nodes say
    price: float | None = None  # of a node hour, in whatever currency


def page_state(
    description: Description, history: History, run: RunFile, moment: Moment
) -> dict[str, Any]:
    """All that the page shows; times in Unix seconds. `run` says `model.stages`. The value of each
    key stands for itself, so that only those that have changed need be sent."""
    seats = [seat for one in description.members for seat in one.report.seats]
    committed = committed_of(description, history)
    stages = [_stage(description, at) for at in range((run.model.stages or 0) + 1)]
    standbys = [one for one in description.members if not one.member.seats]
    word, sentence = _condition(description, seats, stages, history)
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
        "progress": _progress(description, seats, committed, history, run, moment),
        "view": {"number": description.view.number, "reason": description.view.reason},
        "stages": stages,
        "standbys": _nodes(standbys, None, description.view.driver),
        "links": _links(description),
        "loss": {
            "training": _rounded(history.loss),
            "validation": _rounded(history.validation),
            "marks": [mark._asdict() for mark in history.marks],
        },
        "news": [
            {"time": told.time, "severity": told.severity.name.lower(), "sentence": told.sentence}
            for told in list(history.news)[-NEWS_SHOWN:]
        ],
        "samples": [sample._asdict() for sample in history.samples],
        "troubles": _troubles(description),
        "cuts": _cuts(description),
        "quarantine": _quarantine(description, moment.now),
        "evictions": [
            {"time": moment.now - one.seconds, "sentence": f"{_named(one.member)}: {one.reason}"}
            for one in description.evictions
        ],
        "decisions": list(description.decisions)[-LINES_SHOWN:],
    }


def committed_of(description: Description, history: History) -> tuple[int, float]:
    """The newest committed step, and its loss. A run that has gone back to files stands at an older
    step, of a newer lineage."""
    view = description.view
    seats = [seat for one in description.members for seat in one.report.seats]
    newest = max(seats, key=lambda seat: (seat.lineage, seat.committed), default=None)
    told = (newest.lineage, newest.committed) if newest else (0, 0)
    _, step = max(told, (view.lineage, view.committed))
    story = history.story
    if not max(step, story.committed):
        return 0, math.nan
    if not seats or (step, math.isfinite(story.loss)) == (story.committed, True):
        return max(step, story.committed), story.loss
    return step, newest.loss if newest is not None and newest.committed == step else math.nan


def _progress(
    description: Description,
    seats: Sequence[SeatReport],
    committed: tuple[int, float],
    history: History,
    run: RunFile,
    moment: Moment,
) -> dict[str, Any]:
    step, loss = committed
    rate = moment.tokens_per_second
    if rate is None:
        rate = max((seat.tokens_per_second for seat in seats), default=0.0)
    left = (run.steps - step) * history.seconds_a_step
    last = next((point for point in reversed(history.validation.points) if point), None)
    price = moment.price
    return {
        "step": step,
        "loss": _figure(loss),
        "validation": _figure(last[1]) if last else None,
        "learning_rate": of_run(max(1, step), run),
        "tokens": step * run.training.batch * run.model.config.context,
        "tokens_per_second": round(rate, 1) if 0 < rate < math.inf else None,
        "seconds_left": round(left) if left > 0 and moment.ended is None else None,
        "nodes": len(description.members),
        "node_hours": round(history.node_seconds / 3600, 4),
        "spent": None if price is None else round(price * history.node_seconds / 3600, 4),
        "rebuilds": sum(history.rebuilt.values()),
    }


def _condition(
    description: Description,
    seats: Sequence[SeatReport],
    stages: Sequence[dict[str, Any]],
    history: History,
) -> tuple[str, str]:
    """How it goes: in one word, and in a sentence."""
    story = history.story
    stopped = next((seat.message for seat in seats if seat.stopped), "")
    if stopped or story.stopped is not None:
        return "stopped", stopped or (story.stopped.reason if story.stopped else "")
    if story.finished is not None or any(seat.finished for seat in seats):
        return "finished", "all steps are committed"
    vacant = [str(stage["stage"]) for stage in stages if not stage["count"]]
    driving = (
        seat.message
        for one in description.members
        if one.member.node == description.view.driver
        for seat in one.report.seats
        if seat.stage == 0
    )
    said = next(driving, "") or description.view.reason
    if not description.members:
        return "waiting", said or "no node has joined yet"
    if vacant:
        what = "stages" if len(vacant) > 1 else "stage"
        why = f": {said}" if said else ""
        return "waiting", f"nobody serves {what} {', '.join(vacant)}{why}"
    if story.rebuilds or any(stage["state"] == "rebuilding" for stage in stages):
        return "rebuilding", said
    if not description.view.driver:
        return "waiting", said
    return "training", said


def _stage(description: Description, at: int) -> dict[str, Any]:
    members = [one for one in description.members if at in seats_of(one.member)]
    states = sorted({state_of(one, at)[0] for one in members}, key=_WORST.index)
    driver = description.view.driver if at == 0 else ""
    return {
        "stage": at,
        "state": states[0] if states else "vacant",
        "count": len(members),
        "nodes": _nodes(members, at, driver),
    }


_WORST = (
    *("hangs", "not heard", "suspected", "rebuilding", "joining", "waiting", "halted", "idle"),
    *("running", "averaging", "ready"),
)
"""The states of a node, those that matter most first."""


def _nodes(members: Iterable[MemberDescription], stage: int | None, driver: str) -> list[Any]:
    return [
        {
            "node": one.member.node,
            "state": state_of(one, stage)[0],
            "step": told_of(one, stage).committed,
            "microbatches": told_of(one, stage).microbatches,
            "speed": round(one.member.speed, 1) if math.isfinite(one.member.speed) else None,
            "memory": one.report.memory,
            "bytes_in": one.report.bytes_in,
            "bytes_out": one.report.bytes_out,
            "host": one.member.host,
            "device": one.member.device,
            "address": one.member.address,
            "silence": round(one.since_renewal, 1),
            "driver": bool(driver) and one.member.node == driver,
            "leaving": one.member.leaving,
        }
        for one, _ in zip(members, range(NODES_SHOWN), strict=False)
    ]


def _links(description: Description) -> list[Any]:
    """What members have measured of links to others that are there, with the stages they join."""
    stage = {one.member.node: seats_of(one.member)[0] for one in description.members}
    found: list[dict[str, Any]] = []
    for one in description.members:
        for link in one.report.links:
            if link.peer in stage and math.isfinite(link.rtt_ms) and math.isfinite(link.mbps):
                found.append(
                    {
                        "from": one.member.node,
                        "to": link.peer,
                        "stages": [stage[one.member.node], stage[link.peer]],
                        "rtt_ms": round(link.rtt_ms, 2),
                        "mbps": round(link.mbps, 1),
                    }
                )
    return sorted(found, key=lambda link: link["mbps"])[:LINKS_SHOWN]


def _rounded(curve: Curve) -> list[list[float] | None]:
    return [point and [point[0], float(f"{point[1]:.{FIGURES}g}")] for point in curve.points]


def _figure(loss: float) -> float | None:
    return float(f"{loss:.{FIGURES}g}") if math.isfinite(loss) else None


def _troubles(description: Description) -> list[str]:
    """What somebody has to see to."""
    found = [f"the registry: {description.trouble}"] if description.trouble else []
    found += cut_from(description)
    found += [
        f"{_named(m.member)}: {m.report.trouble}" for m in description.members if m.report.trouble
    ]
    return found[:LINES_SHOWN]


def _cuts(description: Description) -> list[dict[str, Any]]:
    """Of members that can't reach each other."""
    names = {one.member.node: _named(one.member) for one in description.members}
    found = []
    for cut in description.cuts[:LINES_SHOWN]:
        a, b = (names.get(node, node) for node in (cut.a, cut.b))
        carried = bool(cut.via) and cut.carried
        how = f"by way of {names.get(cut.via, cut.via)}" if carried else f"not at all: {cut.state}"
        severity = Severity.WARNING if carried else Severity.ERROR
        sentence = f"{a} reaches {b} {how}"
        found.append({"sentence": sentence, "severity": severity.name.lower()})
    return found


def _quarantine(description: Description, now: float) -> list[dict[str, Any]]:
    """Who was evicted for cause and is out, and until when; null: for good."""
    return [
        {
            "node": one.node,
            "until": None if math.isinf(one.seconds) else round(now + one.seconds),
            "times": one.times,
            "why": one.why,
        }
        for one in description.quarantined[:LINES_SHOWN]
        if one.seconds > 0
    ]


def _named(member: Member) -> str:
    return f"{node_of(member.node)} ({place_of(member)})"
