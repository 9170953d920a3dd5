"""Tests that answers of bounded size name all nodes, however much the nodes report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.membership import Membership
from planaria.bootstrap.registry_pb2 import (
    Complaint,
    Cut,
    Description,
    LinkReport,
    Member,
    MemberDescription,
    Rebuild,
    Renewal,
    Report,
    Sample,
    SeatReport,
    View,
)
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.truncation import (
    CUTS_LISTED,
    DECISIONS_BYTES,
    DESCRIPTION_BYTES,
    REPORTS_BYTES,
    omitted_from,
    shorten_all,
    truncate_description,
    truncated_report,
)
from planaria.bootstrap.views import sign

NODES = 900
WORDS = st.sampled_from(["", "x", "\x1b" * 50, "\U0010fffd" * 4000, "why " * 1000])
REPORTS = st.builds(
    Report,
    trouble=WORDS,
    unlisted=st.integers(0, 5),
    seats=st.lists(st.builds(SeatReport, message=WORDS, phase=WORDS), max_size=30),
    links=st.lists(st.builds(LinkReport, peer=WORDS), max_size=10),
    seen=st.lists(st.builds(LinkReport, peer=WORDS), max_size=10),
    complaints=st.lists(st.builds(Complaint, peer=WORDS), max_size=10),
    rebuilds=st.lists(st.builds(Rebuild, method=WORDS), max_size=3),
    samples=st.lists(st.builds(Sample, text=WORDS), max_size=3),
)


@given(REPORTS, st.sampled_from([400, 15_000]))
def test_a_report_fits_whatever_it_says_and_complaints_are_counted(
    report: Report, most: int
) -> None:
    fits = truncated_report(report, most)
    assert fits.ByteSize() <= most
    assert len(fits.complaints) + fits.unlisted == len(report.complaints) + report.unlisted
    if report.ByteSize() <= most:
        assert fits == report


@pytest.mark.parametrize("word", ["x", "\x1b", "\u202e"])
def test_what_a_registry_says_fits_however_much_its_nodes_say(word: str) -> None:
    machine = Membership(MembershipRules("r", stages=2))
    members = [Member(node=f"n{number}", joined=number + 1) for number in range(NODES)]
    view = View(run="r", number=1, members=members)
    sign(view, machine.key, View())
    machine.restore(view, 0.0)
    for number in range(NODES):
        seat = SeatReport(committed=number, message=word * 5000)
        report = Report(seats=[seat], trouble="mine" if number % 2 else word * 5000)
        machine.lease_renewed(Renewal(node=f"n{number}", report=report), 0.0)
    described = machine.describe(1.0)
    assert sum(member.report.ByteSize() for member in described.members) <= REPORTS_BYTES
    assert described.ByteSize() <= DESCRIPTION_BYTES
    assert len(described.members) == NODES
    assert {member.report.seats[0].committed for member in described.members} == {*range(NODES)}
    assert omitted_from(described) == [
        f"the reports of {described.shortened} nodes are truncated: together they are too large"
    ]


def test_what_is_small_is_left_alone_where_others_are_large() -> None:
    small = MemberDescription(report=Report(trouble="small"))
    large = MemberDescription(report=Report(trouble="x" * 15_000))
    description = Description(members=[small, *[large] * 500])
    truncate_description(description)
    assert description.members[0] == small
    assert description.shortened == 500


def test_members_decisions_and_cuts_of_which_there_are_too_many_are_counted_or_old() -> None:
    member = Member(node="n" * 128, host="h" * 2000)
    description = Description(
        members=[MemberDescription(member=member)] * 10_000,
        decisions=[f"{number} {'x' * 40_000}" for number in range(200)],
        cuts=[Cut(a="a")] * (CUTS_LISTED + 5),
    )
    truncate_description(description)
    assert description.ByteSize() <= DESCRIPTION_BYTES
    assert len(description.members) + description.unlisted == 10_000
    assert omitted_from(description) == [
        f"{description.unlisted} more nodes are not listed: the list would be too large"
    ]
    assert sum(map(len, description.decisions)) <= DECISIONS_BYTES
    assert description.decisions[-1].startswith("199 ")
    assert len(description.cuts) == CUTS_LISTED


def test_words_of_a_megabyte_are_cut_wherever_they_are() -> None:
    long = "x" * 2**20
    member = Member(node="short", host=long)
    described = Description(
        run_file=long,
        decisions=["short", long],
        view=View(members=[member]),
        members=[MemberDescription(member=member, report=Report(trouble=long))],
    )
    shorten_all(described, 1000)
    assert described.ByteSize() < 2**20 + 6000
    assert described.run_file == long
    assert described.decisions[0] == described.members[0].member.node == "short"
    assert described.decisions[1] == described.members[0].report.trouble == "x" * 997 + "..."
