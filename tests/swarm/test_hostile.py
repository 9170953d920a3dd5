"""A member that lies, beside honest ones: nothing comes of it, and whoever is innocent stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.registry_pb2 import Description
from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.run_file import dumps
from tests.swarm.hostile import JOINING, MUCH, run_hostile, tell
from tests.swarm.lines import Lines
from tests.swarm.small import small

DEADLINE = 300.0  # seconds; only a hanging test gets there
HONEST = {"0.0": 0, "1.0": 1, "2.0": 2}  # stages, by slot
REPLICATED = {"0.0": 0, "0.1": 0, "1.0": 1, "1.1": 1, "2.0": 2}


class Place:
    """A registry, an honest node at each stage, and one beside that of stage 2, which lies."""

    slots = HONEST

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.lies = folder, folder / "lies"
        run = resolve(small(steps=100_000, training__batch=4, data__path=str(data)))
        (folder / "run.toml").write_text(dumps(run))
        self.folders = folder_options(run)
        (folder / "logs").mkdir()
        self.lines = Lines(folder / "logs")
        self.processes = Processes(
            folder / "logs", {"OMP_NUM_THREADS": "1"}, PLANARIA, work=run_hostile
        )

    def start(self) -> None:
        file, journal = self.folder / "address", self.folder / "journal"
        named = ["--address-file", str(file), "--journal", str(journal)]
        run = ["--run", str(self.folder / "run.toml"), "--listen", "127.0.0.1:0"]
        self.processes.start("registry", ["bootstrap", *run, *named])
        self.wait_for("the registry", file.exists)
        self.address = file.read_text().strip()
        for slot, stage in self.slots.items():
            self.start_node(slot, stage, [])
        self.wait_for("all", lambda: len(self.described().view.members) == len(self.slots))
        self.wait_for("two steps", lambda: self.committed() >= 2)
        self.honest = {member.node for member in self.described().view.members}

    def start_node(self, slot: str, stage: int, before: list[str]) -> None:
        out = ["--out", str(self.folder / "logs"), "--save-dir", "none", "--threads", "1"]
        join = ["node", "--join", self.address, "--stage", str(stage)]
        self.processes.start(slot, [*before, *join, *out, *self.folders])

    def start_liar(self, slot: str) -> str:
        """Its name, once it trains."""
        tell(self.lies, "")
        self.start_node(slot, 2, ["--lies", str(self.lies)])
        self.wait_for("a liar", lambda: len(self.described().view.members) > len(self.slots))
        (liar,) = {member.node for member in self.described().view.members} - self.honest
        self.wait_for("it to train", lambda: self.trains(liar))
        return liar

    def trains(self, node: str) -> bool:
        applied = self.lines.events("applied")
        return any(one["node"] == node for one in applied) or any(
            seat.committed >= self.committed() - 1 > 0
            for one in self.described().members
            for seat in one.report.seats
            if one.member.node == node
        )

    def described(self) -> Description:
        async def describe() -> Description:
            client = RegistryClient([self.address])
            try:
                return await client.describe()
            finally:
                await client.close()

        return asyncio.run(describe())

    def committed(self) -> int:
        steps = (line["step"] for line in self.lines.of("ledger-*.jsonl") if "step" in line)
        return max(steps, default=0)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until, f"still waiting for {what}"
            time.sleep(0.05)

    def goes_on(self) -> None:
        """Whoever is innocent trains."""
        step = self.committed()
        self.wait_for("more steps", lambda: self.committed() >= step + 5)
        members = {member.node for member in self.described().view.members}
        assert self.honest <= members


@pytest.fixture
def place(data: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, data)
    yield place
    place.processes.kill_all()


def test_what_a_member_may_not_say_is_refused_and_named_and_nothing_comes_of_it(
    place: Place,
) -> None:
    place.start()
    liar = place.start_liar("liar")
    for lie in ("query", "halt", "sync"):
        tell(place.lies, lie)
        refused = f"{liar}/2"
        place.wait_for(
            f"its {lie} to be refused",
            lambda lie=lie, refused=refused: any(
                (one["peer"], one["body"]) == (refused, lie)
                for one in place.lines.events("refused")
            ),
        )
        place.goes_on()
    assert {member.node for member in place.described().view.members} == {*place.honest, liar}


def test_who_says_what_cannot_be_goes_and_whom_it_accuses_stays(place: Place) -> None:
    place.start()
    for lie, why in {
        "status": "it claims step 1000000",
        "stale": "it sent an invalid message: attempt 18446744073709551615",
        "failed": "it has accused others 3 times",
    }.items():
        liar = place.start_liar(lie)
        tell(place.lies, lie)
        place.wait_for(
            f"{lie} to be out",
            lambda liar=liar: liar not in {m.node for m in place.described().view.members},
        )
        place.processes.kill(lie)  # else it comes back after its quarantine
        tell(place.lies, "")
        place.goes_on()
        decisions = place.described().decisions
        assert any(liar in decision and why in decision for decision in decisions), lie
    a_joiner_that_says_it_has_a_step_to_come_goes_and_nobody_follows_it(place)


def a_joiner_that_says_it_has_a_step_to_come_goes_and_nobody_follows_it(place: Place) -> None:
    """It has trained nothing yet: what it has is the first that it says."""
    rebuilt = len(place.lines.events("rebuilt"))
    why = f"it claims step {MUCH}"

    def convicted() -> list[str]:
        return [decision for decision in place.described().decisions if why in decision]

    before = convicted()
    tell(place.lies, JOINING)
    place.start_node("liar", 2, ["--lies", str(place.lies)])
    place.wait_for("it to be named", lambda: convicted() != before)
    place.processes.kill("liar")
    place.goes_on()
    members = {member.node for member in place.described().view.members}
    assert members == place.honest
    steps = [line["step"] for line in place.lines.of("ledger-*.jsonl") if "step" in line]
    assert max(steps) < MUCH and sorted(set(steps)) == list(range(1, max(steps) + 1))
    assert len(place.lines.events("rebuilt")) == rebuilt


def test_who_accuses_a_replica_again_and_again_goes_and_the_replica_stays(place: Place) -> None:
    """Another node of stage 0 sees for itself what the driver has said of the liar."""
    place.slots = REPLICATED
    place.start()
    liar = place.start_liar("liar")
    tell(place.lies, "slander")
    place.wait_for(
        "it to be out", lambda: liar not in {m.node for m in place.described().view.members}
    )
    tell(place.lies, "")
    place.goes_on()
    (gone,) = [one for one in place.described().evictions if one.member.node == liar]
    assert "it has accused others 3 times" in gone.reason
    drivers = {
        member.node for member in place.described().view.members if member.seats[0].stage == 0
    }
    assert all(driver in gone.reason for driver in drivers)
