"""What a node keeps for the day when a stage is lost, and how that gets there.

Copies and running snapshots travel as node/state/copies.py sends them, twins are kept equal as in
node/state/twin.py, files are there whole or not at all. A state is a digest, a chain and a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planaria.node.state.stage_state import StateId
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from simulation.shell import Node

PARTS = 2
"""Frames of an update."""
BLOCKS = 3
"""Of a snapshot; an update brings one."""
SILENCE = 15.0
"""Seconds in which a holder has to answer."""
KEPT_SAVES = 3


@dataclass(frozen=True)
class State:
    """Of one stage after a committed step."""

    stage: int
    lineage: int
    step: int
    digest: bytes
    chain: bytes  # fingerprint of all commits that made it
    last: pb.Commit = field(default_factory=pb.Commit)
    boosted_at: int = 0

    @property
    def age(self) -> tuple[int, int]:
        return self.lineage, self.step

    def holding(self, kind: str) -> pb.Holding:
        return StateId.after(self.last, self.stage, self.lineage, self.step).holding(kind)


# On disk


class Files:
    """What outlives processes: saves, each on the disk of its host, and the checkpoints' folder."""

    def __init__(self, save_every: int = 0, checkpoint_every: int = 0) -> None:
        """Every so many steps; 0: none are written."""
        self.save_every, self.checkpoint_every = save_every, checkpoint_every
        self._files: dict[tuple[str, str, int], dict[tuple[int, int], State]] = defaultdict(dict)

    def write(self, kind: str, owner: str, state: State) -> None:
        """Renamed into place: it is there whole."""
        files = self._files[kind, owner, state.stage]
        files[state.age] = state
        if kind == "save":
            for age in sorted(files)[:-KEPT_SAVES]:
                del files[age]

    def of(self, kind: str, owner: str, stage: int) -> dict[tuple[int, int], State]:
        return self._files.get((kind, owner, stage), {})

    def newest_common(self, stages: int) -> tuple[int, int] | None:
        """Lineage and step of the newest state that every stage has a file of, on whatever disk."""
        chains: dict[int, set[tuple[tuple[int, int], bytes]]] = defaultdict(set)
        for (_, _, stage), files in self._files.items():
            chains[stage].update((age, state.chain) for age, state in files.items())
        common = set.intersection(*(chains[stage] for stage in range(stages + 1)))
        return max(common)[0] if common else None

    def stage_of(self, owner: str) -> int | None:
        """What the host served when it saved last."""
        newest = [
            (max(files), stage)
            for (kind, host, stage), files in self._files.items()
            if (kind, host) == ("save", owner) and files
        ]
        return max(newest)[1] if newest else None


# In memory


@dataclass
class Update:
    """Of a copy or a snapshot, under way."""

    kind: str
    transfer: int
    to: str
    state: State
    block: int  # of a snapshot


