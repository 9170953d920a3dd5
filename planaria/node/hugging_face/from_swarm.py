"""A run's model from the nodes that train it.

All stages send their weights of one committed step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

from torch import Tensor

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.registry_pb2 import Cause, Description
from planaria.node.data.progress import Track
from planaria.node.hugging_face.adapters import (
    REMEDY,
    base_name,
    export_writer,
    kind_of_result,
    with_origin,
)
from planaria.node.hugging_face.card import model_card
from planaria.node.hugging_face.export import ExportError, ModelParts
from planaria.node.hugging_face.living_run import LOOK, Access, LivingRun, outside_access
from planaria.node.hugging_face.options import ExportOptions
from planaria.node.hugging_face.through_swarm import LivingStages
from planaria.node.ports import Priority
from planaria.node.state.stage_state import Age
from planaria.node.state.transfer import WEIGHTS, StateClient, WantedState
from planaria.node.state.weight_pins import PIN
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchanges
from planaria.node.wire.frame_format import Frame

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARD: Final = 1 << 20
"""Bytes of a request: small, since training uses the same links."""
TRANSFER: Final = 1800.0
"""Seconds for the transfer of a tensor."""


class ComputeAtOnce:
    """The port `Compute` on the event loop, for a client that computes nothing else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.computed, self.computing = 0, False

    @property
    def now(self) -> float:
        return self._loop.time()

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        try:
            result: T | Exception = work()
        except Exception as error:  # noqa: BLE001 (`then` gets it)
            result = error
        self.computed += 1
        self._loop.call_soon(then, result)


class LivingModel(LivingRun):
    """A run's model during training, as of one step. Used within `async with`."""

    def __init__(self, access: Access, wait: float) -> None:
        """`wait`: seconds for a step that all stages have. Raises ExportError."""
        super().__init__(access, wait)
        self.loss = 0.0
        self._made = NEVER  # commit of the step, by the first answer
        self._exchanges = Exchanges(ComputeAtOnce(self.loop), self.loop, self._crashed)
        self._states = StateClient(
            self._exchanges, tensors, self.asking.send, self._accuse, shard_size=SHARD
        )

    async def __aexit__(self, *_: object) -> None:
        self._exchanges.close("the export is over")
        await super().__aexit__()

    async def read(self, stage: int, first: int, count: int) -> Tensor:
        """A slice of a running stage's flat weights, float32 [count]. Raises ExportError."""
        due = {WEIGHTS: self.config.trained_in(stage)}
        age = Age(self.lineage, self.step)
        wanted = WantedState(stage, age, due, kind=PIN, part=(first, count))
        fetch = self._states.fetch(wanted, self.seats[stage], TRANSFER)
        try:
            state = (await self._exchanges.outcome(fetch)).state
        except ComplaintError as error:
            raise ExportError(f"stage {stage} can't be read: {error}. Try again") from error
        if state.last.step == self.step:
            made = Ballot.of(state.last.ballot)
            if self._made not in (NEVER, made):
                raise ExportError(
                    f"the run went back and repeated step {self.step} meanwhile: export again"
                )
            self._made, self.loss = made, state.last.loss
        return state.tensors[WEIGHTS]

    def blocking_read(self, stage: int, first: int, count: int) -> Tensor:
        """`read`, for a thread that isn't the event loop's."""
        return asyncio.run_coroutine_threadsafe(self.read(stage, first, count), self.loop).result()

    # --- answers

    def answered(self, seat: str, item: pb.Message | Frame) -> None:
        if isinstance(item, Frame):
            self._states.on_frame(seat, item)
        else:
            self._states.on_message(seat, item)

    def lost(self, seat: str, why: str) -> None:
        self._states.on_peer_lost(seat, why)

    def _accuse(self, seat: str, why: str, _: Cause) -> None:
        log.warning("%s: %s", seat, why)

    def _crashed(self, error: BaseException) -> None:
        log.error("crashed", exc_info=error)


async def export_swarm(
    client: RegistryClient, credentials: Credentials, options: ExportOptions, track: Track
) -> tuple[str, int]:
    """Write a folder with the model of a running run. Returns its kind, model or adapters, and its
    step. Raises ExportError, CorpusError, RunFileError, and exceptions of `client`."""
    merged, checkpoint = options.merged, options.model
    access = await outside_access(client.describe, credentials, await client.reach())
    base = base_name(access.run, options.base)
    access = access._replace(run=with_origin(access.run, checkpoint))
    if merged and checkpoint is None and access.run.training.lora is not None:
        raise ExportError(f"--merged: {REMEDY}")
    write = export_writer(access.run, access.run.config, merged, base)
    with TemporaryDirectory(prefix="planaria-") as kept:
        async with LivingStages(access) as stages:
            vocabulary = await stages.vocabulary(options.data, checkpoint, Path(kept))
        async with LivingModel(access, options.wait) as model:
            card = await living_card(model, client.describe, merged, base)
            parts = ModelParts(model.config, model.blocking_read, vocabulary, card)
            await asyncio.to_thread(write, options.out, parts, options.dtype, track)
            await model.exported()
            return kind_of_result(access.run, merged), model.step


async def living_card(
    model: LivingModel, describe: Callable[[], Awaitable[Description]], merged: bool, base: str
) -> str:
    """The model card of a running run, with all rebuilds up to the model's step. The registry may
    hear of the last one only after the next commit, so this waits for that. Raises ExportError, and
    exceptions of `describe`."""
    some = 0 if model.config.trained[0] else 1
    await model.read(some, 0, 1)  # gets the step's loss
    until = model.loop.time() + model.run.swarm.lease
    description = await describe()
    while not has_passed(description, model.step) and model.loop.time() < until:
        await asyncio.sleep(LOOK)
        description = await describe()
    fields = "stage", "step", "method", "exact"
    rebuilds = [
        {name: getattr(rebuild, name) for name in fields}
        for rebuild in description.rebuilds
        if rebuild.step <= model.step
    ]
    summary = {"loss": {"last": model.loss or None}, "rebuilds": rebuilds}
    return model_card(model.run, model.config, model.step, "", summary, merged, base)


def has_passed(description: Description, step: int) -> bool:
    """Whether the driver has reported a later step, or the end: and so earlier rebuilds."""
    return any(
        seat.committed > step or seat.finished
        for status in description.members
        if status.member.node == description.view.driver
        for seat in status.report.seats
    )
