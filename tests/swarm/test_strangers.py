"""Who speaks for others, to the registry and on links, is refused and named; training goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.journal import read_view
from planaria.bootstrap.registry_pb2 import JoinRequest, Report, SeatReport, View
from planaria.bootstrap.rules import PROTOCOL
from planaria.node.local.swarm import ADDRESS
from tests.swarm.small import small
from tests.swarm.stranger import MANY, Stranger

STEPS = 100_000


async def speaks(stranger: Stranger) -> View:
    """At last as a member by right. Returns the view before."""
    view = await stranger.speak()
    client = RegistryClient([stranger.address])
    try:
        await be_ahead_of_all(client, stranger, view)
    finally:
        await client.close()
    return view


async def be_ahead_of_all(client: RegistryClient, stranger: Stranger, view: View) -> None:
    """A member says that all is done, and leaves: the next view."""
    request = JoinRequest(protocol=PROTOCOL, run=view.run, node="ahead", standby=True)
    reply = await client.join(request, stranger.identity)
    client.report(Report(seats=[SeatReport(stage=0, committed=MANY, finished=True)]))
    keeping = asyncio.create_task(
        client.keep_membership("ahead", reply, lambda view: None, lambda why: None)
    )
    while not any("refused a report of ahead " in d for d in (await client.describe()).decisions):
        pass
    await client.leave("ahead", "it has said what it wanted to")
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping


def test_who_speaks_for_others_is_refused_and_named_and_training_goes_on(up):
    swarm = up(small(stages=1, steps=STEPS, swarm__lease=20))
    swarm.wait_until("steps", lambda: swarm.committed() >= 2)
    stranger = Stranger((swarm.out / ADDRESS).read_text().strip())
    view = asyncio.run(asyncio.wait_for(speaks(stranger), 300))
    step = swarm.committed()
    swarm.wait_until("more steps", lambda: swarm.committed() >= step + 2)
    assert swarm.members() == {member.node for member in view.members}
    written = read_view(swarm.out / "logs" / "registry.journal")
    assert written.number > view.number
    assert (written.driver, written.committed <= STEPS) == (view.driver, True)
    logs = {path.stem: path.read_text() for path in (swarm.out / "logs").glob("*.log")}
    for what in ("Renewal", "Suspicion", "LeaveRequest"):
        assert f"a {what} in the name of" in logs["registry"]
    refused = f"a hello in the name of {view.driver} is not signed by the key"
    assert any(refused in text for name, text in logs.items() if name != "registry")
