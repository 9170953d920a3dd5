from __future__ import annotations

import math
from typing import Any

import pytest

from planaria.node.wire.budget import ITEM, PEERS
from planaria.node.wire.exchange import (
    Exchange,
    ExchangeInbox,
    Exchanges,
    Inboxes,
    Letter,
    Lost,
    Outcome,
)
from tests.harness.network import AtOnce, Nodes, Thread


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def exchanges(nodes: Nodes) -> Exchanges:
    return nodes.new()


def test_it_runs_at_once_up_to_its_first_wait() -> None:
    nodes = Nodes()
    compute = Thread(nodes)
    compute.held = True
    exchanges = nodes.new(compute)
    done = []

    async def work() -> None:
        done.append(await exchanges.compute(lambda: "worked"))

    exchanges.start(work())
    assert len(compute.posted) == 1
    compute.work()
    assert done == []  # an exchange never resumes inside the call that ends its wait
    nodes.catch_up()
    assert done == ["worked"]


def test_what_work_raises_is_raised_where_it_is_waited_for(
    nodes: Nodes, exchanges: Exchanges
) -> None:

    async def work() -> str:
        try:
            await exchanges.compute(lambda: 1 // 0)
        except ZeroDivisionError:
            return "told"
        return "not told"

    assert nodes.run(exchanges, work()) == "told"


def test_what_nobody_catches_is_told_to_the_owner() -> None:
    crashed: list[BaseException] = []
    loop: Any = Nodes()
    exchanges = Exchanges(AtOnce(), loop, crashed.append)

    async def work() -> None:
        raise ValueError("broken")

    exchanges.start(work())
    assert [str(error) for error in crashed] == ["broken"]


def test_a_deadline_is_met_at_its_time_and_not_before(nodes: Nodes, exchanges: Exchanges) -> None:
    times = []

    async def work() -> None:
        try:
            await Outcome[None](exchanges).within(exchanges.now + 5.0)
        except TimeoutError:
            times.append(exchanges.now)

    exchanges.start(work())
    assert nodes.next == 5.0
    nodes.sleep(4.999)
    assert times == []
    nodes.sleep(2.001)
    assert times == [5.0]
    assert nodes.next == math.inf


def test_what_comes_in_time_beats_the_deadline(nodes: Nodes, exchanges: Exchanges) -> None:
    outcome: Outcome[str] = Outcome(exchanges)
    nodes.after(5.0, lambda: outcome.fulfil("here"))

    async def work() -> str:
        return await outcome.within(5.0)

    exchange = exchanges.start(work())
    nodes.sleep(6.0)
    assert exchange.result() == "here"


def test_who_is_given_up_goes_no_further_and_cleans_up(nodes: Nodes, exchanges: Exchanges) -> None:
    outcome: Outcome[None] = Outcome(exchanges)
    trace = []

    async def work() -> None:
        try:
            await outcome
            trace.append("went on")
        finally:
            trace.append("cleaned up")

    exchange = exchanges.start(work())
    outcome.fulfil(None)
    exchange.cancel()
    nodes.catch_up()
    assert trace == ["cleaned up"]


def test_one_that_gives_itself_up_ends_at_its_next_wait(nodes: Nodes, exchanges: Exchanges) -> None:
    trace = []

    async def work() -> None:
        await exchanges.sleep(1.0)
        exchange.cancel()
        trace.append("not closed while it runs")
        await exchanges.sleep(1.0)
        trace.append("went on")

    exchange = exchanges.start(work())
    nodes.sleep(9.0)
    assert trace == ["not closed while it runs"]


def test_together_gives_results_in_order(nodes: Nodes, exchanges: Exchanges) -> None:

    async def part(seconds: float) -> float:
        await exchanges.sleep(seconds)
        return seconds

    assert nodes.run(exchanges, exchanges.together([part(3.0), part(1.0), part(2.0)])) == [3, 1, 2]
    assert nodes.now == 3.0
    assert nodes.run(exchanges, exchanges.together([])) == []


def test_the_first_that_fails_ends_the_others(nodes: Nodes, exchanges: Exchanges) -> None:
    trace = []

    async def fails() -> None:
        await exchanges.sleep(1.0)
        raise ValueError("broken")

    async def waits() -> None:
        try:
            await Outcome[None](exchanges)
        finally:
            trace.append("given up")

    with pytest.raises(ValueError, match="broken"):
        nodes.run(exchanges, exchanges.together([waits(), fails()]))
    assert trace == ["given up"]


# Inboxes


def taking(
    exchanges: Exchanges, inboxes: Inboxes[Any, str], key: Any
) -> tuple[list[Letter[str]], Exchange[None]]:
    """Starts an exchange that takes all letters; returns the letters and the exchange."""
    letters: list[Letter[str]] = []

    async def work() -> None:
        with inboxes.open(key) as inbox:
            while True:
                letters.append(await inbox.take())

    return letters, exchanges.start(work())


def test_an_inbox_gets_what_is_for_its_number_and_who_is_lost(
    nodes: Nodes, exchanges: Exchanges
) -> None:
    inboxes: Inboxes[int, str] = Inboxes(exchanges, 0)
    first, exchange = taking(exchanges, inboxes, 1)
    second, _ = taking(exchanges, inboxes, 2)
    inboxes.put(1, "a", "one")
    inboxes.put(2, "a", "two")
    inboxes.put(3, "a", "three")
    inboxes.lost("b", "gone")
    nodes.catch_up()
    assert first == [("a", "one"), ("b", Lost("gone"))]
    assert second == [("a", "two"), ("b", Lost("gone"))]
    exchange.cancel()
    inboxes.put(1, "a", "late")
    nodes.catch_up()
    assert len(first) == 2


def test_what_comes_early_waits_within_its_bytes(nodes: Nodes, exchanges: Exchanges) -> None:
    inboxes: Inboxes[tuple[int, int], str] = Inboxes(exchanges, (0, 0), early_limit=10)
    inboxes.put((1, 1), "a", "given up with what is newer", 4)
    inboxes.put((1, 2), "a", "kept", 6)
    inboxes.put((1, 2), "a", "too much", 5)
    inboxes.put((1, 2), "b", "of another", 10)
    inboxes.put((1, 1), "b", "older than what it has begun", 1)
    letters, _ = taking(exchanges, inboxes, (1, 2))
    nodes.catch_up()
    assert letters == [("a", "kept"), ("b", "of another")]


def test_who_sends_more_than_is_read_is_as_good_as_lost_and_fills_nothing(
    nodes: Nodes, exchanges: Exchanges
) -> None:
    inboxes: Inboxes[int, str] = Inboxes(exchanges, 0, open_limit=10 * ITEM)
    letters, _ = taking(exchanges, inboxes, 1)
    inboxes.put(1, "b", "of another", ITEM)
    for _ in range(100):
        inboxes.put(1, "a", "much", ITEM)
        inboxes.put(1, "a", "nothing", 0)
    inboxes.put(1, "b", "goes on", ITEM)
    nodes.catch_up()
    assert [item for peer, item in letters if peer == "b"] == ["of another", "goes on"]
    (lost,) = [item for peer, item in letters if peer == "a"]
    assert lost == Lost("a has sent more than the 10240 bytes that may wait here of one peer", 6)
    inboxes.put(1, "a", "again", 0)
    nodes.catch_up()
    assert len(letters) == 3


def test_what_is_read_makes_room(nodes: Nodes, exchanges: Exchanges) -> None:
    inboxes: Inboxes[int, str] = Inboxes(exchanges, 0, open_limit=4 * ITEM)
    letters, _ = taking(exchanges, inboxes, 1)
    for _ in range(100):
        inboxes.put(1, "a", "some", 3 * ITEM)
        nodes.catch_up()
    assert [item for _, item in letters] == ["some"] * 100


def test_peers_that_are_ahead_fill_only_so_much_together(
    nodes: Nodes, exchanges: Exchanges
) -> None:
    inboxes: Inboxes[int, str] = Inboxes(exchanges, 0, early_limit=10)
    for number in range(20):
        inboxes.put(1, f"n{number}", "early", 10)
    letters, _ = taking(exchanges, inboxes, 1)
    nodes.catch_up()
    assert len(letters) == PEERS


def test_what_is_forgotten_does_not_come_back(nodes: Nodes, exchanges: Exchanges) -> None:
    inboxes: Inboxes[int, str] = Inboxes(exchanges, 0, early_limit=10)
    inboxes.put(1, "a", "old", 1)
    inboxes.put(3, "b", "new", 1)
    inboxes.forget(before=2)
    inboxes.put(1, "c", "older than all", 1)
    old, _ = taking(exchanges, inboxes, 1)
    new, _ = taking(exchanges, inboxes, 3)
    nodes.catch_up()
    assert (old, new) == ([], [("b", "new")])


def test_what_comes_of_a_peer_that_has_sent_too_much_wakes_nobody(
    nodes: Nodes, exchanges: Exchanges
) -> None:
    inbox: ExchangeInbox[str] = ExchangeInbox(exchanges, limit=100)
    taken: list[str] = []

    async def read() -> None:
        for _ in range(3):
            letter = await inbox.take()
            taken.append(letter.peer)

    reading = exchanges.start(read())
    inbox.put("greedy", "much", 1 << 20)
    while nodes.step():
        pass
    inbox.put("greedy", "more", 1)
    while nodes.step():
        pass
    for peer in ("b", "c"):
        inbox.put(peer, "small", 1)
    nodes.outcome(reading)
    assert taken == ["greedy", "b", "c"]
