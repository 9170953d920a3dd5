"""The part of a plan that each member is told, and what the member decodes from it."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.driver.attempt_state import planned
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.plan_encoding import PlanDecoder, PlanEncoder, in_order
from planaria.node.transaction.routing import routes
from planaria.node.wire import stage_pb2 as pb

STAGES = 2
Swarm = dict[str, int]


def begun(members: Swarm, microbatches: int = 4, joining: Swarm | None = None) -> pb.Begin:
    places = in_order([pb.Place(node=n, stage=at) for n, at in members.items()])
    orders = [[1, 2] if number % 2 else [2, 1] for number in range(microbatches)]
    begin = pb.Begin(
        step=1, members=places, plan=planned(dict(sorted(members.items())), orders, {})
    )
    begin.joining.extend(
        pb.Joiner(node=node, stage=at) for node, at in sorted((joining or {}).items())
    )
    return begin


def parts(
    telling: PlanEncoder, ballot: Ballot, begin: pb.Begin, stages: Swarm
) -> dict[str, pb.Begin]:
    """The part of the plan that each of these nodes is told."""
    begins = {node: pb.Begin() for node in stages}
    telling.tell(ballot, begin, begins, stages)
    return begins


def swarm(of_stage: int) -> Swarm:
    return {f"n{stage}.{i}": stage for stage in range(STAGES + 1) for i in range(of_stage)}


def size(begins: dict[str, pb.Begin]) -> int:
    return sum(part.ByteSize() for part in begins.values())


names = [f"n{stage}.{i}" for stage in range(STAGES + 1) for i in range(4)]
trains = st.sets(st.sampled_from(names)).map(
    lambda more: {n: int(n[1]) for n in sorted(more | {f"n{at}.0" for at in range(STAGES + 1)})}
)


@given(
    attempts=st.lists(st.tuples(trains, st.booleans(), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_each_has_all_that_concerns_it_whoever_came_and_went(
    attempts: list[tuple[Swarm, bool, int]],
) -> None:
    """Nodes that don't train follow. Nodes with odd numbers lack the view of the query."""
    telling, heard = PlanEncoder(), defaultdict[str, PlanDecoder](PlanDecoder)
    for number, (members, gathered, microbatches) in enumerate(attempts):
        if gathered:
            having = [name for name in names if int(name[3]) % 2 == 0]
            view = {name: int(name[1]) for name in names[1:]}
            telling.doubt(number, view, having)
            for node in having:
                heard[node].queried(number, view)
        followers = {name: int(name[1]) for name in names if name not in members}
        begin = begun(members, microbatches, followers)
        ballot = Ballot(1, number + 1)
        ways = routes(begin)
        stages = {name: int(name[1]) for name in names}
        for node, part in parts(telling, ballot, begin, stages).items():
            decoded = heard[node].whole(ballot, part)
            assert list(decoded.members) == list(begin.members)
            concern = {m: way for m, way in ways.items() if node in way.nodes}
            assert routes(decoded) == concern
            assert len(decoded.plan) + decoded.untold == microbatches
            assert {j.node for j in decoded.joining} == {
                name for name, stage in followers.items() if stage == stages[node]
            }


def test_what_is_said_of_a_step_grows_with_the_nodes_and_not_with_their_square() -> None:
    sizes = {}
    for of_stage in (4, 40, 400):
        telling, members = PlanEncoder(), swarm(of_stage)
        parts(telling, Ballot(1, 1), begun(members), members)
        again = parts(telling, Ballot(1, 2), begun(members, 2 * of_stage), members)
        sizes[of_stage] = size(again)
    assert sizes[40] < 15 * sizes[4]
    assert sizes[400] < 15 * sizes[40]


def test_after_all_were_asked_each_is_told_what_is_other_than_in_the_view() -> None:
    telling, members = PlanEncoder(), swarm(400)
    telling.doubt(7, {**members, "new": 2}, members)
    begins = parts(telling, Ballot(7, 1), begun(members, 400), members)
    assert all(not part.members and list(part.left) == ["new"] for part in begins.values())
    assert size(begins) < 100 * len(members)


def test_who_enters_is_told_of_all_and_the_others_of_who_came_and_went() -> None:
    telling, members = PlanEncoder(), swarm(2)
    parts(telling, Ballot(1, 1), begun(members), members)
    after = {**members, "new": 2}
    del after["n2.0"]
    begins = parts(telling, Ballot(1, 2), begun(after), after)
    assert len(begins["new"].members) == 6
    assert not begins["new"].HasField("members_of")
    assert [place.node for place in begins["n0.0"].members] == ["new"]
    assert list(begins["n0.0"].left) == ["n2.0"]


def test_what_came_since_an_attempt_that_was_not_heard_of_is_of_no_use() -> None:
    telling, members = PlanEncoder(), swarm(1)
    parts(telling, Ballot(1, 1), begun(members), members)
    part = parts(telling, Ballot(1, 2), begun(members), members)["n0.0"]
    heard = PlanDecoder()
    heard.whole(Ballot(1, 0), begun(members))
    with pytest.raises(ValueError, match=r"since Ballot.*attempt=1.*, but Ballot"):
        heard.whole(Ballot(1, 2), part)
