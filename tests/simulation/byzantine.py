"""Scenarios in which one host sends arbitrary messages in its own name; all others are honest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawn_messages import Drawing

from planaria.bootstrap.registry_pb2 import SHAPE, SILENT
from planaria.node.transaction.effects import Ballot, Effect
from planaria.node.transaction.member import MemberSide
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.seat_names import node_of
from simulation.node import Node
from simulation.sickness import Sick

KEPT = 40
"""How many of its newest messages and frames it keeps, to send them again or changed."""


class Lying(Sick):
    """One host sends its messages and frames again, late and changed, and invents others. It still
    does its work. While it drives it is honest, since members trust a driver."""

    lasting: tuple[float, ...] = (5.0, 30.0)
    """Seconds for which it lies; a scenario draws one of them."""

    def __init__(self, *arguments: Any) -> None:
        self.overheard: list[pb.Message | Frame] = []
        super().__init__(*arguments)

    def _plan_faults(self) -> float:
        self.cluster.guilty = set()
        when = self.random.uniform(1.0, 6.0)
        self.world.after(when, self._strike, self._lie)
        return when

    def _lie(self) -> float:
        hosts = sorted(host.name for host in self.cluster.hosts.values() if host.node)
        liar, seconds = self.random.choice(hosts), self.random.choice(self.lasting)
        gap = self.random.choice([0.02, 0.2, 1.0])
        assert self.cluster.guilty is not None
        self.cluster.guilty.add(liar)
        self.cluster.lying.add(liar)
        self.world.say(liar, f"lies for {seconds:.0f} s")
        self.cluster.tampering[liar] = self._remembered
        self._go_on_lying(liar, self.world.now + seconds, gap)
        return seconds + 5.0

    def _remembered(self, item: pb.Message | Frame) -> pb.Message | Frame:
        self.overheard = [*self.overheard[-KEPT:], item]
        return item

    def _go_on_lying(self, host: str, until: float, gap: float) -> None:
        if self.world.now > until:
            self.cluster.tampering.pop(host, None)
            return
        node = self.cluster.hosts[host].node
        if node is not None and node.view.driver != node.name:
            node.process.run(self._say, node)
        self.world.after(self.random.expovariate(1 / gap), self._go_on_lying, host, until, gap)

    def _say(self, node: Node) -> None:
        links = [link for link in node.links.by_peer.values() if not link.over.is_set()]
        if not links or not node.process.responsive:
            return
        link = self.random.choice(sorted(links, key=lambda link: link.peer))
        item = self._lie_of(node, link.peer)
        self.cluster.counts["lies"] += 1
        node.links.send_as_is(link.peer, item)

    def _lie_of(self, node: Node, peer: str) -> pb.Message | Frame:
        chosen, names = self.random, sorted(seat.name for seat in self.cluster.seats)
        seats = [seat for seat in self.cluster.seats if seat.host is node]
        member = seats[0].member if seats else None
        numbers = [0, 1, 2, self.cluster.rules.stages, self.cluster.rules.steps]
        if member is not None:
            numbers += [*member.promised, member.committed, member.step, node.view.number]
        drawing = Drawing(chosen, names, numbers, rarely=0.0)
        to = [seat.partition("/")[2] for seat in names if seat.startswith(f"{peer}/")]
        by = [seat.name.partition("/")[2] for seat in seats]
        if member is not None and chosen.random() < 0.4:
            item = self._aimed(member, chosen.choice(names))
        elif self.overheard and chosen.random() < 0.4:
            item = self._changed(chosen.choice(self.overheard), drawing)
        elif chosen.random() < 0.2:
            item = drawing.frame()
            if member is not None and chosen.random() < 0.5:
                item.ballot = tuple(member.promised)
        else:
            item = drawing.envelope()
            if member is not None and chosen.random() < 0.7:
                item.ballot.CopyFrom(member.promised.message())
        if chosen.random() < 0.95:
            item.seat, item.sender = chosen.choice(to or [""]), chosen.choice(by or [""])
        return item

    def _aimed(self, member: MemberSide, other: str) -> pb.Message:
        """A message that would harm others if they believed it; `other`: a seat that it accuses."""
        chosen, promised = self.random, member.promised
        view = promised.view + chosen.choice([0, 0, 1, 1 << 40])
        attempt = promised.attempt + chosen.choice([0, 1, 1 << 40])
        step = member.committed + chosen.choice([0, 1, 10**6])
        source = pb.Source(node=member.node, stage=member.stage, step=step)
        last = pb.Commit(step=step, ballot=promised.message())
        failed = pb.Failed(reason="so I say", accused=[other], cause=SHAPE)
        body = chosen.choice(
            [
                {"query": pb.Query()},
                {"halt": pb.Halt(reason="so I say", step=step)},
                {"sync": pb.Sync(step=step, method="replica", sources=[source])},
                {"step": pb.Step(commit=last, begin=pb.Begin(step=step + 1))},
                {"status": pb.Status(committed=step, last=last, trained=True)},
                {"stale": pb.Stale()},
                {"failed": failed},
                {"cut": pb.Cut(node=other, reason="so I say", cause=SHAPE)},
            ]
        )
        return Ballot(view, attempt).send("", **body).message

    def _changed(self, item: pb.Message | Frame, drawing: Drawing) -> pb.Message | Frame:
        """A copy of a sent item: a frame as it was, a message mostly with some new fields."""
        if isinstance(item, Frame):
            return item
        copy = pb.Message()
        copy.CopyFrom(item)
        body = copy.WhichOneof("body")
        if body is not None and self.random.random() < 0.7:
            drawn = getattr(drawing.envelope(body), body)
            for field, value in drawn.ListFields():
                single = field.message_type is None and not field.is_repeated
                if single and self.random.random() < 0.3:
                    setattr(getattr(copy, body), field.name, value)
        return copy


WAYS: Final = ["cut", "failed"]


class Slandering(Lying):
    """One host keeps telling the driver that it can't reach another one."""

    lasting = (300.0,)
    cause = SILENT

    def _lie(self) -> float:
        self.chosen, self.way = "", self.random.choice(WAYS)
        return super()._lie()

    def _say(self, node: Node) -> None:
        own = [seat for seat in self.cluster.seats if seat.host is node and seat.member.driver]
        if not own or not node.process.responsive:
            return
        member = self.random.choice(own).member
        host, _, seat = member.driver.partition("/")
        link = node.links.by_peer.get(host)
        others = sorted(seat.name for seat in self.cluster.seats if seat.host is not node)
        if self.chosen not in others:
            self.chosen = self.random.choice(others or [""])
        if self.chosen and link is not None and not link.over.is_set():
            node.links.send_as_is(host, self._slander(member, seat))
            self.cluster.counts["lies"] += 1

    def _slander(self, member: MemberSide, seat: str) -> pb.Message:
        accused = self.chosen
        slanders: dict[str, pb.Cut | pb.Failed] = {
            "cut": pb.Cut(node=accused, reason="so I say", cause=self.cause),
            "failed": pb.Failed(reason="so I say", accused=[accused], cause=self.cause),
        }
        message = member.promised.send("", **{self.way: slanders[self.way]}).message
        message.seat, message.sender = seat, member.node.partition("/")[2]
        return message


