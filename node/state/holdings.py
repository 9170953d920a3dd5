"""What a node keeps for the day when a stage is lost.

Of other stages in memory: copies, running snapshots, a twin; of its own in files; and what crossed
to its neighbours in the last steps. Which of these there are follows from the run's policy and the
node's stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from planaria.node.ports import Priority
from planaria.node.report.events import Cost
from planaria.node.run_file import RunFile
from planaria.node.stage.compute import ComputeThread
from planaria.node.stage.model import parameter_shapes
from planaria.node.stage.next_stage import build as build_next_stage
from planaria.node.stage.shape import ModelConfig
from planaria.node.state.boundary import BoundaryKeeper
from planaria.node.state.copies import Holder, Outgoing, Sender
from planaria.node.state.saves import SaveError, Saves, Writer
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.twin import Twin, next_stage
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.frames import Frame
from planaria.node.wire.link import Links
from planaria.recovery.decide import Kind
from planaria.recovery.snapshot import Layout, held_at, route

log = logging.getLogger("planaria")

CLOSE: Final = 10.0  # seconds that the last saves have to get to disk


class Host(Protocol):
    """The node that keeps all this; called on the event loop."""

    node: str
    compute: ComputeThread
    links: Links

    @property
    def exchanges(self) -> Exchanges: ...

    def send_message(self, peer: str, message: pb.Message) -> bool: ...
    def send_frame(self, peer: str, frame: Frame) -> bool: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> object: ...
    def own_state(self) -> StageState | None: ...
    def saved(self, kind: Kind, save: Age) -> None: ...
    def save_failed(self, reason: str) -> None: ...


class Files:
    """Saves of the node's own stage: a kind of holding, in one folder."""

    def __init__(self, kind: Kind, saves: Saves, writer: Writer, every: int) -> None:
        self.kind, self.saves, self.writer, self.every = kind, saves, writer, every
        self.refused = set(saves.listed()) - set(saves.sound())

    def holdings(self) -> list[pb.Holding]:
        try:
            listed = self.saves.listed()
        except OSError as error:
            log.error("can't list the saves in %s: %s", self.saves.folder, error.strerror)
            return []
        found = []
        for save in listed:
            try:
                if save not in self.refused:
                    found.append(self.saves.id_of(save).holding(self.kind))
            except SaveError as error:  # damaged meanwhile, or gone: a newer one took its place
                log.warning("not offered: %s", error)
        return found

    def load(self, save: Age) -> StageState:
        """Raises SaveError; what can't be loaded is offered no more."""
        try:
            return self.saves.load(save)
        except SaveError:
            self.refused.add(save)
            raise


