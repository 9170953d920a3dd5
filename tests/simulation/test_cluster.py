"""Whole clusters under faults; `--seeds N` for more of them, `--seed S` for one."""

import pytest

from node import stage_pb2 as pb
from node.driver import Driver
from node.effects import Adopt, Ballot, Effect
from node.member import Member, Phase
from simulation.scenario import ScenarioError, run

SEEDS, CHUNK = 200, 25


class Forgetful(Member):
    """Drops what is ready when a driver asks."""

    def _queried(self, peer: str, ballot: Ballot) -> list[Effect]:
        if self.phase is Phase.READY:
            self.phase = Phase.IDLE
        return super()._queried(peer, ballot)


class Oblivious(Driver):
    """Begins anew as if nobody had committed what only some have."""

    def _can_follow(self, status: pb.Status) -> bool:
        return False


class Presumptuous(Driver):
    """Takes the silence of a member for consent."""

    def _ask_again(self, now: float) -> list[Effect]:
        for node in self._unheard():
            del self.members[node]
        return self._resolve(now) if self.statuses else super()._ask_again(now)


class DoubleCounting(Member):
    """Has its gradient applied twice over."""

    def _commit(self, commit: pb.Commit) -> list[Effect]:
        return 2 * super()._commit(commit)


class Muddled(Member):
    """Follows with whatever gradient came last."""

    def _follow_on(self) -> list[Effect]:
        newest = max(self.following.gradients, default=None) if self.following else None
        effects = super()._follow_on()
        return [Adopt(newest) if newest and isinstance(e, Adopt) else e for e in effects]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        one = metafunc.config.getoption("seed", default=None)
        count = metafunc.config.getoption("seeds", default=SEEDS)
        starts = range(0, count, CHUNK) if one is None else [one]
        chunks = [
            range(start, min(start + CHUNK, count) if one is None else one + 1) for start in starts
        ]
        names = [f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks]
        metafunc.parametrize("seeds", chunks, ids=names)


def test_invariants_hold_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        try:
            run(seed)
        except ScenarioError as error:
            pytest.fail(str(error), pytrace=False)


@pytest.mark.parametrize(
    ("member", "driver", "invariant"),
    [
        (DoubleCounting, Driver, "I1|I3"),
        (Muddled, Driver, "I2"),
        (Forgetful, Driver, "stopped without need|but .* had it"),
        (Member, Oblivious, "stopped without need|but .* had it"),
        (Member, Presumptuous, "I[234]"),
    ],
)
def test_a_faulty_machine_is_caught(
    member: type[Member], driver: type[Driver], invariant: str
) -> None:
    with pytest.raises(ScenarioError, match=invariant):
        for seed in range(100):
            run(seed, member, driver)


def test_a_scenario_is_the_same_each_time() -> None:
    assert run(3) == run(3)