class Sender:
    """Sends its stage's state to its holders, one update at a time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.holders: dict[str, list[int]] = {}  # -> blocks to send, next one first
        self.started: dict[str, int] = {}  # -> step of the newest update for it
        self.update: Update | None = None
        self.transfers = 0

    def begin(self, begin: pb.Begin) -> None:
        """The members are known: to whom this node sends."""
        wanted = _holders(self.node, begin)
        for holder in self.holders.keys() - wanted:
            del self.holders[holder], self.started[holder]
            self._lost(holder)
        for holder in sorted(wanted - self.holders.keys()):
            self.holders[holder], self.started[holder] = list(range(BLOCKS)), -1

    def start(self) -> None:
        state = self.node.state()
        due = [(step, holder) for holder, step in self.started.items() if step != state.step]
        if self.update is not None or not due or not state.step or self.node.over:
            return
        _, holder = min(due)
        self.started[holder] = state.step
        self.transfers += 1
        kind = "snapshot" if self.node.cluster.rules.policy == "snapshot" else "copy"
        update = Update(kind, self.transfers, holder, state, self.holders[holder][0])
        self.update = update
        for part in range(PARTS):
            delay = self.node.world.random.uniform(0.0, 0.1) * (part + 1)
            self.node.process.after(delay, self._send, update, part)
        self.node.process.after(SILENCE, self._silent, update)

    def _send(self, update: Update, part: int) -> None:
        if self.update is update and not self.node.over:
            frame = self.node.frame("copy", NEVER, {"update": update, "part": part})
            if not self.node.send(update.to, frame):
                self._lost(update.to)

    def _silent(self, update: Update) -> None:
        if self.update is update:
            self._lost(update.to)

    def on_kept(self, peer: str, kept: pb.Kept) -> None:
        update = self.update
        if update is None or (peer, kept.step) != (update.to, update.state.step):
            return
        if not kept.error and peer in self.holders:
            blocks = self.holders[peer]
            blocks.append(blocks.pop(0))
        self.update = None
        self.start()

    def on_peer_lost(self, peer: str) -> None:
        self._lost(peer)

    def _lost(self, holder: str) -> None:
        if self.update is not None and self.update.to == holder:
            self.update = None
            self.node.process.after(0.0, self.start)


def _holders(node: Node, begin: pb.Begin) -> set[str]:
    """Who holds what this node sends: only the first replica of a stage does."""
    rules, stage = node.cluster.rules, node.stage
    first: dict[int, str] = {}
    for place in sorted(begin.members, key=lambda p: p.node):
        first.setdefault(place.stage, place.node)
    if stage is None or first.get(stage) != node.name:
        return set()
    if rules.policy in ("checkfree", "checkfree+") and stage == 0:
        return {first[1], first[rules.stages]}
    if rules.policy == "snapshot":
        count = rules.stages + 1
        return {first[(stage + count // 2) % count]}
    return set()


class Holder:
    """Holds what other stages' nodes send. An update counts once it is whole and this node has
    committed its step, by the very same commit."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.applied = (0, 0)
        self.ballots: dict[tuple[int, int], Ballot] = {}  # of own commits
        self.arriving: dict[tuple[str, int], tuple[str, int, int]] = {}  # -> peer, transfer, parts
        self.waiting: dict[tuple[str, int], tuple[str, Update]] = {}
        self.held: dict[tuple[str, int], dict[int, State]] = {}  # -> block -> of which state

    def listed(self) -> list[pb.Holding]:
        found = []
        for (kind, stage), blocks in sorted(self.held.items()):
            if (state := self.state(kind, stage)) is not None:
                self.node.cluster.check_announced(self.node, kind, list(blocks.values()))
                found.append(state.holding(kind))
        return found

    def state(self, kind: str, stage: int) -> State | None:
        blocks = self.held.get((kind, stage), {})
        if kind == "copy":
            return blocks.get(0)
        if len(blocks) < BLOCKS:
            return None
        newest = max(blocks.values(), key=lambda state: state.age)
        digests = [blocks[block].digest for block in range(BLOCKS)]
        return replace(newest, digest=self.node.fingerprint("snapshot", *digests))

    def committed(self, state: State) -> None:
        """This node has it: applied, fetched or loaded."""
        if state.lineage != self.applied[0]:
            self.ballots.clear()
            self.held = {
                key: blocks
                for key, blocks in self.held.items()
                if all(held.lineage >= state.lineage for held in blocks.values())
            }
        self.applied = state.age
        self.ballots[state.age] = Ballot.of(state.last.ballot)
        for key, (peer, update) in list(self.waiting.items()):
            if update.state.age <= self.applied:
                del self.waiting[key]
                self._judge(peer, update, waited=True)

    def on_frame(self, peer: str, update: Update, part: int) -> None:
        key = (update.kind, update.state.stage)
        parts = 0
        if part and self.arriving.get(key, ())[:2] != (peer, update.transfer):
            return  # the first part is lost
        if part:
            parts = self.arriving[key][2]
        self.arriving[key] = (peer, update.transfer, parts + 1)
        if self.is_whole(parts + 1):
            del self.arriving[key]
            update = self._assembled(update, parts + 1)
            if update.state.age > self.applied:
                self.waiting[key] = (peer, update)
            else:
                self._judge(peer, update, waited=False)

    def is_whole(self, parts: int) -> bool:
        return parts == PARTS

    def _assembled(self, update: Update, parts: int) -> Update:
        """What lies in memory when so many parts have come."""
        if parts == PARTS:
            return update
        digest = self.node.fingerprint("torn", parts, update.state.digest)
        return replace(update, state=replace(update.state, digest=digest))

    def _judge(self, peer: str, update: Update, waited: bool) -> None:
        state = update.state
        own = self.ballots.get(state.age)
        refused = state.lineage < self.applied[0] or (own is None and waited)
        if refused or (own is not None and own != Ballot.of(state.last.ballot)):
            self._answer(peer, update, "committed otherwise here")
            return
        held = self.held.setdefault((update.kind, state.stage), {})
        block = 0 if update.kind == "copy" else update.block
        if block not in held or held[block].age <= state.age:
            held[block] = state
        self._answer(peer, update, "")

    def _answer(self, peer: str, update: Update, error: str) -> None:
        state = update.state
        kept = pb.Kept(kind=update.kind, stage=state.stage, step=state.step, error=error)
        self.node.send(peer, pb.Message(kept=kept))

    def on_peer_lost(self, peer: str) -> None:
        self.arriving = {key: one for key, one in self.arriving.items() if one[0] != peer}


