"""Holdings: states that a node keeps in case a stage is lost.

In memory, of other stages: copies, running snapshots and a twin. In files: saves of its own stage.
Also tensors that crossed to its neighbours in the last steps. The run's policy and the node's stage
decide which of these exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planaria.node.ports import Disk, OpenDisk
from planaria.node.report.events import HoldingCost, SnapshotPaced
from planaria.node.state.boundary import BoundaryKeeper
from planaria.node.state.copies import (
    CopyHolder,
    CopyKind,
    CopySender,
    OutgoingCopies,
    snapshot_section,
)
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId, is_milestone
from planaria.node.state.twin import Twin
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, Exchanges, Outcome
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.seat_names import node_of
from planaria.recovery.decide import FRESH, RECENT
from planaria.recovery.facts import Kind
from planaria.recovery.snapshot import Layout, route
from planaria.recovery.snapshot_pace import Pace

if TYPE_CHECKING:
    from planaria.node.agent import Agent
    from planaria.node.run_file import RunFile

CLOSE: Final = 10.0  # seconds that the last saves have to reach the disk
MOST_STEPS: Final = 64
"""Saves that a node reports."""


class SaveFolder:
    """Saves of the node's own stage: one kind of holding, every so many steps. Those of steps that
    the run has undone are removed."""

    def __init__(self, kind: Kind, disk: Disk, every: int, run: RunFile) -> None:
        self.kind, self.disk, self.every, self._run = kind, disk, every, run
        disk.remove([save.age for save in disk.listed() if self._is_undone(save)])
        self.refused = disk.damaged()

    def _is_undone(self, save: StateId) -> bool:
        return self._run.is_undone(save.step, save.made.view)

    def listed(self) -> list[StateId]:
        """The newest saves that count, newest first; the seat before may still have written one."""
        listed = self.disk.listed(self.refused)
        return [save for save in listed if not self._is_undone(save)][:MOST_STEPS]

    async def load(self, exchanges: Exchanges, save: Age) -> StageState:
        """Load a save from disk. Raises SaveError; one that can't be loaded isn't offered again."""
        loaded: Outcome[StageState] = Outcome(exchanges)
        self.disk.load(save, loaded.settle)
        try:
            return await loaded
        except SaveError:
            self.refused.add(save)
            raise


class Holdings:
    """All holdings of one node. Made in the compute thread; methods are called on the event loop,
    except where stated otherwise."""

    def __init__(
        self,
        host: Agent,
        twin: Twin | None,
        layout: Callable[[int], Layout],
        open_disk: OpenDisk,
        save_dir: Path | None,
        checkpoint_dir: Path | None,
    ) -> None:
        """`twin`, `checkpoint_dir`: if the policy has them; `layout`: of a stage's
        tensors. Raises SaveError for a folder that can't be used."""
        self.host, self.twin = host, twin
        self.stage, self.run, self.config = host.stage, host.run, host.config
        run = host.run
        self.policy = run.policy
        self.boundary: BoundaryKeeper | None = None
        if run.recovery.relearn.passes > 0 and self.policy.relearns:
            steps = run.recovery.relearn.steps
            self.boundary = BoundaryKeeper(host.exchanges, host.tensors, steps)
        self.sender: CopySender | None = None
        self.unsent = ""  # why this stage's snapshot isn't sent; empty: it is, or there is none
        self.depositor: CopySender | None = None  # at stage 0
        self.holder: CopyHolder | None = None
        self._set_up_copies(layout)
        self.files: list[SaveFolder] = []
        self._open_disk, self._closed = open_disk, False
        if save_dir is not None:
            saves = run.saves
            self._add_files("save", save_dir, saves.every, saves.keep)
        if checkpoint_dir is not None:
            every, keep = run.recovery.checkpoint.every, 2 + run.saves.in_flight
            self._add_files("checkpoint", checkpoint_dir, every, keep)

    def _set_up_copies(self, layout: Callable[[int], Layout]) -> None:
        """Set up sending and holding of snapshots and of what stage 0's last node leaves."""
        host, snapshot = self.host, snapshot_section(self.run, self.config)
        trained = [of for of in range(self.config.stages + 1) if self.config.trained_in(of)]
        layouts: dict[tuple[CopyKind, int], Layout] = {
            ("snapshot", stage): layout(stage)
            for stage in trained
            if self.policy.sends(stage, snapshot.first)
        }
        own_layout = layouts.pop(("snapshot", self.stage), None)
        if self.stage and 0 in trained:
            layouts["deposit", 0] = layout(0)
        if layouts:
            self.holder = CopyHolder(host.exchanges, layouts, host.send, host.accuse)
        sender = partial(CopySender, host.exchanges, state=host.own_state, send=self._send_at_once)
        if own_layout is not None:
            outgoing = OutgoingCopies.snapshots(
                self.stage, own_layout, snapshot, self._oldest_useful()
            )
            self.sender = sender(outgoing, on_pace=self._report_pace)
        if self.stage == 0 and 0 in trained:
            self.depositor = sender(OutgoingCopies("deposit", 0, layout(0)))

    def _send_at_once(self, peer: str, item: pb.Message | Frame) -> bool:
        """Send now or never: once a link comes up, a newer state is sent."""
        return self.host.net.linked(peer) and self.host.send(peer, item)

    def _oldest_useful(self) -> int | None:
        """Steps from which on the policy's guess of this stage costs no more than its snapshot;
        None: there is no such guess."""
        inner = 1 < self.stage < self.config.stages and self.config.alike
        if not (self.policy.adapts and inner and self.run.model.origin is None):
            return None
        return FRESH if self.run.recovery.relearn.passes else RECENT

    def _report_pace(self, holder: str, pace: Pace) -> None:
        """Report a link that has become too slow for this stage's snapshot, or fast enough
        again."""
        event = SnapshotPaced(stage=self.stage, holder=holder, kept=pace.kept, age=pace.age)
        self.unsent = "" if pace.kept else event.sentence(self.host.node)
        self.host.record.tell(event)
        self.host.record.report_changed()

    def _add_files(self, kind: Kind, folder: Path, every: int, keep: int) -> None:
        own = self.host.own_saves
        disk = self._open_disk(folder, keep, partial(own.saved, kind), partial(own.failed, kind))
        self.files.append(SaveFolder(kind, disk, every, self.run))

    # --- training

    def attempt_begins(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Begin to keep an attempt's boundary tensors, and choose the holders of copies."""
        if self.boundary is not None and begin.kind == pb.Begin.TRAIN:
            self.boundary.start(ballot, begin.step)
        self.choose_holders(begin)

    def choose_holders(self, begin: pb.Begin) -> None:
        """Choose the holders that this node sends to, from the attempt's members."""
        if self.sender is not None:
            members = [(place.node, place.stage) for place in begin.members]
            copy_route = route(self.stage, members, self.config.stages, node_of)
            sends = copy_route is not None and copy_route.sender == self.host.node
            holders = copy_route.holders if copy_route is not None and sends else ()
            for holder in holders:
                self.host.net.demand(holder)
            self.sender.set_holders(holders)

    def dropped(self) -> None:
        """Drop what is kept of a failed attempt."""
        if self.boundary is not None:
            self.boundary.drop()

    def forget(self, before: Ballot) -> None:
        """Forget the twin's gradients of attempts older than `before`."""
        if self.twin is not None:
            self.twin.forget(before)

    def before_commit(self, step: int, lineage: int) -> None:
        """Keep the attempt's boundary tensors as those of `step`. Call it before the commit is
        posted to the compute thread."""
        if self.boundary is not None:
            self.boundary.commit(step, lineage)

    def apply(self, commit: pb.Commit, lr: float) -> None:
        """Apply a commit to the twin; called in the compute thread, after the optimizer."""
        if self.twin is not None:
            self.twin.apply(commit, lr)

    def save(self, state: StageState, first: bool, always: bool = False) -> None:
        """Save the state, if its step is due; in the compute thread. Of a stage's replicas only the
        first writes checkpoints."""
        for files in () if self._closed else self.files:
            due = state.id.step % files.every == 0 and (first or files.kind == "save")
            if due or (always and files.kind == "save"):
                files.disk.write(state)

    def in_place(self, own: StateId) -> None:
        """Record that this node has a state of its stage: applied, fetched or loaded."""
        if self.boundary is not None:
            self.boundary.set_state_step(own.step, own.lineage)
            self.host.exchanges.start(self.boundary.narrow())
        for sender in (self.sender, self.depositor):
            if sender is not None:
                sender.committed(own)
        if self.holder is not None:
            self.holder.committed(own)

    async def deposit(self, holders: Iterable[str]) -> str:
        """Leave stage 0's exact state with the first of these nodes that takes it; returns that
        node. Raises ComplaintError."""
        refusal = ComplaintError("there is no body node to leave it with")
        depositor = self.depositor
        if depositor is None:
            raise ComplaintError("stage 0 is not trained: it equals the checkpoint")
        for holder in holders:
            try:
                await depositor.deliver(holder)
            except ComplaintError as error:
                refusal = error
            else:
                return holder
        raise refusal

    # --- messages

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handle a Kept."""
        sender = self.depositor if message.kept.kind == "deposit" else self.sender
        if sender is not None:
            sender.on_kept(peer, message.kept)

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handle a frame of kind "copy" or "twin"."""
        if frame.kind == "twin" and self.twin is not None:
            self.twin.on_frame(peer, frame)
        elif frame.kind == "copy" and self.holder is not None:
            self.holder.on_frame(peer, frame)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        for sender in (self.sender, self.depositor):
            if sender is not None:
                sender.on_peer_lost(peer, reason)
        if self.holder is not None:
            self.holder.on_peer_lost(peer)

    # --- holdings

    def listed(self) -> list[pb.Holding]:
        """All states that this node holds, for the driver."""
        holdings = self.holder.holdings() if self.holder is not None else []
        if self.twin is not None:
            twin = self.twin.state.id.holding("redundant")
            twin.digest = self.twin.state.digest
            holdings.append(twin)
        return holdings + [
            save.holding(files.kind) for files in self.files for save in files.listed()
        ]

    def saved_steps(self) -> list[int]:
        """Steps of saves that the next save doesn't replace, the newest first."""
        steps = {save.step for files in self.files for save in files.listed()}
        newest, saves = sorted(steps, reverse=True), self.run.saves
        recent = newest[: saves.keep - 1]
        return [s for s in newest if s in recent or is_milestone(s, saves.milestones)][:MOST_STEPS]

    def held_state(self, kind: str, stage: int) -> StageState | None:
        """The held state that a joiner requests; None: this node has none."""
        if kind == "redundant" and self.twin is not None and self.twin.stage == stage:
            return self.twin.state
        return None if self.holder is None else self.holder.state(kind, stage)

    async def load(self, source: pb.Source, method: str) -> StageState:
        """Load the node's own file that the driver has chosen. Raises ComplaintError."""
        kind = "checkpoint" if method == "checkpoint" else "save"
        problem = f"this node has no folder for a {kind}"
        for files in self.files:
            if files.kind == kind or method == "save":
                try:
                    return await files.load(self.host.exchanges, Age(source.lineage, source.step))
                except SaveError as error:
                    problem = str(error)
        raise ComplaintError(problem)

    def costs(self) -> dict[str, HoldingCost]:
        """Costs of the states that this node holds, by purpose."""
        costs: dict[str, HoldingCost] = {}
        if self.boundary is not None:
            costs["boundary"] = HoldingCost(memory_bytes=self.boundary.memory_bytes)
        for purpose, copies in (("redundant", self.twin), ("snapshot", self.sender)):
            if copies is not None:
                costs[purpose] = HoldingCost(
                    copies.bytes_sent, copies.memory_bytes, copies.critical_seconds
                )
        if self.holder is not None:
            held = HoldingCost(0, self.holder.memory_bytes, self.holder.critical_seconds)
            if held != HoldingCost():
                costs["snapshot"] = costs.get("snapshot", HoldingCost()) + held
        for files in self.files:
            disk = files.disk
            costs["checkpoint" if files.kind == "checkpoint" else "saves"] = HoldingCost(
                disk.bytes_written, 0, disk.critical_seconds
            )
        return costs

    def finish_saves(self, seconds: float = CLOSE) -> None:
        """Wait, blocking, up to `seconds` for writes in flight; then nothing more is saved."""
        self._closed = True
        for files in self.files:
            files.disk.finish(seconds)
