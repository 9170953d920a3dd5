"""Joins of single nodes, and invariants of the membership machine."""

import math
from functools import lru_cache

from planaria.bootstrap.effects import Effect, Refused
from planaria.bootstrap.escaping import first_misspelt
from planaria.bootstrap.failure_domains import block_of
from planaria.bootstrap.invites import is_instance
from planaria.bootstrap.joining import JoinAttempt
from planaria.bootstrap.member_table import Members
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.operator_orders import MOST_CHANGES
from planaria.bootstrap.placement import Staffing
from planaria.bootstrap.quarantine import MOST_KEPT
from planaria.bootstrap.registry_pb2 import JoinReply, JoinRequest, View
from planaria.bootstrap.rules import MembershipRules, problem_with
from planaria.bootstrap.unreachable_pairs import UnreachablePairs


def join(
    machine: Membership, request: JoinRequest, now: float, block: str = "", owner: bool = True
) -> tuple[JoinReply, list[Effect]]:
    """Joins one node; returns the reply with its view, and effects. Raises Refused."""
    (answer,), effects = machine.join([JoinAttempt(request, block, now, owner)], now)
    if isinstance(answer, Refused):
        raise answer
    if answer.HasField("view"):
        answer.view.CopyFrom(machine.view)
    return answer, effects


def validate_state(machine: Membership) -> None:
    """Asserts the invariants after an event."""
    view, rules, members = machine.view, machine.rules, machine.members
    nodes = list(members)
    assert not machine._effects, "effects left behind"
    assert not machine._changes, "a change without a view"
    assert [n.member for n in nodes] == list(view.members), "the view lags the membership"
    assert view.driver == members.driver
    assert not any(n.name in machine.history.former for n in nodes), "evicted, yet here"
    accusations = machine._accusations
    remembered = {*accusations._accused, *accusations._alone, *accusations._newest}
    assert remembered <= members.by_name.keys(), "accusations by or of former members"
    assert list(view.relays) == machine._unreachable.relays(), "the view lags the relays"
    assert (view.lineage, view.committed) <= machine._watermark.newest
    if view.number:
        _validate_view(view.SerializeToString(), rules)
    if machine._driving.started and not view.driver:
        assert not members.count(0), "a stage-0 member, but no driver"
    _validate_indexes(members)
    _validate_pairs(machine._unreachable)
    for node in nodes:
        assert node.due <= machine._leases._deadline(node), "a deadline would be missed"
        assert (node.due, node.name) in machine._leases._deadlines
        assert not (node.streaming and node.lost is not None)
        assert not node.probe or node.accusers, "a probe that nobody asked for"


@lru_cache(maxsize=16)
def _validate_view(serialized: bytes, rules: MembershipRules) -> None:
    """Checks each view once: views are checked more often than they change."""
    view = View.FromString(serialized)
    assert not problem_with(view, rules), problem_with(view, rules)
    assert view.reason.isprintable() and view.ordered.isprintable()
    members, joined = list(view.members), [m.joined for m in view.members]
    seats = {m.node: stages_of(m) for m in members}
    addresses = [m.address for m in members if m.address]
    assert len(members) <= rules.max_nodes
    assert len(seats) == len(members), "a node is listed twice"
    assert len(set(addresses)) == len(addresses), "an address is listed twice"
    assert not first_misspelt(members), first_misspelt(members)
    assert all(not m.block or block_of(m.block.partition("/")[0]) == m.block for m in members)
    assert joined == sorted(set(joined)), "not in the order of joining"
    assert all(m.owner for m in members if 0 in seats[m.node]), "a stranger at stage 0"
    assert all(stages == sorted(set(stages)) for stages in seats.values())
    assert not view.driver or 0 in seats.get(view.driver, ())
    ends = [(relay.a, relay.b) for relay in view.relays]
    assert ends == sorted(set(ends)) and all(a < b for a, b in ends)
    assert all(relay.via not in (relay.a, relay.b) for relay in view.relays)
    assert {name for r in view.relays for name in (r.a, r.b, r.via)} <= seats.keys()
    assert all(entry.instance and entry.seconds >= 0 for entry in view.quarantined)
    assert len(view.quarantined) <= MOST_KEPT
    assert all(save.stage <= rules.stages and save.seconds >= 0 for save in view.awaited)
    assert list(view.banned) == sorted(set(view.banned)) and all(map(is_instance, view.banned))
    numbers = [change.number for change in view.changes]
    assert numbers == sorted(set(numbers)) and all(numbers) and len(numbers) <= MOST_CHANGES
    assert not any(change.pending for change in view.changes[:-1])
    assert all(change.settings or change.step for change in view.changes)


def _validate_indexes(members: Members) -> None:
    nodes = list(members)
    assert members.by_address == {n.member.address: n for n in nodes if n.member.address}
    assert list(members._hidden.values()) == [n for n in nodes if not n.member.address]
    assert {id(n) for same in members._by_key.values() for n in same} == {*map(id, nodes)}
    assert members._standbys == {n.name for n in nodes if not n.stages}
    for stage in range(members.rules.stages + 1):
        assert members.at(stage) == [n for n in nodes if stage in n.stages]
    staffing = Staffing.empty(members.rules.stages)
    for node in nodes:
        if not node.leaving:
            staffing.add(node.stages, node.member.speed, node.place)
    assert members.staffing() == staffing, "newcomers were added otherwise"


def _validate_pairs(pairs: UnreachablePairs) -> None:
    for key, pair in pairs._pairs.items():
        assert key[0] < key[1] and pair.via not in key
        assert all(key in pairs._of[node] for node in key)
        assert pair.complaints.keys() <= set(key)
        assert bool(pair.complaints) == (pair.clear_since == math.inf)
    assert sum(map(len, pairs._of.values())) == 2 * len(pairs._pairs)
