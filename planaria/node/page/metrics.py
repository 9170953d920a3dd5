"""Metrics for Prometheus, of a registry's run and of a node: pure functions of their state.

Names begin with `planaria_`, units are base units, each has the label `run`. See docs/metrics.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from planaria.bootstrap.registry_pb2 import Description, Report
from planaria.node.report.history import History
from planaria.node.report.run_state import RunState
from planaria.node.run_file import RunFile

MOST_NODES = 1000
"""Limit of nodes with metrics of their own at a registry; the others count only in sums."""
MOST_LINKED = 50
"""Limit of nodes up to which a registry has metrics of links."""


class Kind(NamedTuple):
    """Type, labels and help text of a metric."""

    type: type[CounterMetricFamily] | type[GaugeMetricFamily]
    labels: tuple[str, ...]  # beside `run`
    meaning: str


COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
SEAT, NODE = ("stage", "node"), ("node",)
OF_NODE = {
    "planaria_seat_committed_steps_total": Kind(COUNTER, SEAT, "newest step in a seat's weights"),
    "planaria_seat_microbatches_total": Kind(COUNTER, SEAT, "microbatches that a seat computed"),
    "planaria_seat_in_flight_microbatches": Kind(
        GAUGE, SEAT, "microbatches that a source may have out at a time"
    ),
    "planaria_node_receive_bytes_total": Kind(COUNTER, NODE, "bytes from other nodes"),
    "planaria_node_transmit_bytes_total": Kind(COUNTER, NODE, "bytes to other nodes"),
    "planaria_node_memory_bytes": Kind(GAUGE, NODE, "memory of its device, in all"),
    "planaria_node_stalled_seconds": Kind(
        GAUGE, NODE, "since its compute made progress; 0: it does, or has nothing to do"
    ),
    "planaria_node_links_missing": Kind(GAUGE, NODE, "nodes that it needs, and has no link to"),
    "planaria_link_round_trip_seconds": Kind(
        GAUGE, ("node", "peer"), "until a byte was acknowledged, as planaria probe found"
    ),
    "planaria_link_bytes_per_second": Kind(
        GAUGE, ("node", "peer"), "that could be sent, as planaria probe found"
    ),
}
"""Metrics at a node, and for each node at the registry."""
AT_NODE = {
    "planaria_node_time_seconds_total": Kind(
        COUNTER, ("node", "part"), "where a node's time went: compute, average, rebuild, send, idle"
    ),
}
AT_REGISTRY = {
    "planaria_committed_steps_total": Kind(COUNTER, (), "newest committed step"),
    "planaria_steps": Kind(GAUGE, (), "steps that the run is to have"),
    "planaria_trained_tokens_total": Kind(COUNTER, (), "tokens in committed steps"),
    "planaria_loss": Kind(GAUGE, (), "loss of the newest step, nats a token"),
    "planaria_validation_loss": Kind(GAUGE, (), "newest loss of held-out text, nats a token"),
    "planaria_view": Kind(GAUGE, (), "number of the view"),
    "planaria_nodes": Kind(GAUGE, ("stage",), "nodes with a seat there; of stage standby: none"),
    "planaria_node_silence_seconds": Kind(GAUGE, NODE, "since the registry last heard of it"),
    "planaria_node_work_per_second": Kind(GAUGE, NODE, "GFLOP/s, measured when it started"),
    "planaria_rebuilds_total": Kind(COUNTER, ("stage", "method"), "stages that got their state"),
    "planaria_node_seconds_total": Kind(COUNTER, (), "of all nodes together: what one pays for"),
    "planaria_quarantined_nodes": Kind(GAUGE, (), "nodes that were evicted for cause and are out"),
    "planaria_cut_links": Kind(GAUGE, (), "pairs of nodes that can't reach each other directly"),
}
ALL = AT_REGISTRY | OF_NODE | AT_NODE


class Found(NamedTuple):
    """A sample; `labels` without `run`."""

    name: str
    labels: tuple[str, ...]
    value: float


def exposition(run: str, found: Iterable[Found]) -> bytes:
    """Prometheus text format of finite samples."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, labels, value in found:
        if math.isfinite(value):
            kind = ALL[name]
            if name not in families:
                families[name] = kind.type(name, kind.meaning, labels=("run", *kind.labels))
            families[name].add_metric((run, *labels), value)
    return generate_latest(_Collected(families.values()))


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def of_registry(description: Description, history: History, run: RunFile) -> Iterator[Found]:
    state = RunState(description, history.story)
    samples = state.committed * run.training.batch
    yield Found("planaria_committed_steps_total", (), state.committed)
    yield Found("planaria_steps", (), run.steps)
    yield Found("planaria_trained_tokens_total", (), samples * run.model.config.context)
    yield Found("planaria_loss", (), state.loss)
    for point in history.validation.points[-1:]:
        yield Found("planaria_validation_loss", (), point[1] if point else math.nan)
    yield Found("planaria_view", (), description.view.number)
    nodes = Counter(seat.stage for seat in state.seats)
    for stage in (*range((run.model.stages or 0) + 1), None):
        yield Found("planaria_nodes", ("standby" if stage is None else str(stage),), nodes[stage])
    for (stage, method), count in history.rebuilt.items():
        yield Found("planaria_rebuilds_total", (str(stage), method), count)
    yield Found("planaria_node_seconds_total", (), history.node_seconds)
    yield Found("planaria_quarantined_nodes", (), len(state.quarantined()))
    yield Found("planaria_cut_links", (), len(description.cuts))
    peers = {one.member.node for one in description.members}
    for one in description.members[:MOST_NODES]:
        node = one.member.node
        yield Found("planaria_node_silence_seconds", (node,), one.since_renewal)
        yield Found("planaria_node_work_per_second", (node,), one.member.speed)
        yield from _of_report(node, one.report, peers if len(peers) <= MOST_LINKED else set())


def of_node(node: str, report: Report, seconds: Mapping[str, float]) -> Iterator[Found]:
    """Samples at a node; `seconds`: its wall time by part."""
    yield from _of_report(node, report, {link.peer for link in report.links})
    for part, spent in seconds.items():
        if part != "total":
            yield Found("planaria_node_time_seconds_total", (node, part), spent)


def _of_report(node: str, report: Report, peers: Set[str]) -> Iterator[Found]:
    """Samples of a node's report; `peers`: whose links count, since a report is untrusted."""
    for seat in report.seats:
        at = str(seat.stage), node
        yield Found("planaria_seat_committed_steps_total", at, seat.committed)
        yield Found("planaria_seat_microbatches_total", at, seat.microbatches)
        if seat.in_flight:
            yield Found("planaria_seat_in_flight_microbatches", at, seat.in_flight)
    yield Found("planaria_node_receive_bytes_total", (node,), report.bytes_in)
    yield Found("planaria_node_transmit_bytes_total", (node,), report.bytes_out)
    yield Found("planaria_node_memory_bytes", (node,), report.memory)
    yield Found("planaria_node_stalled_seconds", (node,), report.stalled_seconds)
    missing = len(report.complaints) + report.unlisted
    yield Found("planaria_node_links_missing", (node,), missing)
    for link in (link for link in report.links if link.peer in peers):
        yield Found("planaria_link_round_trip_seconds", (node, link.peer), link.rtt_ms / 1e3)
        yield Found("planaria_link_bytes_per_second", (node, link.peer), link.mbps * 1e6 / 8)