class Twin:
    """The next stage beside a node's own, equal after each commit: its gradient must have come
    before the node is ready."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.begin = pb.Begin()
        self.ballot = NEVER  # of the attempt
        self.then: Callable[[], None] | None = None  # when all is here
        self.gradients: dict[str, tuple[Ballot, bytes]] = {}  # by sender
        self.reduced = (NEVER, b"")
        self.state: State

    def take_up(self, stage: int) -> None:
        of = (stage + 1) % (self.node.cluster.rules.stages + 1)
        self.state = State(of, 0, 0, self.node.fingerprint("initial", of), b"")

    def start(self, ballot: Ballot, begin: pb.Begin) -> None:
        self.ballot, self.begin, self.then = ballot, begin, None

    def _stale(self) -> bool:
        return self.state.age != self.node.weights_age()

    def _server(self, holder: str = "") -> str:
        """Which replica of the stage sends to that holder, this node unless told."""
        rules = self.node.cluster.rules
        places = {place.node: place.stage for place in self.begin.members}
        holder = holder or self.node.name
        own = places[holder]
        replicas = sorted(n for n, s in places.items() if s == (own + 1) % (rules.stages + 1))
        holders = sorted(n for n, s in places.items() if s == own)
        return replicas[holders.index(holder) % len(replicas)]

    def exchange(self, ballot: Ballot, gradient: bytes, then: Callable[[], None]) -> None:
        """Send the reduced gradient to who holds this stage's twin, and wait for the next's."""
        if ballot != self.ballot:
            return
        self.then = then
        rules = self.node.cluster.rules
        for place in self.begin.members:
            follows = (place.stage + 1) % (rules.stages + 1) == self.node.stage
            if follows and self._server(place.node) == self.node.name:
                self.node.send_to_twin(place.node, ballot, gradient)
        self.node.process.after(rules.progress, self._late, ballot)
        self._check()

    def on_gradient(self, peer: str, ballot: Ballot, gradient: bytes) -> None:
        if ballot >= self.gradients.get(peer, (NEVER, b""))[0]:
            self.gradients[peer] = (ballot, gradient)
            self._check()

    def _check(self) -> None:
        if self.then is None or self._stale():
            return
        ballot, gradient = self.gradients.get(self._server(), (NEVER, b""))
        if ballot == self.ballot:
            self.reduced = (ballot, gradient)
            then, self.then = self.then, None
            then()

    def _late(self, ballot: Ballot) -> None:
        if ballot == self.ballot and self.then is not None and not self.node.over:
            self.then = None
            server = self._server()
            reason = f"the gradient for the twin did not come from {server}"
            self.node.attempt_failed(ballot, reason, [server])

    def drop(self) -> None:
        self.ballot, self.then = NEVER, None

    def apply(self, commit: pb.Commit) -> None:
        """In the compute thread, with the node's own; a stale twin stays as it is."""
        state = self.state
        if state.age != self.node.weights_age():
            return
        ballot, gradient = self.reduced
        assert ballot == Ballot.of(commit.ballot), f"{commit.step} without the gradient"
        digest, chain = self.node.advanced(state.stage, state.digest, state.chain, gradient, commit)
        self.state = replace(state, step=commit.step, digest=digest, chain=chain, last=commit)


