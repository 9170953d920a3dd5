from hypothesis import given
from hypothesis import strategies as st

from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.following import FollowingJoiner, feeders
from planaria.node.wire import stage_pb2 as pb

names = st.text("abcdef", min_size=1, max_size=3)
placed = st.lists(st.tuples(names, st.integers(0, 3)), max_size=12, unique_by=lambda p: p[0])


# --- feeders


@given(placed, placed)
def test_every_joiner_has_a_replica_of_its_stage_and_the_work_is_shared(
    trains: list[tuple[str, int]], joins: list[tuple[str, int]]
) -> None:
    begin = pb.Begin(
        members=[pb.Place(node=node, stage=stage) for node, stage in trains],
        joining=[pb.Joiner(node=f"j{node}", stage=stage) for node, stage in joins],
    )
    assigned = feeders(begin)
    assert assigned.keys() == {f"j{node}" for node, _ in joins}
    for stage in range(4):
        replicas = [node for node, at in trains if at == stage]
        fed = [assigned[f"j{node}"] for node, at in joins if at == stage]
        shares = [fed.count(node) for node in replicas]
        if replicas:
            assert sum(shares) == len(fed)
            assert max(shares) - min(shares) <= 1
        else:
            assert set(fed) <= {""}
    members = list(begin.members)
    del begin.members[:]
    begin.members.extend(reversed(members))
    assert feeders(begin) == assigned, "whatever the order"


# --- commits and gradients that a joiner keeps


def commit(step: int, attempt: int) -> pb.Commit:
    return pb.Commit(step=step, ballot=Ballot(1, attempt).message())


def test_each_commit_is_due_once_in_order_with_the_gradient_of_its_attempt() -> None:
    following = FollowingJoiner(Ballot(1, 1), 4, 4)
    following.hear(commit(5, 2))
    following.hear(commit(6, 4))
    assert following.due() is None
    following.came(Ballot(1, 3), "a")
    following.came(Ballot(1, 4), "a")
    assert following.due() is None, "step 5 comes first"
    following.came(Ballot(1, 2), "b")
    assert following.due() == commit(5, 2)
    following.applied(commit(5, 2))
    assert following.due() == commit(6, 4)
    following.applied(commit(6, 4))
    assert (following.due(), following.heard) == (None, 6)
    assert following.gradients == set(), "and that of attempt 3 is forgotten"


def test_what_was_doubted_can_be_heard_again_or_replaced() -> None:
    following = FollowingJoiner(Ballot(1, 1), 4, 4)
    following.hear(commit(5, 2))
    following.doubt()
    assert following.heard == 4
    following.doubt()
    assert following.heard == 4, "no commit is left to doubt"
    following.hear(commit(5, 6))
    following.came(Ballot(1, 2), "a")
    assert following.due() is None
    following.came(Ballot(1, 6), "a")
    assert following.due() == commit(5, 6)