class Holdings:
    """All of it at one node. Made in the compute thread; methods are called on the event loop,
    but for those that say otherwise."""

    def __init__(
        self,
        host: Host,
        stage: int,
        run_id: str,
        run: RunFile,
        config: ModelConfig,
        device: torch.device,
        save_dir: Path | None,
        on_loop: Callable[..., object],
    ) -> None:
        """`on_loop` is the loop's `call_soon_threadsafe`. Raises SaveError."""
        self.host, self.stage, self.run_id, self.run, self.config = host, stage, run_id, run, config
        self.policy = policy = run.recovery.policy
        relearns = run.recovery.relearn_passes > 0 and policy != "checkpoint"
        when_idle = partial(host.compute.run, priority=Priority.BACKGROUND)
        self.boundary = BoundaryKeeper(when_idle, run.recovery.relearn_steps) if relearns else None
        self.twin: Twin | None = None
        if policy == "redundant":
            behind = next_stage(stage, config.stages)
            optimizer, forward = build_next_stage(behind, config, run, device)
            self.twin = Twin(
                node=host.node,
                stage=stage,
                stages=config.stages,
                optimizer=optimizer,
                forward=forward,
                exchanges=host.exchanges,
                send=host.send_frame,
                tensors=tensors,
            )
        self.sender: Sender | None = None
        self.holder: Holder | None = None
        self._carry_copies()
        self.files: list[Files] = []
        self._on_loop, self._closed = on_loop, False
        if save_dir is not None:
            saves = run.saves
            self._add_files("save", save_dir, saves.every, saves.writes, saves.keep)
        if policy == "checkpoint":
            every, writes = run.recovery.checkpoint_every, run.recovery.checkpoint_writes
            self._add_files("checkpoint", Path(run.recovery.checkpoint_dir), every, writes, 4)

    def _carry_copies(self) -> None:
        """Copies of stage 0, or snapshots: what this node sends, and what it holds of others."""
        kind: Kind = "snapshot" if self.policy == "snapshot" else "copy"
        if self.policy not in ("snapshot", "checkfree", "checkfree+"):
            return
        host, recovery, stages = self.host, self.run.recovery, self.config.stages
        held = [(k, of) for k, of in held_at(self.stage, stages) if k == kind]
        if held:
            layouts = {(k, of): self._layout(of) for k, of in held}
            self.holder = Holder(layouts, host.send_message, host.compute.run, host.spawn)
        if kind == "snapshot" or self.stage == 0:
            layout = self._layout(self.stage)
            if kind == "copy":
                outgoing = Outgoing.copies(layout, recovery)
            else:
                outgoing = Outgoing.snapshots(self.stage, layout, recovery, self.run.seed)
            state, send = host.own_state, host.links.send_frame
            self.sender = Sender(outgoing, state, send, host.compute.run, host.spawn)

    def _layout(self, stage: int) -> Layout:
        return Layout(parameter_shapes(self.config, stage))

    def _add_files(self, kind: Kind, folder: Path, every: int, writes: Any, keep: int) -> None:
        saves = Saves(folder, self.run_id, self.stage, keep)

        def saved(save: Age) -> None:
            self._on_loop(self.host.saved, kind, save)

        def failed(reason: str) -> None:
            self._on_loop(self.host.save_failed, reason)

        writer = Writer(saves, writes, self.run.saves.in_flight, failed, saved)
        self.files.append(Files(kind, saves, writer, every))

    # --- training

    def attempted(self, ballot: Ballot, begin: pb.Begin) -> None:
        """An attempt begins."""
        if self.boundary is not None and begin.kind == pb.Begin.TRAIN:
            self.boundary.start(ballot, begin.step)
        self.follow(begin)

    def follow(self, begin: pb.Begin) -> None:
        """These are the members: to whom this node sends."""
        if self.sender is not None:
            kind: Any = "snapshot" if self.policy == "snapshot" else "copy"
            members = [(place.node, place.stage) for place in begin.members]
            way = route(kind, self.stage, members, self.config.stages)
            mine = way is not None and way.sender == self.host.node
            holders = way.holders if way is not None and mine else ()
            for holder in holders:
                self.host.links.demand(holder)
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
            self.host.spawn(self.boundary.narrow())

    def apply(self, commit: pb.Commit, lr: float) -> None:
        """In the compute thread, after the optimizer."""
        if self.twin is not None:
            self.twin.apply(commit, lr)

    def save(self, state: StageState, first: bool, always: bool = False) -> None:
        """In the compute thread: the state as it is now, where its step is one to be saved. Of the
        replicas of a stage the first alone writes checkpoints."""
        for files in () if self._closed else self.files:
            due = state.id.step % files.every == 0 and (first or files.kind == "save")
            if due or (always and files.kind == "save"):
                files.writer.save(state)

    def in_place(self, own: StateId) -> None:
        """This node has that state of its stage: applied, fetched or loaded."""
        if self.boundary is not None:
            self.boundary.stand_at(own.step, own.lineage)
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
        """For the driver."""
        found = self.holder.holdings() if self.holder is not None else []
        for one in found:
            if one.kind == "snapshot" and self.holder is not None:
                fidelity = self.holder.fidelity("snapshot", one.stage)
                assert fidelity is not None
                one.mean_step, one.oldest_step = fidelity.staleness.mean, fidelity.staleness.oldest
                one.perturbation = fidelity.perturbation
        if self.twin is not None:
            found.append(self.twin.state.id.holding("redundant"))
        return found + [one for files in self.files for one in files.holdings()]

    def served(self, kind: str, stage: int) -> StageState | None:
        """For a joiner; None: there is no such thing here."""
        if kind == "redundant" and self.twin is not None and self.twin.stage == stage:
            return self.twin.state
        if kind in ("copy", "snapshot") and self.holder is not None:
            return self.holder.state("copy" if kind == "copy" else "snapshot", stage)
        return None

    def load(self, source: pb.Source, method: str) -> StageState:
        """The node's own file that the driver has chosen. Reads the disk. Raises SaveError."""
        kind = "checkpoint" if method == "checkpoint" else "save"
        for files in self.files:
            if files.kind == kind or method == "save":
                try:
                    return files.load(Age(source.lineage, source.step))
                except SaveError as error:
                    problem = error
        raise SaveError(str(problem) if self.files else f"no folder for a {kind} at this node")

    def costs(self) -> dict[str, Cost]:
        """By what it is for."""
        found: dict[str, Cost] = {}
        if self.boundary is not None:
            found["boundary"] = Cost(memory_bytes=self.boundary.memory_bytes)
        if self.twin is not None:
            twin = self.twin
            found["redundant"] = Cost(twin.bytes_sent, twin.memory_bytes, twin.critical_seconds)
        name = "snapshot" if self.policy == "snapshot" else "copies"
        if self.sender is not None:
            sender = self.sender
            found[name] = Cost(sender.bytes_sent, sender.memory_bytes, sender.critical_seconds)
        if self.holder is not None:
            kept = Cost(0, self.holder.memory_bytes, self.holder.critical_seconds)
            found[name] = found.get(name, Cost()) + kept
        for files in self.files:
            writer = files.writer
            found["checkpoint" if files.kind == "checkpoint" else "saves"] = Cost(
                writer.bytes_written, 0, writer.critical_seconds
            )
        return found

    def finish_saves(self, seconds: float = CLOSE) -> None:
        """Waits, blocking, for the writes in flight; nothing is saved afterwards."""
        self._closed = True
        for files in self.files:
            files.writer.close(seconds)
