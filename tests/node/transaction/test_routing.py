from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.neighbours import DRIVERS, Neighbours
from planaria.bootstrap.registry_pb2 import Member, Seat
from planaria.node.state.transfer import SOURCES
from planaria.node.transaction.routing import (
    Pair,
    Route,
    earliest_finish,
    paces,
    plan,
    routes,
    share_out,
    shortened,
    turns,
)
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of, seat_id
from planaria.recovery.orders import window_orders
from planaria.recovery.snapshot import route as copied


def test_a_new_node_counts_as_average():
    assert earliest_finish(["a", "b"], {"a": 1}, paces("ab", {"a": 3.0})) == "b"


def test_who_has_no_microbatches_is_expected_to_be_faster_but_no_faster_than_the_fastest():
    seconds = {"a": 1.0, "b": 2.0}
    stages = {"a": 1, "b": 1, "c": 2}
    assert shortened("b", stages, seconds) == 1.6
    assert shortened("b", stages, seconds | {"b": 1.1}) == 1.0
    assert shortened("a", stages, seconds) == 1.0
    assert shortened("c", stages, seconds) == 0.0, "nothing is known of its stage"


def test_who_is_reached_by_a_detour_is_given_only_what_nobody_else_is_nearer_to():
    detours = {(0, "a"): 1, (2, "a"): 1, (2, "b"): 1}
    alike = paces("ab", {})
    shares = share_out(range(4), ["a", "b"], alike, lambda *visit: detours.get(visit, 0))
    assert shares == ["b", "a", "a", "b"]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(0, 40))
def test_shares_end_together_but_for_a_microbatch(speeds, count):
    nodes = [f"n{i}" for i in range(len(speeds))]
    seconds = dict(zip(nodes, speeds, strict=True))
    given_to = share_out(range(count), nodes, seconds)
    assert len(given_to) == count
    busiest = max((given_to.count(node) * seconds[node] for node in nodes), default=0.0)
    for node in nodes:
        assert (given_to.count(node) + 1) * seconds[node] >= busiest * (1 - 1e-9)


@given(st.lists(st.sampled_from([0.5, 1, 2.0, 3.7]), min_size=1, max_size=6), st.integers(0, 40))
def test_turns_are_shares_of_an_idle_stage_in_the_same_order(speeds, count):
    pace = {f"n{i}": speed for i, speed in enumerate(speeds)}
    assert [*islice(turns([*pace], pace), count)] == share_out(range(count), [*pace], pace)


def test_a_plan_gives_each_visit_a_node_of_its_stage_by_speed():
    replicas = [["a", "b"], ["c"], ["d", "e"], ["f"], ["g"]]
    planned = plan(window_orders(1, 6, 4, True), replicas, {"d": 1.0, "e": 2.0})
    assert {route.stages for route in planned} == {(0, 1, 2, 3, 4, 0), (0, 2, 1, 4, 3, 0)}
    for route in planned:
        assert route.nodes[0] == route.nodes[-1]
        assert all(n in replicas[s] for n, s in zip(route.nodes, route.stages, strict=True))
    visited = [node for route in planned for node in route.nodes[:-1]]
    assert [visited.count(node) for node in "abcdefg"] == [3, 3, 6, 4, 2, 6, 6]


def hops(planned: Sequence[Route], apart: Collection[Pair]) -> int:
    """Counts hops of microbatches between the nodes of a pair in `apart`."""
    return sum(frozenset(hop) in apart for route in planned for hop in pairwise(route.nodes))


def test_two_that_are_apart_have_no_microbatch_in_common_where_others_can():
    replicas = [["a", "b"], ["c", "d"], ["e", "f"]]
    apart = {frozenset("ce"), frozenset("ac")}
    assert hops(plan([(1, 2)] * 6, replicas, {}), apart) > 0
    planned = plan([(1, 2)] * 6, replicas, {}, apart=apart)
    assert hops(planned, apart) == 0
    visited = Counter(node for route in planned for node in route.nodes[1:])
    assert set(visited.values()) == {3}, "each has as many as it would have"


@pytest.mark.parametrize("replicas", [[["a"], ["b"], ["c"]], [["a"], ["b", "c"], ["d", "e"]]])
def test_two_that_are_apart_change_no_route_if_no_other_goes_or_they_are_replicas(replicas):
    orders = [(1, 2)] * 8
    assert plan(orders, replicas, {}, apart={frozenset("bc")}) == plan(orders, replicas, {})


COUNTS = st.lists(st.integers(1, 3), min_size=5, max_size=6)


