"""What a node keeps for the day when a stage is lost.

Of other stages in memory: copies, running snapshots, a twin; of its own in files; and what crossed
to its neighbours in the last steps. Which of these there are follows from the run's policy and the
node's stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from planaria.bootstrap.registry_pb2 import Cause
from planaria.node.model.shape import ModelConfig
from planaria.node.ports import Disk, Net, OpenDisk, Tensors
from planaria.node.report.events import HoldingCost
from planaria.node.run_file import RunFile
from planaria.node.state.boundary import BoundaryKeeper
from planaria.node.state.copies import Holder, Outgoing, Sender
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId
from planaria.node.state.twin import Twin
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, Exchanges, Outcome
from planaria.node.wire.frames import Frame
from planaria.node.wire.naming import node_of
from planaria.recovery.decide import Kind
from planaria.recovery.snapshot import Layout, route, sent_as

log = logging.getLogger("planaria")

CLOSE: Final = 10.0  # seconds that the last saves have to get to disk


class Host(Protocol):
    """The seat that keeps all this; called on the event loop."""

    node: str
    stage: int
    run: RunFile
    config: ModelConfig
    exchanges: Exchanges
    tensors: Tensors
    net: Net

    def send(self, peer: str, item: pb.Message | Frame) -> bool: ...
    def accuse(self, node: str, reason: str, cause: Cause) -> None: ...
    def own_state(self) -> StageState | None: ...
    def saved(self, kind: Kind, save: Age) -> None: ...
    def save_failed(self, reason: str) -> None: ...


class Files:
    """Saves of the node's own stage: a kind of holding, every so many steps."""

    def __init__(self, kind: Kind, disk: Disk, every: int) -> None:
        self.kind, self.disk, self.every = kind, disk, every
        self.refused = disk.damaged()

    def holdings(self) -> list[pb.Holding]:
        return [save.holding(self.kind) for save in self.disk.listed(self.refused)]

    async def load(self, exchanges: Exchanges, save: Age) -> StageState:
        """Raises SaveError; what can't be loaded is offered no more."""
        loaded: Outcome[StageState] = Outcome(exchanges)
        self.disk.load(save, loaded.settle)
        try:
            return await loaded
        except SaveError:
            self.refused.add(save)
            raise


