"""Joins: whether a node may become a member, where, and in whose place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planaria.bootstrap.effects import Dial, Refused
from planaria.bootstrap.escaping import misspelt_member
from planaria.bootstrap.failure_domains import FailureDomain
from planaria.bootstrap.history import ViewHistory
from planaria.bootstrap.identity import instance_of
from planaria.bootstrap.isolation import Isolation
from planaria.bootstrap.member_table import Claim, Members, NodeRecord
from planaria.bootstrap.neighbours import place_of
from planaria.bootstrap.next_driver import Driving
from planaria.bootstrap.placement import choose_among
from planaria.bootstrap.quarantine import Quarantine
from planaria.bootstrap.registry_pb2 import JoinReply, JoinRequest, Member, Seat
from planaria.bootstrap.rules import PROTOCOL

PROPERTIES = ("key", "address", "data", "speed", "host", "device")  # of a member, by its request


class JoinAttempt(NamedTuple):
    """A join request, its address block (failure_domains.py), its time of arrival, and whether the
    run's owner started the node."""

    request: JoinRequest
    block: str
    arrived: float
    owner: bool


class Asked(NamedTuple):
    """An answer after which the node joins again, and what the registry dials meanwhile."""

    reply: JoinReply
    dials: Sequence[Dial] = ()