@given(COUNTS, st.integers(0, 12), st.booleans(), st.data())
def test_shares_stay_and_no_more_go_between_those_that_are_apart(counts, count, swapped, data):
    replicas = [[f"{stage}.{i}" for i in range(nodes)] for stage, nodes in enumerate(counts)]
    pairs = [frozenset(pair) for pair in combinations([n for nodes in replicas for n in nodes], 2)]
    apart = data.draw(st.sets(st.sampled_from(pairs)))
    orders = window_orders(1, count, len(counts) - 1, swapped)
    usual = plan(orders, replicas, {})
    planned = plan(orders, replicas, {}, apart)
    assert hops(planned, apart) <= hops(usual, apart)
    visited = [
        Counter(n for route in routes for n in route.nodes[1:]) for routes in (planned, usual)
    ]
    assert visited[0] == visited[1]
    for route, before in zip(planned, usual, strict=True):
        assert route.stages == before.stages
        assert route.nodes[0] == route.nodes[-1]
        assert all(n in replicas[s] for n, s in zip(route.nodes, route.stages, strict=True))


# Nodes with several seats: 7f3a/2 is the seat of node 7f3a at stage 2


def seats_of(*nodes: str, stages: int) -> list[list[str]]:
    """The seats of these nodes, by stage; each node has one at each stage."""
    return [[seat_id(node, str(stage)) for node in nodes] for stage in range(stages)]


def seconds_of(planned: Sequence[Route], seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds that each node computes."""
    busy: dict[str, float] = {}
    for route in planned:
        for seat in route.nodes[:-1]:
            busy[node_of(seat)] = busy.get(node_of(seat), 0.0) + seconds[seat]
    return busy


def crossing(planned: Sequence[Route]) -> int:
    """Counts the microbatches that leave their source's node."""
    return sum(len(set(map(node_of, route.nodes))) > 1 for route in planned)


def test_a_node_with_many_seats_has_less_to_do_at_each():
    replicas = [["a/0"], ["a/1", "b/1"], ["a/2"]]
    planned = plan([(1, 2)] * 8, replicas, {})
    assert {route.nodes for route in planned} == {("a/0", "b/1", "a/2", "a/0")}
    slow = {"a/0": 1.0, "a/1": 1.0, "b/1": 4.0, "a/2": 1.0}
    assert seconds_of(plan([(1, 2)] * 8, replicas, slow), slow) == {"a": 20.0, "b": 16.0}


def test_two_nodes_that_serve_everything_train_side_by_side():
    replicas = seats_of("a", "b", stages=5)
    assert crossing(plan([(1, 2, 3, 4)] * 8, replicas, {})) == 0
    seconds = {seat: {"a": 1.0, "b": 4.0}[node_of(seat)] for stage in replicas for seat in stage}
    planned = plan([(1, 2, 3, 4)] * 8, replicas, seconds)
    assert seconds_of(planned, seconds) == {"a": 32.0, "b": 32.0}
    assert crossing(planned) == 1, "eight don't divide by five, so one is partly here, partly there"


@given(
    work=st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6),
    slowness=st.lists(st.floats(1.0, 8.0), min_size=1, max_size=4),
    count=st.integers(1, 24),
)
def test_nodes_that_serve_everything_end_together_but_for_a_visit(work, slowness, count):
    nodes = [f"n{i}" for i in range(len(slowness))]
    replicas = seats_of(*nodes, stages=len(work))
    seconds = {
        seat: w * slow
        for w, stage in zip(work, replicas, strict=True)
        for slow, seat in zip(slowness, stage, strict=True)
    }
    busy = seconds_of(plan([tuple(range(1, len(work)))] * count, replicas, seconds), seconds)
    fair = count * sum(work) / sum(1 / slow for slow in slowness)  # if visits could be divided
    assert max(busy.values()) <= fair + max(work) * max(slowness) * (1 + 1e-6)


SEATED = st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=5, max_size=6)


@given(SEATED, st.integers(1, 12), st.booleans(), st.data())
def test_no_visit_could_go_where_it_ends_sooner(seated, count, swapped, data):
    replicas = [[f"{node}/{stage}" for node in sorted(s)] for stage, s in enumerate(seated)]
    seats = [seat for stage in replicas for seat in stage]
    seconds = {seat: data.draw(st.floats(0.1, 10)) for seat in seats}
    orders = window_orders(1, count, len(replicas) - 1, swapped)
    planned = plan(orders, replicas, seconds)
    for route, order in zip(planned, orders, strict=True):
        assert route.stages == (0, *order, 0)
        assert route.nodes[0] == route.nodes[-1]
        assert all(n in replicas[s] for n, s in zip(route.nodes, route.stages, strict=True))
    shuffled = dict(data.draw(st.permutations(list(seconds.items()))))
    assert plan(orders, replicas, shuffled) == planned, "another driver plans the same"
    if len({node_of(seat) for seat in seats}) == len(seats):
        return  # each stage is shared out by itself: tested above
    busy = {node_of(seat): 0.0 for seat in seats} | seconds_of(planned, seconds)
    for route in planned:
        for seat, stage in zip(route.nodes[:-1], route.stages, strict=False):
            for other in replicas[stage]:
                ends = busy[node_of(other)] + seconds[other]
                assert other == seat or ends >= busy[node_of(seat)] * (1 - 1e-6)


