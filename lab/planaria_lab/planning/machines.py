"""Reads the nodes and links of a plan, from command line options or from measurements."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

from planaria_lab.emulation.links import WAN_LINKS, Link, Network, all_alike, read_links
from planaria_lab.planning.planner import Machine, PlanError
from planaria_lab.simulator.swarm import one_site
from planaria_lab.simulator.swarm import sites as network_of

SUSTAINED: Final = 0.4
"""Share of a GPU's peak that training sustains, if it wasn't measured."""


UNIFIED: Final = 0.75
"""Share of an Apple machine's memory that its GPU may use under macOS."""


class Kind(NamedTuple):
    """Figures of a GPU model from its maker's data sheet."""

    memory: float  # GB
    tflops: float  # dense bf16 (or fp16) TFLOP/s, with sums in float32
    bandwidth: float  # GB/s
    shared: bool = False  # GPU and processor share one memory


KINDS: Final[Mapping[str, Kind]] = {
    "t4": Kind(16, 65, 320),
    "v100": Kind(16, 125, 900),
    "l4": Kind(24, 121, 300),
    "rtx3060": Kind(12, 25.5, 360),
    "rtx3060ti": Kind(8, 32.4, 448),
    "rtx3070": Kind(8, 40.6, 448),
    "rtx3080": Kind(10, 59.5, 760),
    "rtx3090": Kind(24, 71, 936),
    "rtx4060": Kind(8, 30.2, 272),
    "rtx4060ti": Kind(16, 44.1, 288),
    "rtx4070": Kind(12, 58.3, 504),
    "rtx4080": Kind(16, 97.5, 717),
    "rtx4090": Kind(24, 165, 1008),
    "rtx5070": Kind(12, 61.7, 672),
    "rtx5080": Kind(16, 112.6, 960),
    "rtx5090": Kind(32, 209.5, 1792),
    "m1": Kind(8, 2.6, 68, shared=True),
    "m1max": Kind(32, 10.4, 400, shared=True),
    "m2": Kind(8, 3.6, 100, shared=True),
    "m2pro": Kind(16, 6.8, 200, shared=True),
    "m2max": Kind(32, 13.6, 400, shared=True),
    "m2ultra": Kind(64, 27.2, 800, shared=True),
    "m3": Kind(8, 3.6, 100, shared=True),
    "m3max": Kind(36, 14.3, 400, shared=True),
    "a100": Kind(80, 312, 2039),
    "h100": Kind(80, 989, 3350),
}


class Owned(NamedTuple):
    """Machines of one kind, as given on the command line."""

    kind: str
    memory: float | None = None  # GB; None: the kind's
    number: int | None = None  # of machines; None: one, or the number in other options


def parse_kinds(text: str) -> tuple[Owned, ...]:
    """Parses the value of `--kind`: KIND[:GB][ xN], ... Raises PlanError."""
    machines = []
    for part in text.split(","):
        written = re.fullmatch(
            r"(\w+)(?::(\d+(?:\.\d+)?))?(?:\s+x\s?(\d+))?", part.strip(), re.ASCII
        )
        kind, memory, count = written.groups() if written else ("", None, None)
        if written is None or count == "0" or (memory and not float(memory)):
            raise PlanError(
                f"--kind {text}: {part.strip()!r} is no kind: write KIND[:GB][ xN], .., as in "
                '"rtx3060:12 x2, rtx4090"'
            )
        kind = kind.lower()
        if kind not in KINDS:
            raise PlanError(
                f"--kind {kind} is unknown: choose from {', '.join(KINDS)}; for another kind give "
                "--tflops and --memory"
            )
        machines.append(
            Owned(kind, float(memory) if memory else None, int(count) if count else None)
        )
    return tuple(machines)


class Hardware(NamedTuple):
    """The options about nodes. None: the option isn't given."""

    nodes: int | None
    kinds: tuple[Owned, ...]
    tflops: float | None
    memory: float | None  # GB
    host: float | None  # GB
    bandwidth: float | None  # GB/s
    price: float
    cpu: bool


def alike(
    hardware: Hardware,
    sites: list[str],
    table: Path | None,
    delay: float,
    mbps: float,
    uplink: float | None,
) -> tuple[tuple[Machine, ...], Network]:
    """The machines of these options, and their network. Site after site is filled. Without sites
    but with an uplink, each machine has its own site. Raises PlanError, LinkError."""
    kinds = [owned for owned in hardware.kinds for _ in range(owned.number or 1)]
    several = len(kinds) > 1 or any(owned.number for owned in hardware.kinds)
    if several and hardware.nodes not in (None, len(kinds)):
        raise PlanError(
            f"--nodes {hardware.nodes} contradicts the {len(kinds)} machines of --kind: leave "
            "--nodes out"
        )
    counts = _counts(len(kinds) if several else hardware.nodes, sites)
    if sites:
        uplinks = {} if uplink is None else dict.fromkeys(counts, uplink)
        network = network_of(read_links(table or WAN_LINKS), uplinks, counts)
    elif uplink is not None:
        homes = [f"home {number}" for number in range(1, sum(counts.values()) + 1)]
        counts = dict.fromkeys(homes, 1)
        network = all_alike(homes, delay, mbps, uplink)
    else:
        network = one_site(delay, mbps)
    places = [name for name, count in counts.items() for _ in range(count)]
    owned: list[Owned | None] = [*kinds]
    if not several:
        owned = (owned or [None]) * len(places)
    pairs = zip(places, owned, strict=True)
    machines = tuple(_machine(f"node {i}", *pair, hardware) for i, pair in enumerate(pairs, 1))
    return machines, network