class Joining:
    def __init__(
        self,
        members: Members,
        driving: Driving,
        isolation: Isolation,
        quarantine: Quarantine,
        history: ViewHistory,
        numbers: Iterator[int],
    ) -> None:
        """`numbers`: of dials."""
        self._members, self._driving, self._isolation = members, driving, isolation
        self._quarantine, self._history, self._numbers = quarantine, history, numbers
        self._rules = members.rules
        self._allowance = self._rules.joins_per_second
        self._allowance_at: float | None = None
        self._joined = 0

    def restore(self) -> None:
        """Continues to number joins after the members of a restored view."""
        self._joined = max([self._joined, *(node.member.joined for node in self._members)])

    def decide(
        self, attempt: JoinAttempt, now: float
    ) -> NodeRecord | Asked | list[tuple[NodeRecord, str]]:
        """Decides a join: the record of a node that has joined before; what to ask; or, if it may
        join, whom to evict first, and why. Raises Refused."""
        request, instance = attempt.request, instance_of(attempt.request.key)
        _check_request(request)
        repeated = self._members.by_name.get(request.node)
        if repeated is not None:
            _check_repeated(request, repeated.member)
            repeated.renewed = now
            return repeated
        if request.node in self._history.former:
            raise refusal_of_former(request.node, self._history)
        if now < self._isolation.quiet_until:
            raise Refused(
                "UNAVAILABLE",
                "the registry was unreachable and waits for its members to reconnect; "
                f"join again in {self._isolation.quiet_until - now:.1f} s",
            )
        if not self._rules.allows(instance):
            raise Refused(
                "PERMISSION_DENIED",
                f"{request.node} is not on this run's allow list: ask its operator to add the "
                f"instance {instance} to the file of --allow, and to restart the registry",
            )
        if wait := self._quarantine.seconds_left(instance, now):
            reason = self._quarantine.why_excluded(instance, now)
            if wait == math.inf:
                raise Refused("PERMISSION_DENIED", reason)
            return Asked(JoinReply(run=self._rules.run, reason=reason, quarantine=wait))
        former = self._members.by_address.get(request.address)
        is_another = former is not None and former.member.key != request.key
        if former and is_another and (asked := self._decide_claim(request, former, now)):
            return asked
        replaced = self._replaced(request, former)
        if len(self._members) > len(replaced) and self._members.hears_nobody(now):
            others = [node for node in self._members if node not in replaced]
            return Asked(*self._isolation.ask(request, others, now))
        self._check_block(instance, attempt.block, replaced)
        self._check_limits(len(replaced), attempt.arrived)
        if request.HasField("stage"):
            self._check_stage(request, attempt.owner)
        why = f"restarted: {request.node} joined"
        return [
            (node, f"{why} {f'from {request.address}' if node is former else 'with its key'}")
            for node in replaced
        ]

    def admit(self, attempt: JoinAttempt, now: float) -> NodeRecord:
        """Makes a node that may join a member or a standby."""
        request = attempt.request
        stages, why = self._choose(attempt)
        self._joined += 1
        member = Member(
            **{name: getattr(request, name) for name in (*PROPERTIES, "node", "standby")},
            seats=[Seat(stage=s, requested=s == requested_stage(request)) for s in sorted(stages)],
            room=request.room or 1,
            joined=self._joined,
            block=attempt.block,
            owner=attempt.owner,
        )
        node = NodeRecord(member, why, now, now)
        node.reasons = dict.fromkeys(node.stages, why)
        self._members.enter(node)
        self._driving.joined_at = now
        return node

    def _replaced(self, request: JoinRequest, at_address: NodeRecord | None) -> list[NodeRecord]:
        """The members that the new node replaces. A key has one member at a time, since keys need
        invites and names do not. Raises Refused while that member is connected from elsewhere."""
        same = list(self._members.with_key(request.key))
        if at_address is not None and at_address not in same:
            same.append(at_address)
        other = next((node for node in same if node.streaming and node is not at_address), None)
        if other is not None:
            raise Refused(
                "ABORTED",
                f"{other.member.node} ({place_of(other.member)}, at "
                f"{other.member.address or 'no address'}) has the same key and is connected: end "
                "it. If this is another node, give it its own folder with --out, not a copy",
            )
        return same

    def _check_block(self, instance: str, block: str, replaced: list[NodeRecord]) -> None:
        """Refuses a node whose address block is full, unless it restarts there. Raises Refused."""
        most = self._rules.max_per_block
        if not (block and most):
            return
        others = (node for node in self._members if node not in replaced)
        in_block = [node for node in others if node.member.block == block]
        restarts = any(instance_of(n.member.key) == instance and not n.streaming for n in in_block)
        if len(in_block) - restarts >= most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"{len(in_block)} nodes have joined from {block}, and this run allows {most} per "
                "address block; end one, or ask the run's operator to raise --most-per-block",
            )

    def _check_limits(self, replaces: int, arrived: float) -> None:
        if len(self._members) - replaces >= self._rules.max_nodes:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"the run has {len(self._members)} nodes, its maximum; "
                "try again when one has left, or raise max_nodes",
            )
        rate = self._rules.joins_per_second
        since = 0.0 if self._allowance_at is None else arrived - self._allowance_at
        self._allowance = min(max(1.0, rate), self._allowance + since * rate)
        self._allowance_at = arrived
        if self._allowance < 1:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"more than {rate:g} joins per second; "
                f"join again in {(1 - self._allowance) / rate:.1f} s",
            )
        self._allowance -= 1

    def _check_stage(self, request: JoinRequest, owner: bool) -> None:
        stage = request.stage
        if stage > self._rules.stages:
            raise Refused(
                "OUT_OF_RANGE",
                f"stage {stage} does not exist: this run has stages 0 to {self._rules.stages}; "
                "choose one of them, or leave --stage out",
            )
        if stage == 0 and not owner:
            raise Refused(
                "PERMISSION_DENIED",
                f"only nodes of the run's owner serve stage 0, and {request.node} is not one: join "
                "with an invite of role owner (`planaria invite --role owner`; a certificate of "
                "your own has to name owner.planaria), or leave --stage out",
            )
        if stage == 0 and self._rules.data and not request.data:
            raise Refused(
                "FAILED_PRECONDITION",
                "stage 0 needs the prepared data, and the node has none; "
                "make it with `planaria data prepare`, or name its folder with --data DIR",
            )
        if stage == 0 and not self._rules.serves_stage_0(owner, request.data):
            raise Refused(
                "FAILED_PRECONDITION",
                f"stage 0 needs the data with content hash {self._rules.data}, and the node has "
                f"{request.data}; prepare it from the same corpus with the same tokenizer with "
                "`planaria data prepare`, or name its copy with --data DIR",
            )
        other = self._members.unreachable(request.address, stage)
        if other is not None and not self._members.has_relay():
            raise Refused(
                "ABORTED",  # a dialable member may join later
                f"at stage {stage} the node needs a link to {other.node} ({place_of(other)}), but "
                "neither can be dialled, and no member can relay for them; give one of them "
                "`--advertise HOST:PORT`, or choose another stage",
            )

    def _decide_claim(self, request: JoinRequest, former: NodeRecord, now: float) -> Asked | None:
        """Decides about a node with another key that joins from a member's address. Returns None,
        so that the member is replaced, if it neither answers a dial nor renews. Raises Refused."""
        rules, claim, name = self._rules, former.claim, former.member.node
        whose = f"{request.address} is the address of {name} ({place_of(former.member)})"
        if claim is None or now >= claim.asked + rules.dial_timeout + rules.lease:
            former.claim = Claim(next(self._numbers), now)
            self._history.note(
                f"{request.node} joins with another key, and {whose}: the registry dials it"
            )
            number, reason = former.claim.question, "the address is a member's, which the registry "
            reply = JoinReply(run=rules.run, reason=f"{reason}dials: join again", question=number)
            return Asked(reply, [Dial(number, name, request.address, rules.dial_timeout)])
        if claim.alive:
            raise Refused(
                "ALREADY_EXISTS",
                f"{whose}, which has another key and answers; choose another address with "
                f"--advertise, or end {name}",
            )
        if former.streaming and former.renewed > claim.asked:
            raise Refused(
                "ABORTED",
                f"{whose}, which has another key and renews its lease; join again when it is gone, "
                "or choose another address with --advertise",
            )
        if not claim.answered or (former.streaming and now < claim.asked + rules.lease / 2):
            raise Refused("UNAVAILABLE", f"{whose}, and the registry checks whether it is alive")
        return None

    def _choose(self, attempt: JoinAttempt) -> tuple[Sequence[int], str]:
        """Chooses stages for a newcomer, and the reason; none: a standby. It gets as many as it has
        room for of those of which it alone has a state, in its saves; else what it requests, or the
        stage where it is needed most."""
        request, requested = attempt.request, requested_stage(attempt.request)
        numbers, staff = range(self._rules.stages + 1), self._members.staffing()
        able = [s for s in numbers if s or self._rules.serves_stage_0(attempt.owner, request.data)]
        unrelayed = [s for s in able if self._members.unreachable(request.address, s) is None]
        reached = able if self._members.has_relay() else unrelayed
        wanted = [s for s in numbers if staff.has_room(s, self._rules.max_replicas)]
        served, direct, carried = (
            [s for s in some if s in wanted] for some in (able, unrelayed, reached)
        )
        if saved := self._only_saved(request, reached, carried):
            named = ", ".join(map(str, sorted(saved)))
            return saved, f"stage{'s' * (len(saved) > 1)} {named}, for which it has saves"
        if request.standby:
            return (), "standby, as requested"
        if requested is not None:
            return (requested,), f"stage {requested}, as requested"
        if vacant := [s for s in (*direct, *carried) if not staff.count[s]]:
            return vacant[:1], f"stage {vacant[0]} was vacant"
        if fits := direct or carried:
            stage, why = choose_among(fits, staff, FailureDomain(attempt.block, request.host))
            return (stage,), why
        if not wanted:
            return (), f"standby: every stage has {self._rules.max_replicas} nodes or more"
        if not served:
            lacking = "lacks the run's data" if attempt.owner else "is not the run owner's"
            return (), f"standby: only stage 0 has room, and the node {lacking}"
        other = self._members.unreachable(request.address, served[0])
        return (), (
            "standby: it only dials out, and every stage with room needs a link to such a node "
            f"({other.node if other else ''}); give it `--advertise HOST:PORT`"
        )

    def _only_saved(
        self, request: JoinRequest, reached: Sequence[int], carried: Sequence[int]
    ) -> list[int]:
        """The stages whose state a newcomer has in its saves and no member has, as many as it has
        room for: the one that it requests, then the newest. Before the run has started, a member
        may have the state of its stage in saves. `reached`: the stages that the newcomer can serve;
        `carried`: those with room for it."""
        requested, staff = requested_stage(request), self._members.staffing()
        if self._driving.started:
            saved = [s for s in request.saves if s in reached and not self._members.has_holder(s)]
        elif requested in request.saves:
            return []  # others may come for the other stages
        else:
            asks = request.standby or requested is not None
            served = {s for s in carried if staff.count[s]} - set(() if asks else request.saves[:1])
            saved = [s for s in request.saves if s in carried and s not in served]
        return sorted(saved, key=lambda s: s != requested)[: request.room or 1]