# All of it


class Holdings:
    """One node's."""

    def __init__(self, node: Node) -> None:
        self.node, self.files = node, node.cluster.files
        self.sender, self.holder = Sender(node), node.cluster.make_holder(node)
        self.twin = Twin(node) if node.cluster.rules.policy == "redundant" else None
        self.members: dict[str, int] = {}

    def listed(self) -> Sequence[pb.Holding]:
        twins = [] if self.twin is None else [self.twin.state.holding("redundant")]
        files = [
            state.holding(kind)
            for kind in ("save", "checkpoint")
            for _, state in sorted(self._files(kind).items())
        ]
        return [*self.holder.listed(), *twins, *files]

    def _files(self, kind: str) -> dict[tuple[int, int], State]:
        host = self.node.process.host
        owner = host if kind == "save" else ""
        if kind == "save" and not self.node.cluster.hosts[host].saves:
            return {}
        assert self.node.stage is not None
        return self.files.of(kind, owner, self.node.stage)

    def state(self, kind: str, stage: int, step: int) -> State | None:
        """What a joiner gets that asks for it."""
        if kind == "redundant":
            state = None if self.twin is None else self.twin.state
        elif kind in ("copy", "snapshot"):
            state = self.holder.state(kind, stage)
        else:
            files = self._files("save")
            ages = [age for age in files if age[1] == step]
            state = files[max(ages)] if ages else None
        right = state is not None and (state.stage, state.step) == (stage, step)
        return state if right else None

    def file(self, kind: str, age: tuple[int, int]) -> State | None:
        if age[1] == 0:
            stage = self.node.stage
            assert stage is not None
            return State(stage, *age, self.node.fingerprint("initial", stage), b"")
        kinds = ("save", "checkpoint") if kind == "save" else (kind,)  # a run resumes from either
        found = [self._files(kind).get(age) for kind in kinds]
        return next((state for state in found if state is not None), None)

    # --- events

    def start(self, ballot: Ballot, begin: pb.Begin) -> None:
        self.sender.begin(begin)
        self.members = {place.node: place.stage for place in begin.members}
        if self.twin is not None:
            self.twin.start(ballot, begin)

    def drop(self) -> None:
        if self.twin is not None:
            self.twin.drop()

    def committed(self) -> None:
        """The state is in place: applied, fetched or loaded."""
        state = self.node.state()
        self.holder.committed(state)
        self.sender.start()

    def applied(self) -> None:
        self.committed()
        state, files = self.node.state(), self.files
        name, host = self.node.name, self.node.process.host
        saves = self.node.cluster.hosts[host].saves
        if saves and files.save_every and state.step % files.save_every == 0:
            self._write("save", host, state)
        replicas = [n for n, stage in self.members.items() if stage == self.node.stage]
        first = min(replicas, default="")  # a joiner that follows knows of none
        due = files.checkpoint_every and state.step % files.checkpoint_every == 0
        if due and first == name:
            self._write("checkpoint", "", state)

    def _write(self, kind: str, owner: str, state: State) -> None:
        """In the background; a crash before the end leaves nothing."""
        seconds = self.node.world.random.uniform(0.01, 0.5)
        self.node.process.after(seconds, self._written, kind, owner, state)

    def _written(self, kind: str, owner: str, state: State) -> None:
        self.files.write(kind, owner, state)
        self.node.cluster.counts[f"written: {kind}"] += 1

    def on_kept(self, peer: str, kept: pb.Kept) -> None:
        self.sender.on_kept(peer, kept)

    def on_peer_lost(self, peer: str) -> None:
        self.sender.on_peer_lost(peer)
        self.holder.on_peer_lost(peer)
