"""A model computed with where it is trained: each stage looks at what the one before has made.

It goes from stage to stage by way of here, since nobody there knows of it. Nothing is kept between
two tokens, and training comes first: a stage looks when it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import Credentials
from planaria.node.data.corpus import CorpusError, load_tokenizer
from planaria.node.hugging_face.export import ExportError
from planaria.node.hugging_face.from_saves import vocabulary_of
from planaria.node.hugging_face.generate import Sampling, Speaker, texts
from planaria.node.hugging_face.living_run import Access, LivingRun, from_outside
from planaria.node.naming import node_of
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.asking import NoAnswerError
from planaria.node.wire.frames import Frame, WireError
from planaria.node.wire.onlookers import FRAME_LIMIT
from planaria.node.wire.tensors import decode, encode


class LivingStages(LivingRun):
    """The stages of a run, as they are at the moment. Used within `async with`."""

    def __init__(self, access: Access, wait: float | None = None) -> None:
        """`wait`: as of one step that they have committed (see LivingRun). Raises ExportError."""
        super().__init__(access, wait)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Frame]]] = {}

    async def __aexit__(self, *of: object) -> None:
        await super().__aexit__(*of)
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(NoAnswerError("the conversation is over"))

    @property
    def context(self) -> int:
        """Tokens that the model looks at, as far as what is made of them fits into a frame."""
        return min(self.config.context, FRAME_LIMIT // (4 * self.config.dim))

    async def logits(self, tokens: Tensor) -> Tensor:
        """Of what follows the last token: int64 [1, T], T at most `context`, to float32
        [vocabulary]. Raises ExportError."""
        x = tokens
        for stage in range(self.config.stages + 1):
            x = await self._look(stage, x)
            if x.dtype != torch.float32 or x.shape != (1, tokens.shape[1], self.config.dim):
                raise ExportError(f"stage {stage} has made {x.dtype} {list(x.shape)} of it")
        x = await self._look(0, x, head=True)
        if x.dtype != torch.float32 or x.shape != (1, 1, self.config.vocabulary):
            raise ExportError(f"the head has made {x.dtype} {list(x.shape)} of it")
        return x[0, 0]

    def speaker(self, tokenizer: Tokenizer, end: int | None) -> Speaker:
        """For a thread that isn't the event loop's."""

        def next_logits(known: Tensor) -> Tensor:
            return asyncio.run_coroutine_threadsafe(self.logits(known), self.loop).result()

        return Speaker(next_logits, tokenizer, end, self.config.vocabulary, self.context)

    async def _look(self, stage: int, x: Tensor, head: bool = False) -> Tensor:
        """By the first of the stage's seats that answers. Raises ExportError."""
        while True:
            seat = self.seats[stage][0]
            try:
                return await self._shown(seat, x, head)
            except NoAnswerError as error:
                self.give_up(seat, str(error))

    async def _shown(self, seat: str, x: Tensor, head: bool) -> Tensor:
        """Raises NoAnswerError."""
        number, progress = next(self._numbers), self.run.swarm.progress
        answer: asyncio.Future[Frame] = self.loop.create_future()
        fields = {"transfer": number, "head": head, "step": self.step}
        self._waiting[number] = seat, answer
        try:
            if not self.asking.send(seat, Frame("state", NEVER, fields, *encode([x], "none"))):
                raise NoAnswerError(self.asking.why(seat))
            async with asyncio.timeout(progress):
                frame = await answer
            if error := frame.fields.get("error"):
                raise NoAnswerError(f"{node_of(seat)}: {error}")
            (tensor,) = decode(frame.descriptors, frame.payload)
        except TimeoutError:
            raise NoAnswerError(f"{node_of(seat)}: nothing in {progress:g} s") from None
        except (WireError, ValueError) as error:
            raise NoAnswerError(f"{node_of(seat)} sent what can't be: {error}") from error
        finally:
            del self._waiting[number]
        return tensor

    def answered(self, seat: str, item: pb.Message | Frame) -> None:
        if not isinstance(item, Frame):
            return
        number: Any = item.fields.get("transfer")
        asked, answer = self._waiting.get(number, ("", None)) if type(number) is int else ("", None)
        if answer is not None and asked == seat and not answer.done():
            answer.set_result(item)

    def lost(self, seat: str, why: str) -> None:
        for asked, answer in self._waiting.values():
            if asked == seat and not answer.done():
                answer.set_exception(NoAnswerError(why))


async def speak(
    client: RegistryClient,
    credentials: Credentials,
    data: Path | None,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    say: Callable[[str], None],
) -> None:
    """`say` gets what follows the prompt, piece by piece. `data`: a prepared folder of the run's,
    with the tokenizer, if not where its run file says. Raises ExportError, CorpusError,
    ValueError, and what `client` does."""
    async with LivingStages(from_outside(await client.describe(), credentials)) as stages:
        vocabulary = vocabulary_of(stages.run, data)
        if vocabulary is None:
            raise CorpusError("without a tokenizer there is no text: name the prepared data")
        tokenizer = load_tokenizer(vocabulary.file)
        speaker = stages.speaker(tokenizer, vocabulary.end_of_document)

        def go_on() -> None:
            for text in texts(speaker, prompt, tokens, sampling):
                say(text)

        await asyncio.to_thread(go_on)
