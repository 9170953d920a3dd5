"""Tests of registries that follow, and of one that leads no more."""

from __future__ import annotations

import asyncio

import pytest

from planaria.bootstrap.client import JoinRefused, RegistryClient, RegistryUnreachable
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.bootstrap.leader_election import Follower, lead_in_turn
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.service import RegistryServer, over_grpc
from planaria.bootstrap.store import LEASE, NotLeading, Store
from tests.bootstrap.conftest import KEY, RULES, Node, identity, joining, serving, soon
from tests.bootstrap.fake_etcd import FakeEtcd, Fate
from tests.harness.ports import free_port


def store(etcd: FakeEtcd, at: str, fates: list[Fate] | None = None) -> Store:
    link = etcd.link(lambda: fates[0] if fates else Fate.ANSWERED)
    return Store(link, "r", KEY, at, lambda: etcd.now)


class Kept:
    """A store that loses its lease when the test sets `lost`."""

    damage = ""

    def __init__(self) -> None:
        self.view: View | None = None
        self.lost = False

    def append(self, view: View) -> None:
        if self.lost:
            raise NotLeading("another registry leads")
        self.view = view


async def test_a_view_that_is_not_written_is_told_to_nobody() -> None:
    kept = Kept()
    registry = RegistryServer(RULES, "", kept)
    port = await registry.start("127.0.0.1:0")
    clients = [RegistryClient([f"127.0.0.1:{port}"]) for _ in range(3)]
    reply = await clients[0].join(joining("a", "a:1"), identity("a"))
    node = Node("a", clients[0], reply)
    await node.sees(lambda view: len(view.members) == 1)
    kept.lost = True
    with pytest.raises(RegistryUnreachable, match="this registry does not lead any more"):
        await clients[1].join(joining("b", "b:1"), identity("b"), deadline=4.0)
    with pytest.raises(RegistryUnreachable, match="this registry does not lead any more"):
        await clients[2].describe(deadline=4.0)
    with pytest.raises(NotLeading, match="another registry leads"):
        await soon(registry.wait())
    await registry.stop()
    assert {tuple(m.node for m in view.members) for view in node.views} == {("a",)}
    assert kept.view is not None and len(kept.view.members) == 1
    await node.stop()
    for client in clients:
        await client.close()


async def test_who_follows_says_who_leads_or_why_nobody_does() -> None:
    etcd, fates = FakeEtcd(), [Fate.ANSWERED]
    leader, mine = store(etcd, "first.example.org:1"), store(etcd, "b:1", fates)
    assert leader.campaign()
    transport = over_grpc(Credentials(token="secret"), insecure=False)
    following, stop = Follower(mine, transport), asyncio.Future[int]()
    address = f"127.0.0.1:{free_port()}"
    credentials = Credentials(token="secret"), PLAIN
    clients = [RegistryClient([address], credential) for credential in credentials]

    async def says(words: str) -> None:
        error = ""
        while words not in error:
            with pytest.raises(RegistryUnreachable) as caught:
                await clients[0].describe(deadline=0.2)
            error = str(caught.value)

    async with following.serving(address):
        electing = asyncio.create_task(following.until_elected(stop))
        await soon(says("this registry follows, and first.example.org:1 leads"))
        fates[0] = Fate.LOST
        await soon(says("etcd doesn't answer: no registry leads"))
        with pytest.raises(JoinRefused, match="requires a join token"):
            await clients[1].describe()
        fates[0] = Fate.ANSWERED
        etcd.passes(LEASE)
        await soon(electing)
    assert mine.leads and not leader.leads
    for client in clients:
        await client.close()


async def test_a_registry_that_is_stopped_as_it_is_elected_gives_the_lead_back() -> None:
    etcd, stop = FakeEtcd(), asyncio.Future[int]()
    mine, other = store(etcd, "a:1"), store(etcd, "b:1")
    campaign, loop = mine.campaign, asyncio.get_running_loop()

    def campaign_late() -> bool:
        elected = campaign()
        loop.call_soon_threadsafe(stop.set_result, 15)
        return elected

    async def lead(*_: object) -> None:
        raise AssertionError("it is stopped")

    mine.campaign = campaign_late  # type: ignore[method-assign]
    place = f"127.0.0.1:{free_port()}"
    await soon(lead_in_turn(mine, lead, place, lambda: over_grpc(PLAIN, insecure=False), stop=stop))
    assert other.leader() == "" and other.campaign()


async def test_a_node_goes_from_who_follows_to_who_leads() -> None:
    etcd = FakeEtcd()
    leader = store(etcd, "a:1")
    assert leader.campaign()
    async with serving() as place:
        following = Follower(store(etcd, "b:1"), over_grpc(PLAIN, insecure=False))
        address = f"127.0.0.1:{free_port()}"
        async with following.serving(address):
            client = RegistryClient([address, place.address])
            reply = await client.join(joining("a", "a:1"), identity("a"))
            assert [m.node for m in reply.view.members] == ["a"]
            assert (await client.describe()).run == "r"
            await client.check_one_run()
            await client.close()