def _check_request(request: JoinRequest) -> None:
    if request.protocol != PROTOCOL:
        older = "node" if request.protocol < PROTOCOL else "registry"
        raise Refused(
            "FAILED_PRECONDITION",
            f"the node speaks protocol {request.protocol}, the registry {PROTOCOL}; "
            f"install the same version of planaria on both (the {older}'s is the older)",
        )
    if problem := misspelt_member(request):
        raise Refused("INVALID_ARGUMENT", problem)
    if not (math.isfinite(request.speed) and request.speed >= 0):
        raise Refused(
            "INVALID_ARGUMENT",
            f"speed = {request.speed}: must be a number of at least 0 (0: unknown)",
        )


def _check_repeated(request: JoinRequest, member: Member) -> None:
    if any(getattr(request, name) != getattr(member, name) for name in PROPERTIES):
        raise Refused(
            "ALREADY_EXISTS",
            f"node {request.node} is already a member, with other properties "
            f"({place_of(member)}, address {member.address or 'none'}); "
            "choose a new node id at each start",
        )


def requested_stage(request: JoinRequest) -> int | None:
    return request.stage if request.HasField("stage") else None


def refusal_of_former(name: str, history: ViewHistory) -> Refused:
    """The refusal of a former member's join."""
    why = f"node {name} is no longer a member ({history.why_gone(name)}); join again"
    return Refused("ALREADY_EXISTS", f"{why} under a new node id")
