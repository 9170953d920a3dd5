"""Inference through the stages of a running run, each computing on the output of the one before.

The client carries tensors from stage to stage. Nothing is kept between two tokens. A stage computes
between two microbatches, with its current weights. Requests for one committed step have lower
priority: they are served when training has nothing else to compute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import Credentials
from planaria.node.data.corpus import CorpusError, load_tokenizer, read_index
from planaria.node.data.progress import Track
from planaria.node.data.tokenizer import PART, SHARED
from planaria.node.hugging_face.evaluate import Evaluation, Portion
from planaria.node.hugging_face.export import ExportError, Vocabulary
from planaria.node.hugging_face.from_saves import (
    vocabulary_in_data,
    vocabulary_in_model,
    vocabulary_received,
)
from planaria.node.hugging_face.generate import Speaker
from planaria.node.hugging_face.living_run import Access, LivingRun, outside_access
from planaria.node.hugging_face.options import EvaluateOptions
from planaria.node.run_file import RunFile
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame, WireError
from planaria.node.wire.observer_client import NoAnswerError
from planaria.node.wire.observers import FRAME_LIMIT
from planaria.node.wire.seat_names import node_of
from planaria.node.wire.tensors import decode, encode

log = logging.getLogger("planaria")

LARGEST: Final = 64 << 20
"""Size limit of a tokenizer file in bytes: the largest known ones have 35 MB."""


class LivingStages(LivingRun):
    """Inference by a running run's stages, at their current state. Used within `async with`."""

    def __init__(self, access: Access, wait: float | None = None) -> None:
        """`wait`: use one committed step instead (see LivingRun). Raises ExportError."""
        super().__init__(access, wait)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Frame]]] = {}
        self._turns = [asyncio.Lock() for _ in range(self.config.stages + 1)]
        self._made: Any = None

    async def __aexit__(self, *of: object) -> None:
        await super().__aexit__(*of)
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(NoAnswerError("the conversation is over"))

    @property
    def context(self) -> int:
        """Most tokens that the run's stages can be asked about, limited by the size of a frame."""
        return min(self.config.context, FRAME_LIMIT // (4 * self.config.crossing))

    @property
    def rows(self) -> int:
        """Samples in a request to a stage, limited by a frame's size; 0: not even one fits."""
        fit = FRAME_LIMIT // (4 * self.config.context * self.config.crossing)
        return min(self.run.training.microbatch, fit)

    async def logits(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: int64 [1, T], T at most `context`, to float32 [vocabulary].
        Raises ExportError."""
        x = await self._ask_stage(0, [await self._body(tokens)], head=True)
        return _checked(x, (1, 1, self.config.vocabulary), "the head")[0, 0]

    async def loss(self, inputs: Tensor, targets: Tensor, *begins: Tensor) -> float:
        """Like `WholeModel.loss`, B at most `rows`. Raises ExportError."""
        x = await self._body(inputs, *begins)
        loss = await self._ask_stage(0, [x, targets.contiguous()], head=True)
        return float(_checked(loss, (1,), "the head"))

    async def _body(self, *inputs: Tensor) -> Tensor:
        """The last stage's output: int64 [B, T] each to float32 [B, T, crossing]."""
        shown = [each.contiguous() for each in inputs]
        for stage in range(self.config.stages + 1):
            seen = await self._ask_stage(stage, shown)
            shown = [_checked(seen, (*inputs[0].shape, self.config.crossing), f"stage {stage}")]
        return shown[0]

    async def vocabulary(self, data: Path | None, model: Path | None, kept: Path) -> Vocabulary:
        """The running run's tokenizer from `data`, a prepared folder of the run's. Without it, from
        files of stage 0's nodes, cached in the folder `kept`, or else from `model`, from which the
        run began. Raises ExportError, CorpusError."""
        if data is not None:
            return vocabulary_in_data(self.run, [data], model)
        try:
            if not (kept / SHARED[-1]).exists():
                for name in SHARED:
                    await self._fetch_tokenizer_file(name, kept / name)
            return vocabulary_received(self.run, kept, model)
        except (ExportError, CorpusError) as error:
            if (vocabulary := vocabulary_in_model(model)) is not None:
                return vocabulary
            raise ExportError(
                f"stage 0 gives no tokenizer: {error}. Name a prepared folder that has it by --data"
            ) from error

    async def _fetch_tokenizer_file(self, name: str, to: Path) -> None:
        """Download one of the tokenizer's files (SHARED), if stage 0 has it. Raises ExportError."""
        content = bytearray()
        while len(content) % PART == 0:
            part = await self._ask_stage(0, [], file=name, first=len(content))
            if part.dtype != torch.uint8 or part.dim() != 1 or part.numel() > PART:
                raise ExportError(f"{name} comes as {part.dtype} {list(part.shape)}")
            if not part.numel():
                break
            content += part.numpy().tobytes()
            if len(content) > LARGEST:
                raise ExportError(f"its {name} has more than {LARGEST} bytes")
        if content:
            to.write_bytes(content)

    def speaker(self, tokenizer: Tokenizer, end: int | None, folder: Path | None = None) -> Speaker:
        """The run's model as a speaker, for a thread that isn't the event loop's."""

        def next_logits(known: Tensor) -> Tensor:
            return asyncio.run_coroutine_threadsafe(self.logits(known), self.loop).result()

        return Speaker(next_logits, tokenizer, end, self.config.vocabulary, self.context, folder)

    async def _ask_stage(self, stage: int, shown: list[Tensor], **fields: Any) -> Tensor:
        """Answer of a stage's first seat with one; `fields`: the frame's. Raises ExportError."""
        async with self._turns[stage]:
            while True:
                seat = self.seats[stage][0]
                try:
                    return await self._ask_seat(seat, shown, fields)
                except NoAnswerError as error:
                    self.drop_seat(seat, str(error))

    async def _ask_seat(self, seat: str, shown: list[Tensor], request: dict[str, Any]) -> Tensor:
        """Send one request to a seat, and wait for the answer. Raises NoAnswerError."""
        number, progress = next(self._numbers), self.run.swarm.progress
        answer: asyncio.Future[Frame] = self.loop.create_future()
        fields = {**request, "transfer": number, "step": self.step}
        self._waiting[number] = seat, answer
        try:
            if not self.asking.send(seat, Frame("state", NEVER, fields, *encode(shown, "none"))):
                raise NoAnswerError(self.asking.why(seat))
            async with asyncio.timeout(progress):
                frame = await answer
            if error := frame.fields.get("error"):
                raise NoAnswerError(f"{node_of(seat)}: {error}")
            self._check_commit(seat, frame.fields.get("made"))
            (tensor,) = decode(frame.descriptors, frame.payload)
        except TimeoutError:
            raise NoAnswerError(f"{node_of(seat)} sent nothing for {progress:g} s") from None
        except (WireError, ValueError) as error:
            raise NoAnswerError(f"{node_of(seat)} sent an invalid message: {error}") from error
        finally:
            del self._waiting[number]
        return tensor

    def _check_commit(self, seat: str, made: Any) -> None:
        """Check that all answers are of one commit. Raises NoAnswerError, ExportError."""
        if not self.step:
            return
        if made is None:
            raise NoAnswerError(f"{node_of(seat)} can't answer for one step: update its planaria")
        self._made = self._made or made
        if made != self._made:
            raise ExportError(f"the run went back and repeated step {self.step}: try again")

    def answered(self, seat: str, item: pb.Message | Frame) -> None:
        if not isinstance(item, Frame):
            return
        number: Any = item.fields.get("transfer")
        if type(number) is not int or number not in self._waiting:
            return
        awaited, answer = self._waiting[number]
        if awaited == seat and not answer.done():
            answer.set_result(item)

    def lost(self, seat: str, why: str) -> None:
        for awaited, answer in self._waiting.values():
            if awaited == seat and not answer.done():
                answer.set_exception(NoAnswerError(why))


def _checked(x: Tensor, shape: tuple[int, ...], whose: str) -> Tensor:
    """A stage's answer with its dtype and shape checked. Raises ExportError."""
    if x.dtype != torch.float32 or x.shape != shape:
        raise ExportError(f"{whose} answered with a tensor {x.dtype} {list(x.shape)}")
    return x


async def reply_living(
    client: RegistryClient,
    credentials: Credentials,
    data: Path | None,
    reply: Callable[[Speaker], Iterable[str]],
    say: Callable[[str], None],
    kept: Path,
) -> None:
    """Pass the pieces of a running run's reply to `say`. `data`, `kept`: see `vocabulary`. Raises
    ExportError, CorpusError, and exceptions of `reply` and `client`."""
    access = await outside_access(client.describe, credentials, await client.reach())
    async with LivingStages(access) as stages:
        vocabulary = await stages.vocabulary(data, None, kept)
        tokenizer, folder = load_tokenizer(vocabulary.file), vocabulary.file.parent
        speaker = stages.speaker(tokenizer, vocabulary.end_of_document, folder)

        def go_on() -> None:
            for text in reply(speaker):
                say(text)

        await asyncio.to_thread(go_on)


async def evaluate_swarm(
    client: RegistryClient, credentials: Credentials, options: EvaluateOptions, track: Track
) -> tuple[int, Evaluation]:
    """Evaluate a running run's model of a step that all stages have committed. Returns that step,
    too. Raises ExportError, CorpusError, RunFileError, and exceptions of `client`."""
    access = await outside_access(client.describe, credentials, await client.reach())
    check_data(access.run, options.data)
    async with LivingStages(access, options.wait) as stages:
        config, rows = stages.config, min(options.batch, stages.rows)
        if not rows:
            raise ExportError(
                f"a sample of {config.context} tokens takes more than the {FRAME_LIMIT} bytes of a "
                "frame to a stage: evaluate what `planaria export --join` writes"
            )
        samples, apart = options.samples, config.block_causal
        portion = Portion(options.data, options.split, config.context, samples, apart)
        losses: deque[asyncio.Task[float]] = deque()
        total = 0.0
        try:
            starts = range(0, portion.count, rows)
            for first in track(starts, "evaluating", len(starts)):
                if len(losses) > config.stages + 1:  # each stage has work
                    total += await losses.popleft()
                shown = await asyncio.to_thread(portion.rows, first, rows)
                losses.append(asyncio.create_task(stages.loss(*shown)))
            for loss in losses:
                total += await loss
        finally:
            for loss in losses:
                loss.cancel()
            await asyncio.gather(*losses, return_exceptions=True)
        return stages.step, portion.evaluation(total)


def check_data(run: RunFile, data: Path) -> None:
    """Check that data to evaluate on has the run's tokenizer, if known. Raises CorpusError."""
    index = read_index(data)
    if problem := index.misfit(data, "", run.model.vocabulary):
        raise CorpusError(f"{data} {problem}")
    if index.content not in {run.data.content, *(corpus.content for corpus in run.data.corpora)}:
        log.warning("%s isn't the run's data: its tokenizer may be another one", data)