MEMBERS = [pb.Place(node=node, stage=stage) for node, stage in [("a", 0), ("b", 1), ("c", 2)]]


def test_a_route_goes_by_the_plans_places_and_back_to_the_source():
    microbatch = pb.Microbatch(id=3, source="a", order=[2, 1], places=[2, 1])
    begin = pb.Begin(members=MEMBERS, plan=[microbatch])
    assert routes(begin) == {3: Route(("a", "c", "b", "a"), (0, 2, 1, 0))}


@pytest.mark.parametrize("places", [[1], [2, 1], [1, 7], []])
def test_a_plan_that_sends_a_microbatch_to_the_wrong_stage_is_refused(places):
    microbatch = pb.Microbatch(id=3, source="a", order=[1, 2], places=places)
    with pytest.raises(ValueError, match="microbatch 3 is sent to nodes off its order"):
        routes(pb.Begin(members=MEMBERS, plan=[microbatch]))


@pytest.mark.parametrize(("faster", "least"), [(1.0, 0.98), (4.0, 0.93)])
def test_routes_go_along_links_where_nodes_have_a_few_each(faster: float, least: float):
    drawn = Random(2)
    members = [
        Member(
            node=f"{drawn.getrandbits(48):012x}",
            seats=[Seat(stage=number % 10)],
            speed=drawn.choice([1.0, 1.0, 1.0, faster]),
        )
        for number in range(1000)
    ]
    links = Neighbours(members, members[0].node, 9, swapped=False)
    replicas = [[m.node for m in members if m.seats[0].stage == stage] for stage in range(10)]
    seconds = {member.node: 1 / member.speed for member in members}
    planned = plan([range(1, 10)] * 400, replicas, seconds)
    hops = [hop for route in planned for hop in pairwise(route.nodes)]
    assert sum(b in links.of(a) for a, b in hops) >= least * len(hops)


@pytest.mark.parametrize("faster", [1.0, 4.0])
def test_a_thousand_nodes_that_come_and_go_have_at_most_fifty_links_for_tensors(faster: float):
    """Links to members that may drive don't count. Views come half a minute apart, each with two
    losses and two joins. Links used in the last view aren't idle yet: requested links, hops off the
    lanes, paths of copies, and sources of joiners' states."""
    drawn = Random(3)

    def member(stage: int) -> Member:
        speed = drawn.choice([1.0, 1.0, 1.0, faster])
        node = f"{drawn.getrandbits(48):012x}"
        return Member(node=node, seats=[Seat(stage=stage)], speed=speed)

    members = [member(number % 10) for number in range(1000)]
    drivers = {m.node for m in members[: 10 * DRIVERS : 10]}
    joined: list[Member] = []
    before: set[frozenset[str]] = set()
    for _ in range(3):
        links = Neighbours(members, members[0].node, 9, swapped=False)
        replicas = [[m.node for m in members if m.seats[0].stage == stage] for stage in range(10)]
        planned = plan([range(1, 10)] * 400, replicas, {m.node: 1 / m.speed for m in members})
        used = {frozenset(hop) for route in planned for hop in pairwise(route.nodes)}
        used |= {frozenset((m.node, other)) for m in members for other in links.of(m.node)}
        for newcomer in joined:
            peers = replicas[newcomer.seats[0].stage]
            linked = sorted(peers, key=lambda node: node not in links.of(newcomer.node))
            used |= {frozenset((newcomer.node, source)) for source in linked[:SOURCES]}
        places = [(m.node, m.seats[0].stage) for m in members]
        for stage in range(10):
            way = copied(stage, places, 9)
            assert way is not None
            used |= {frozenset((way.sender, holder)) for holder in way.holders}
        living = {m.node for m in members} - drivers
        count = Counter(node for pair in used | before if pair <= living for node in pair)
        assert max(count.values()) <= 50
        lost = {m.node for m in drawn.sample(members[10 * DRIVERS :], 2)}
        joined = [member(m.seats[0].stage) for m in members if m.node in lost]
        members = [m for m in members if m.node not in lost] + joined
        before = used


@given(st.integers(9, 14), st.integers(1, 5), st.integers(1, 40), st.randoms())
def test_in_lanes_each_has_as_many_as_by_turns(first, second, count, drawn):
    replicas = [
        [f"s{stage}n{i}" for i in range(size)] for stage, size in enumerate((first, second, 9))
    ]
    seconds = {seat: drawn.choice([0.5, 1.0, 2.0]) for seats in replicas for seat in seats}
    planned = plan([(1, 2)] * count, replicas, seconds)
    for place, seats in enumerate(replicas):
        pace = paces(seats, seconds)
        assert Counter(route.nodes[place] for route in planned) == Counter(
            islice(turns(seats, pace), count)
        )
    assert all(route.nodes[0] == route.nodes[-1] for route in planned)
