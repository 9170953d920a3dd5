import asyncio
import io

import pytest
import virtual_time

from planaria.bootstrap.errors import UserError
from planaria.bootstrap.registry_pb2 import (
    Description,
    LinkReport,
    MeasureReply,
    Member,
    MemberDescription,
    Report,
    Seat,
)
from planaria.node.report.probe import probe, probe_results, probe_tables
from planaria.node.report.readable_console import ReadableConsole
from planaria.node.wire.link_speed import LARGEST, SMALLEST, MeasuredLink, measure


def measured_over(delay: float, rate: float) -> tuple[MeasuredLink, list[int]]:
    """Measure a link with a round trip of `delay` seconds and `rate` bytes a second. Returns the
    result and the sizes sent."""
    sizes: list[int] = []

    async def send(size: int) -> None:
        sizes.append(size)
        await asyncio.sleep(delay + size / rate)

    async def work() -> MeasuredLink:
        return await measure(send, asyncio.get_running_loop().time)

    return virtual_time.run(work()), sizes


@pytest.mark.parametrize("delay", [0.0005, 0.2])
@pytest.mark.parametrize("rate", [1e5, 12.5e6, 2e9])
def test_a_link_is_measured_whatever_its_delay_and_bandwidth(delay: float, rate: float) -> None:
    result, sizes = measured_over(delay, rate)
    assert result.rtt == pytest.approx(delay, abs=2 / rate)
    assert result.rate == pytest.approx(rate, rel=0.01)
    assert max(sizes) <= LARGEST


def test_a_slow_link_is_not_kept_busy_longer_than_it_takes_to_know() -> None:
    _, sizes = measured_over(0.05, 1e5)
    assert sizes == [1] * 5 + [SMALLEST]


def described(number: int, *late: str) -> Description:
    members = []
    for node, stage in (("a", 0), ("b", 1)):
        links = [LinkReport(peer="b" if node == "a" else "a", rtt_ms=40.0, mbps=93.7)]
        links.append(LinkReport(peer="gone", rtt_ms=1.0, mbps=1.0))
        done = 0 if node in late else number
        report = Report(memory=2**34, measured=done, links=links)
        member = Member(node=node, seats=[Seat(stage=stage)], device="cpu", speed=1500.0)
        members.append(MemberDescription(member=member, report=report))
    standby = Member(node="c", device="cuda:0")
    members.append(MemberDescription(member=standby, report=Report(measured=number)))
    return Description(members=members)


def test_what_is_found_is_the_members_and_the_links_between_them() -> None:
    probed = probe_results(described(3, "b"), 3)
    assert probed["nodes"][0] == {
        "node": "a",
        "stages": [0],
        "device": "cpu",
        "memory": 2**34,
        "tflops": 1.5,
    }
    assert [node["stages"] for node in probed["nodes"]] == [[0], [1], []]
    assert probed["links"] == [{"a": "a", "b": "b", "rtt_ms": 40.0, "mbps": 93.7}]
    assert [part.row_count for part in probe_tables(probed)] == [3, 1]


def test_a_device_is_named_as_it_is() -> None:
    description = described(3, "b")
    description.members[0].member.device = "cuda:0 [/odd]"
    console = ReadableConsole(file=io.StringIO(), width=100)
    console.print(*probe_tables(probe_results(description, 3)))
    assert "cuda:0 [/odd]" in console.file.getvalue()  # type: ignore[attr-defined]


class Registry:
    def __init__(self, descriptions: list[Description], nodes: int = 3) -> None:
        self.descriptions, self.nodes = descriptions, nodes

    async def measure(self) -> MeasureReply:
        return MeasureReply(number=3, nodes=self.nodes)

    async def describe(self) -> Description:
        return self.descriptions.pop(0) if len(self.descriptions) > 1 else self.descriptions[0]


@pytest.mark.parametrize(
    ("last", "links", "expected"),
    [(described(3), 2, []), (described(3, "b"), 1, ["no measurement within 10 s by b"])],
    ids=["all", "one is late"],
)
def test_it_waits_until_all_have_measured_and_names_who_has_not(
    last: Description, links: int, expected: list[str]
) -> None:
    messages: list[str] = []
    registry = Registry([described(2), described(3, "b"), last])
    probed = virtual_time.run(probe(registry, 10.0, messages.append))  # type: ignore[arg-type]
    assert (len(probed["links"]), messages) == (links, expected)


def test_without_nodes_there_is_nothing_to_measure() -> None:
    with pytest.raises(UserError, match="planaria node"):
        virtual_time.run(probe(Registry([], nodes=0), 10.0, print))  # type: ignore[arg-type]