def _counts(nodes: int | None, sites: list[str]) -> dict[str, int]:
    """The number of nodes at each site. `sites`: as NAME or NAME:NODES. Raises PlanError."""
    counts: dict[str, int] = {}
    open_sites = []
    for text in sites:
        name, colon, count = text.partition(":")
        if colon and not (count.isascii() and count.isdigit() and int(count)):
            raise PlanError(f"--site {text}: write NAME or NAME:NODES, as in Iowa:6")
        counts[name] = counts.get(name, 0) + int(count or 0)
        open_sites += [] if colon else [name]
    placed = sum(counts.values())
    if nodes is None and (open_sites or not sites):
        raise PlanError("the number of nodes is missing: give --nodes, or --site NAME:NODES")
    remaining = (placed if nodes is None else nodes) - placed
    if remaining < len(open_sites) or (remaining and sites and not open_sites):
        raise PlanError(f"--nodes {nodes} contradicts the {placed} nodes of --site NAME:NODES")
    for i, name in enumerate(open_sites):
        counts[name] += remaining // len(open_sites) + (i < remaining % len(open_sites))
    return counts or {"anywhere": remaining}


def _machine(
    name: str,
    site: str,
    owned: Owned | None,
    hardware: Hardware,
    tflops: float | None = None,
    memory: float | None = None,
    cpu: bool = False,
) -> Machine:
    """A machine with the figures of the options; by default the measured ones, then its kind's.
    Raises PlanError."""
    kind = KINDS[owned.kind] if owned else None
    flops = hardware.tflops or tflops or (SUSTAINED * kind.tflops if kind else 0.0)
    size = (owned and owned.memory) or hardware.memory or memory or (kind.memory if kind else 0.0)
    if not (flops > 0 and size > 0):
        raise PlanError(
            f"the speed and memory of {name} are missing: give --kind, or --tflops and --memory"
        )
    moves = hardware.bandwidth or (kind.bandwidth if kind else 500.0)
    host = math.inf if hardware.host is None else 1e9 * hardware.host
    unified = kind is not None and kind.shared
    return Machine(
        f"{name} ({owned.kind})" if owned else name,
        site,
        flops=1e12 * flops,
        memory=1e9 * size * (UNIFIED if unified else 1.0),
        host=host,
        bandwidth=1e9 * moves,
        price=hardware.price,
        shared=cpu or hardware.cpu or unified,
    )


def probed(path: Path, hardware: Hardware) -> tuple[tuple[Machine, ...], Network]:
    """The machines and the network that `planaria probe` has measured (node/report/probe.py).

    Each node is its own site. Of a pair's two directions the worse counts. A pair that wasn't
    measured is as bad as the worst measured one. Raises PlanError.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        nodes = [
            (str(row["node"]), str(row["device"]), float(row["memory"]), float(row["tflops"]))
            for row in data["nodes"]
        ]
        links: dict[frozenset[str], tuple[float, float]] = {}
        for row in data["links"]:
            pair, delay, rate = frozenset((row["a"], row["b"])), row["rtt_ms"] / 2, row["mbps"]
            other = links.get(pair, (delay, rate))
            links[pair] = max(delay, other[0]), min(rate, other[1])
    except (OSError, ValueError) as error:
        raise PlanError(f"can't read the probe {path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"{path} is no probe: {error!r} is missing or invalid in it; write a probe with "
            "`planaria probe`"
        ) from error
    if len(nodes) < 2 or not links:
        raise PlanError(
            f"{path} has {len(nodes)} nodes and {len(links)} links: planning needs at least two "
            "nodes and a link"
        )
    bad = [pair for pair, (delay, rate) in links.items() if not (delay >= 0 and rate > 0)]
    if bad:
        delay, rate = links[bad[0]]
        raise PlanError(
            f"{path}: {2 * delay:g} ms and {rate:g} Mbit/s between {' and '.join(sorted(bad[0]))} "
            "are impossible for a link: measure again"
        )
    worst = max(d for d, _ in links.values()), min(m for _, m in links.values())
    names = _in_a_row([name for name, *_ in nodes], links, worst)
    by_name = {node[0]: node for node in nodes}
    if len(hardware.kinds) > 1:
        raise PlanError(
            f"{path} names the nodes, so give at most one --kind, which holds for all of them"
        )
    owned = hardware.kinds[0] if hardware.kinds else None
    machines = tuple(
        _machine(name, name, owned, hardware, tflops, memory / 1e9, device.startswith("cpu"))
        for name, device, memory, tflops in (by_name[name] for name in names)
    )
    measured = (Link(a, b, *links.get(frozenset((a, b)), worst)) for a, b in combinations(names, 2))
    return machines, network_of(measured)


def _in_a_row(
    names: list[str],
    links: Mapping[frozenset[str], tuple[float, float]],
    worst: tuple[float, float],
) -> list[str]:
    """The nodes in a row, each followed by the nearest of the remaining ones. Stages are cut from
    this row."""
    row, remaining = names[:1], set(names[1:])
    while remaining:
        nearest = min(remaining, key=lambda n: (links.get(frozenset((row[-1], n)), worst)[0], n))
        row.append(nearest)
        remaining.remove(nearest)
    return row