class Holdings:
    """All of it at one node. Made in the compute thread; methods are called on the event loop,
    but for those that say otherwise."""

    def __init__(
        self,
        host: Host,
        twin: Twin | None,
        layout: Callable[[int], Layout],
        open_disk: OpenDisk,
        save_dir: Path | None,
        checkpoint_dir: Path | None,
    ) -> None:
        """`twin`: with the policy "redundant"; `checkpoint_dir`: with "checkpoint"; `layout`: of
        the tensors of that stage. Raises SaveError for a folder that can't be used."""
        self.host, self.twin = host, twin
        self._twin_digest: tuple[StateId | None, bytes] = (None, b"")  # when it was last updated
        self.stage, self.run, self.config = host.stage, host.run, host.config
        run = host.run
        self.policy = policy = run.recovery.policy
        self.boundary: BoundaryKeeper | None = None
        if run.recovery.relearn.passes > 0 and policy != "checkpoint":
            steps = run.recovery.relearn.steps
            self.boundary = BoundaryKeeper(host.exchanges, host.tensors, steps)
        self.sender: Sender | None = None
        self.holder: Holder | None = None
        self.sends = sent_as(policy, self.stage, run.recovery.snapshot.first)
        self._carry_copies(layout)
        self.files: list[Files] = []
        self._open_disk, self._closed = open_disk, False
        if save_dir is not None:
            saves = run.saves
            self._add_files("save", save_dir, saves.every, saves.keep)
        if checkpoint_dir is not None:
            self._add_files("checkpoint", checkpoint_dir, run.recovery.checkpoint.every, 4)

    def _carry_copies(self, layout: Callable[[int], Layout]) -> None:
        """Copies of stage 0, and snapshots: what this node sends, and what it holds of others."""
        host, snapshot = self.host, self.run.recovery.snapshot
        learning = [of for of in range(self.config.stages + 1) if self.config.trained[min(of, 1)]]
        kinds = {of: sent_as(self.policy, of, snapshot.first) for of in learning}
        layouts = {(kind, of): layout(of) for of, kind in kinds.items() if kind is not None}
        own = layouts.pop((self.sends, self.stage), None) if self.sends is not None else None
        if layouts:
            self.holder = Holder(host.exchanges, layouts, host.send, host.accuse)
        if own is not None:
            if self.sends == "copy":
                outgoing = Outgoing.copies(own)
            else:
                outgoing = Outgoing.snapshots(self.stage, own, snapshot, self.run.seed)
            self.sender = Sender(host.exchanges, outgoing, host.own_state, self._send_at_once)

    def _send_at_once(self, peer: str, item: pb.Message | Frame) -> bool:
        """Or never: when a link comes up there will be a newer state to send."""
        return self.host.net.linked(peer) and self.host.send(peer, item)

    def _add_files(self, kind: Kind, folder: Path, every: int, keep: int) -> None:
        saved, failed = partial(self.host.saved, kind), self.host.save_failed
        disk = self._open_disk(folder, keep, saved, failed)
        self.files.append(Files(kind, disk, every))

    # --- training

    def attempted(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Hears that an attempt begins."""
        if self.boundary is not None and begin.kind == pb.Begin.TRAIN:
            self.boundary.start(ballot, begin.step)
        self.follow(begin)

    def follow(self, begin: pb.Begin) -> None:
        """These are the members: to whom this node sends."""
        if self.sender is not None and self.sends is not None:
            members = [(place.node, place.stage) for place in begin.members]
            way = route(self.sends, self.stage, members, self.config.stages, node_of)
            mine = way is not None and way.sender == self.host.node
            holders = way.holders if way is not None and mine else ()
            for holder in holders:
                self.host.net.demand(holder)
            self.sender.set_holders(holders)

    def dropped(self) -> None:
        """The attempt has failed."""
        if self.boundary is not None:
            self.boundary.drop()

    def forget(self, before: Ballot) -> None:
        """Ballots older than `before` are void."""
        if self.twin is not None:
            self.twin.forget(before)

    def committing(self, step: int, lineage: int) -> None:
        """The commit of `step` is about to be posted to the compute thread."""
        if self.boundary is not None:
            self.boundary.commit(step, lineage)

    def apply(self, commit: pb.Commit, lr: float) -> None:
        """Applies a commit to the twin; called in the compute thread, after the optimizer."""
        if self.twin is not None:
            self.twin.apply(commit, lr)
            self._twin_digest = self.twin.state.id, self.twin.optimizer.digest()

    def save(self, state: StageState, first: bool, always: bool = False) -> None:
        """In the compute thread: the state as it is now, where its step is one to be saved. Of the
        replicas of a stage the first alone writes checkpoints."""
        for files in () if self._closed else self.files:
            due = state.id.step % files.every == 0 and (first or files.kind == "save")
            if due or (always and files.kind == "save"):
                files.disk.write(state)

    def in_place(self, own: StateId) -> None:
        """This node has that state of its stage: applied, fetched or loaded."""
        if self.boundary is not None:
            self.boundary.stand_at(own.step, own.lineage)
            self.host.exchanges.start(self.boundary.narrow())
        if self.sender is not None:
            self.sender.committed(own)
        if self.holder is not None:
            self.holder.committed(own)

    # --- what others say

    def on_message(self, peer: str, message: pb.Message) -> None:
        """A Kept has come."""
        if self.sender is not None:
            self.sender.on_kept(peer, message.kept)

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of kind "copy" or "twin" has come."""
        if frame.kind == "twin" and self.twin is not None:
            self.twin.on_frame(peer, frame)
        elif frame.kind == "copy" and self.holder is not None:
            self.holder.on_frame(peer, frame)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        if self.sender is not None:
            self.sender.on_peer_lost(peer, reason)
        if self.holder is not None:
            self.holder.on_peer_lost(peer)

    # --- what there is

    def listed(self) -> list[pb.Holding]:
        """All that is held, as the driver is told."""
        found = self.holder.holdings() if self.holder is not None else []
        for one in found:
            if one.kind == "snapshot" and self.holder is not None:
                fidelity = self.holder.fidelity("snapshot", one.stage)
                assert fidelity is not None
                one.mean_step, one.oldest_step = fidelity.staleness.mean, fidelity.staleness.oldest
                one.perturbation = fidelity.perturbation
        if self.twin is not None:
            twin = self.twin.state.id.holding("redundant")
            of, digest = self._twin_digest
            twin.digest = digest if of == self.twin.state.id else b""
            found.append(twin)
        return found + [one for files in self.files for one in files.holdings()]

    def served(self, kind: str, stage: int) -> StageState | None:
        """The state that a joiner asks for; None: there is no such thing here."""
        if kind == "redundant" and self.twin is not None and self.twin.stage == stage:
            of, digest = self._twin_digest
            return replace(self.twin.state, digest=digest if of == self.twin.state.id else b"")
        if kind in ("copy", "snapshot") and self.holder is not None:
            return self.holder.state("copy" if kind == "copy" else "snapshot", stage)
        return None

    async def load(self, source: pb.Source, method: str) -> StageState:
        """The node's own file that the driver has chosen. Raises ComplaintError."""
        kind = "checkpoint" if method == "checkpoint" else "save"
        problem = f"no folder for a {kind} at this node"
        for files in self.files:
            if files.kind == kind or method == "save":
                try:
                    return await files.load(self.host.exchanges, Age(source.lineage, source.step))
                except SaveError as error:
                    problem = str(error)
        raise ComplaintError(problem)

    def costs(self) -> dict[str, HoldingCost]:
        """What holding costs, by what it is for."""
        found: dict[str, HoldingCost] = {}
        if self.boundary is not None:
            found["boundary"] = HoldingCost(memory_bytes=self.boundary.memory_bytes)
        if self.twin is not None:
            twin = self.twin
            found["redundant"] = HoldingCost(
                twin.bytes_sent, twin.memory_bytes, twin.critical_seconds
            )
        name = "snapshot" if self.policy == "snapshot" else "copies"
        if self.sender is not None:
            sender = self.sender
            found[name] = HoldingCost(
                sender.bytes_sent, sender.memory_bytes, sender.critical_seconds
            )
        if self.holder is not None:
            kept = HoldingCost(0, self.holder.memory_bytes, self.holder.critical_seconds)
            found[name] = found.get(name, HoldingCost()) + kept
        for files in self.files:
            disk = files.disk
            found["checkpoint" if files.kind == "checkpoint" else "saves"] = HoldingCost(
                disk.bytes_written, 0, disk.critical_seconds
            )
        return found

    def finish_saves(self, seconds: float = CLOSE) -> None:
        """Waits, blocking, so long for the writes in flight; nothing is saved afterwards."""
        self._closed = True
        for files in self.files:
            files.disk.finish(seconds)
