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
        GAUGE, SEAT, "in-flight window of a source, in microbatches"
    ),
    "planaria_node_receive_bytes_total": Kind(COUNTER, NODE, "bytes from other nodes"),
    "planaria_node_transmit_bytes_total": Kind(COUNTER, NODE, "bytes to other nodes"),
    "planaria_node_memory_bytes": Kind(GAUGE, NODE, "memory of its device, in all"),
    "planaria_node_stalled_seconds": Kind(
        GAUGE, NODE, "since its compute thread made progress; 0: it does, or is idle"
    ),
    "planaria_node_links_missing": Kind(GAUGE, NODE, "nodes that it needs and has no link to"),
    "planaria_link_round_trip_seconds": Kind(
        GAUGE, ("node", "peer"), "round trip, measured by planaria probe"
    ),
    "planaria_link_bytes_per_second": Kind(
        GAUGE, ("node", "peer"), "bandwidth, measured by planaria probe"
    ),
}
"""Metrics at a node, and for each node at the registry."""
AT_NODE = {
    "planaria_node_time_seconds_total": Kind(
        COUNTER, ("node", "part"), "wall time by use: compute, average, rebuild, send, idle"
    ),
}
AT_REGISTRY = {
    "planaria_committed_steps_total": Kind(COUNTER, (), "newest committed step"),
    "planaria_steps": Kind(GAUGE, (), "planned steps of the run"),
    "planaria_trained_tokens_total": Kind(COUNTER, (), "tokens in committed steps"),
    "planaria_loss": Kind(GAUGE, (), "loss of the newest step, nats a token"),
    "planaria_validation_loss": Kind(GAUGE, (), "newest loss of held-out text, nats a token"),
    "planaria_view": Kind(GAUGE, (), "number of the view"),
    "planaria_nodes": Kind(GAUGE, ("stage",), "nodes with a seat at the stage; standby: without"),
    "planaria_node_silence_seconds": Kind(GAUGE, NODE, "since the registry last heard from it"),
    "planaria_node_work_per_second": Kind(GAUGE, NODE, "GFLOP/s, measured when it started"),
    "planaria_rebuilds_total": Kind(COUNTER, ("stage", "method"), "rebuilds of stages"),
    "planaria_node_seconds_total": Kind(COUNTER, (), "sum of all node-seconds"),
    "planaria_quarantined_nodes": Kind(GAUGE, (), "nodes evicted for cause and still excluded"),
    "planaria_cut_links": Kind(GAUGE, (), "pairs of nodes that can't reach each other directly"),
}
ALL = AT_REGISTRY | OF_NODE | AT_NODE


class Point(NamedTuple):
    """A metric's value at a moment; `labels` without `run`."""

    name: str
    labels: tuple[str, ...]
    value: float


def exposition(run: str, samples: Iterable[Point]) -> bytes:
    """Prometheus's text format of metrics' finite values."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, labels, value in samples:
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


def registry_points(description: Description, history: History, run: RunFile) -> Iterator[Point]:
    state = RunState(description, history.story)
    samples = run.batches.samples_until(state.committed)
    yield Point("planaria_committed_steps_total", (), state.committed)
    yield Point("planaria_steps", (), run.steps)
    yield Point("planaria_trained_tokens_total", (), samples * run.model.config.context)
    yield Point("planaria_loss", (), state.loss)
    for point in history.validation.points[-1:]:
        yield Point("planaria_validation_loss", (), point[1] if point else math.nan)
    yield Point("planaria_view", (), description.view.number)
    nodes = Counter(seat.stage for seat in state.seats)
    for stage in (*range(run.model.body_stages + 1), None):
        yield Point("planaria_nodes", ("standby" if stage is None else str(stage),), nodes[stage])
    for (stage, method), count in history.rebuilt.items():
        yield Point("planaria_rebuilds_total", (str(stage), method), count)
    yield Point("planaria_node_seconds_total", (), history.node_seconds)
    yield Point("planaria_quarantined_nodes", (), len(state.quarantined()))
    yield Point("planaria_cut_links", (), len(description.cuts))
    peers = {entry.member.node for entry in description.members}
    for entry in description.members[:MOST_NODES]:
        node = entry.member.node
        yield Point("planaria_node_silence_seconds", (node,), entry.since_renewal)
        yield Point("planaria_node_work_per_second", (node,), entry.member.speed)
        yield from _report_points(node, entry.report, peers if len(peers) <= MOST_LINKED else set())


def node_points(node: str, report: Report, seconds: Mapping[str, float]) -> Iterator[Point]:
    """Samples at a node; `seconds`: its wall time by part."""
    yield from _report_points(node, report, {link.peer for link in report.links})
    for part, spent in seconds.items():
        if part != "total":
            yield Point("planaria_node_time_seconds_total", (node, part), spent)


def _report_points(node: str, report: Report, peers: Set[str]) -> Iterator[Point]:
    """Samples of a node's report; `peers`: whose links count, since a report is untrusted."""
    for seat in report.seats:
        at = str(seat.stage), node
        yield Point("planaria_seat_committed_steps_total", at, seat.committed)
        yield Point("planaria_seat_microbatches_total", at, seat.microbatches)
        if seat.in_flight:
            yield Point("planaria_seat_in_flight_microbatches", at, seat.in_flight)
    yield Point("planaria_node_receive_bytes_total", (node,), report.bytes_in)
    yield Point("planaria_node_transmit_bytes_total", (node,), report.bytes_out)
    yield Point("planaria_node_memory_bytes", (node,), report.memory)
    yield Point("planaria_node_stalled_seconds", (node,), report.stalled_seconds)
    missing = len(report.complaints) + report.unlisted
    yield Point("planaria_node_links_missing", (node,), missing)
    for link in (link for link in report.links if link.peer in peers):
        yield Point("planaria_link_round_trip_seconds", (node, link.peer), link.rtt_ms / 1e3)
        yield Point("planaria_link_bytes_per_second", (node, link.peer), link.mbps * 1e6 / 8)
