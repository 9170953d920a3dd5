"""Only the run owner's nodes serve stage 0; other nodes wait for one of these."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from planaria.bootstrap.invites import encode
from planaria.node.report.ledger import audit
from tests.swarm.machines import machines

WAITS = "stage 0 is vacant: waiting for a node of the run's owner"


async def test_the_owners_last_node_leaves_the_exact_state(data: Path, tmp_path: Path) -> None:
    with machines(tmp_path, data, 1) as here:
        here.start_registry("127.0.0.1:0")
        owner, invited = encode(await here.invite("owner")), encode(await here.invite("node"))
        here.start_node("a", owner)
        here.start_node("b", invited)
        newest = await here.committed(beyond=1)
        os.kill(here.processes.running()["a"], signal.SIGTERM)
        await here.logged("a", "has the exact state of stage 0")
        await here.logged("b", f"no stage-0 member can drive; {WAITS}")
        here.start_node("again", owner)
        await here.logged("again", "its last node left the exact state at a peer")
        await here.committed(beyond=newest + 5)
    for ledger in tmp_path.glob("again/ledger-*.jsonl"):
        ledger.rename(tmp_path / "a" / ledger.name)
    audited = audit(tmp_path / "a")
    assert (audited.duplicates, audited.missing, audited.extra) == (0, 0, 0)
