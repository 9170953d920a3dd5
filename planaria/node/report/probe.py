"""`planaria probe`: properties of a swarm's nodes, and speeds of their links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import Description

LOOK: Final = 0.5  # seconds between two polls


async def probe(client: RegistryClient, wait: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Has all nodes measure, and returns `{"nodes": [..], "links": [..]}`. Nodes have `node`,
    `stages` (none: a standby), `device`, `memory` (bytes), `tflops` (of a float32 matrix product).
    Links have `a`, the sender, `b`, `rtt_ms`, `mbps`. Nodes that don't measure within `wait`
    seconds are reported by `say`, and their links are left out.

    Raises UserError without nodes, and exceptions of the client.
    """
    request = await client.measure()
    if not request.nodes:
        raise UserError("no node is connected to the registry: start some with planaria node")
    deadline = asyncio.get_running_loop().time() + wait
    while True:
        description = await client.describe()
        pending = [
            entry.member.node
            for entry in description.members
            if entry.report.measured < request.number
        ]
        if not pending:
            break
        if asyncio.get_running_loop().time() >= deadline:
            say(f"no measurement within {wait:g} s by {', '.join(pending)}")
            break
        await asyncio.sleep(LOOK)
    return probe_results(description, request.number)


def probe_results(description: Description, number: int) -> dict[str, Any]:
    """Results of the measurement with that number, and of later ones."""
    members = {entry.member.node for entry in description.members}
    return {
        "nodes": [
            {
                "node": entry.member.node,
                "stages": stages_of(entry.member),
                "device": entry.member.device,
                "memory": entry.report.memory,
                "tflops": entry.member.speed / 1e3,
            }
            for entry in description.members
        ],
        "links": [
            {
                "a": entry.member.node,
                "b": link.peer,
                "rtt_ms": round(link.rtt_ms, 3),
                "mbps": round(link.mbps, 3),
            }
            for entry in description.members
            if entry.report.measured >= number
            for link in entry.report.links
            if link.peer in members
        ],
    }


def probe_tables(probed: dict[str, Any]) -> Iterator[Table]:
    nodes = Table(title="Nodes")
    for column in ("node", "stages", "device", "memory, GiB", "TFLOP/s"):
        nodes.add_column(column, justify="left" if column in ("node", "device") else "right")
    for node in probed["nodes"]:
        stages = ", ".join(map(str, node["stages"])) or "standby"
        memory, speed = f"{node['memory'] / 2**30:.1f}", f"{node['tflops']:.3f}"
        nodes.add_row(node["node"], stages, escape(node["device"]), memory, speed)
    yield nodes
    links = Table(title="Links")
    for column in ("from", "to", "round trip, ms", "Mbit/s"):
        links.add_column(column, justify="left" if column in ("from", "to") else "right")
    for link in probed["links"]:
        links.add_row(link["a"], link["b"], f"{link['rtt_ms']:.1f}", f"{link['mbps']:.0f}")
    yield links