class Framing(Slandering):
    """One host keeps telling the driver that another one sends invalid data."""

    cause = SHAPE


class Refuses(MemberSide):
    """Rejects each step of another node's driver, which closes the link to that driver."""

    def received(self, peer: str, message: pb.Message) -> list[Effect]:
        if message.HasField("step") and node_of(peer) != node_of(self.node):
            raise ValueError("so I say")
        return super().received(peer, message)


class Refusing(Lying):
    """One host rejects each step of another node's driver, for as long as it is a member."""

    lasting = (300.0,)
    kind: type[MemberSide] = Refuses

    def _say(self, node: Node) -> None:
        for agent in node.seats.agents.values():
            self.cluster.counts["lies"] += agent.member.__class__ is not self.kind
            agent.member.__class__ = self.kind


class Dropping(Lying):
    """One host reports its work as done, but drops all results of one kind."""

    lasting = (300.0,)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dropped = self.random.choice([("activation", "gradient"), ("average",)])

    def _say(self, node: Node) -> None:
        self.cluster.counts["lies"] += 1
        self.cluster.tampering[node.process.host] = self._drop

    def _drop(self, item: pb.Message | Frame) -> pb.Message | Frame | None:
        return None if isinstance(item, Frame) and item.kind in self.dropped else item


class Withholds(MemberSide):
    """A member that never votes."""

    def reduced(self, *arguments: Any, **more: Any) -> list[Effect]:
        super().reduced(*arguments, **more)
        return []


class Withholding(Refusing):
    """One host does all its work and answers, but never votes."""

    kind = Withholds
