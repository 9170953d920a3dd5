"""A swarm of real processes under mutual TLS, whose machines share nothing but an invite."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

from planaria.bootstrap.authority import who_in
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.invites import decode, encode
from planaria.node.launch.supervisor import TRY_AGAIN
from tests.harness.wire import Wire
from tests.swarm.machines import DEADLINE, TOKEN, Machines, machines


async def test_an_invite_is_all_that_a_machine_needs(data: Path, tmp_path: Path) -> None:
    with machines(tmp_path, data, stages=2) as here:
        await joined_by_invite_and_banned(here)


async def joined_by_invite_and_banned(machines: Machines) -> None:
    machines.start_registry("127.0.0.1:0")
    invited, owner = await machines.invite("node"), await machines.invite("owner")
    operator = await machines.invite("operator")
    async with Wire(invited.registries[0]) as registry, Wire(invited.enrolments[0]) as enrolment:
        for invite in (owner, invited):
            invite.registries[:], invite.enrolments[:] = [registry.address], [enrolment.address]
        for name, invite in (("a", owner), ("b", invited), ("c", invited)):
            machines.start_node(name, encode(invite))
        step = await machines.committed(beyond=1)

        reader = decode(await machines.command("invite", "--role", "reader", join=operator))
        described = json.loads(await machines.command("status", "--json", join=reader))
        members = {each["member"]["node"][0]: each["member"] for each in described["members"]}
        assert members.keys() == {"a", "b", "c"}

        text = await machines.command("generate", "once", "--tokens", "2", join=reader)
        assert text.startswith("once"), "by a tokenizer that stage 0 gives"

        for folder in ("a", "b/nothing"):  # with and without the node's certificate
            assert await is_healthy(members[folder[0]]["address"], machines.folder / folder)
        await a_reader_is_banned(machines, members["a"]["node"], operator)
        await a_reader_has_the_page_and_figures(machines, operator)
        [banned] = [name for name, each in members.items() if not each["seats"][0].get("stage")]
        output = await machines.command("ban", members[banned]["node"], join=operator)
        instances = {each["member"]["node"][0]: each["instance"] for each in described["members"]}
        assert f"{instances[banned]} is banned" in output
        async with asyncio.timeout(DEADLINE):
            while not (ended := machines.processes.ended()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [(each.slot, each.status) for each in ended] == [(banned, TRY_AGAIN)]
        assert not await is_healthy(members[banned]["address"], machines.folder / banned)
        listed = await machines.command("members", join=operator)
        assert [line for line in listed.splitlines() if "banned" in line]
        assert await machines.committed(beyond=step) > step

        seen = [*registry.carried, *enrolment.carried]
        assert sum(map(len, seen)) > 10_000
        for hidden in (owner.secret, invited.secret, TOKEN.encode(), members["a"]["node"].encode()):
            assert not any(hidden in carried for carried in seen)
        for role in ("owner", "node", "operator"):
            assert (machines.authority / f"{role}.invite").read_text().strip() not in (
                machines.logs()
            )
        assert (machines.folder / "a" / "certificate-0.pem").stat().st_mode & 0o777 == 0o600


async def is_healthy(address: str, out: Path) -> bool:
    """Return whether the health check of a node's container succeeds."""
    settings = {"PLANARIA_LISTEN": address, "PLANARIA_OUT": str(out)}
    script = Path(__file__).parents[2] / "docker/healthcheck.py"
    probe = await asyncio.create_subprocess_exec(sys.executable, script, env=os.environ | settings)
    return await asyncio.wait_for(probe.wait(), DEADLINE) == 0


async def a_reader_is_banned(machines: Machines, node: str, operator: Invitation) -> None:
    """Ban a reader while a node sends it its log, and check that this ends."""
    reader = decode(await machines.command("invite", "--role", "reader", join=operator))
    follows = await machines.begin("logs", node, "--follow", join=reader, home="other")
    assert follows.stdout is not None
    await asyncio.wait_for(follows.stdout.readline(), DEADLINE)
    [certificate] = machines.folder.glob("other/**/certificate-*.pem")
    instance = who_in(certificate.read_bytes()).instance
    await machines.command("ban", instance, join=operator)
    output, _ = await asyncio.wait_for(follows.communicate(), DEADLINE)
    assert follows.returncode == 1
    assert "banned" in output.decode()


async def a_reader_has_the_page_and_figures(machines: Machines, operator: Invitation) -> None:
    """Check that a reader serves the page and metrics on its machine, where browsers need no
    certificate, until it is banned."""
    reader = decode(await machines.command("invite", "--role", "reader", join=operator))
    watches = await machines.begin("page", join=reader, home="watcher")
    assert watches.stdout is not None
    line = (await asyncio.wait_for(watches.stdout.readline(), DEADLINE)).decode()
    _, _, url = line.strip().partition("the run is shown at ")
    state = json.loads(await asyncio.to_thread(get, f"{url}state"))
    assert state["run"]["id"] == reader.run and state["progress"]["step"] > 0
    figures = await asyncio.to_thread(get, f"{url}metrics")
    assert f'planaria_steps{{run="{reader.run}"}} 200000.0' in figures
    [certificate] = machines.folder.glob("watcher/**/certificate-*.pem")
    await machines.command("ban", who_in(certificate.read_bytes()).instance, join=operator)
    rest, _ = await asyncio.wait_for(watches.communicate(), DEADLINE)
    assert watches.returncode == 1 and "banned" in rest.decode()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
        return str(answer.read().decode())
