"""Text that a run's stages generate during training, to show its progress.

The driver's node does it, like `planaria generate --join`, but over its own links. The step
transaction is independent of it. If a loss interrupts a text, it is begun again at the next commit,
by the driver of that time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tokenizers import Tokenizer

from planaria.node.data.mixture import Data
from planaria.node.hugging_face.export import ExportError
from planaria.node.hugging_face.generate import Sampling, continuation
from planaria.node.hugging_face.living_run import Access
from planaria.node.hugging_face.through_swarm import LivingStages
from planaria.node.report.events import Sampled
from planaria.node.run_file import RunFile

log = logging.getLogger(__name__)

AT_A_TIME: Final = 3
"""Concurrent prompts: while a stage computes one, other stages compute the rest."""
TRIES: Final = 3
"""Attempts per occasion; attempts that a view change ended don't count."""


class Occasions:
    """Schedule of generated texts: pure. Failed ones are tried again at a later commit."""

    def __init__(self, every: int, tries: int = TRIES) -> None:
        self._every, self._tries = every, tries
        self.newest = 0  # newest step with samples due
        self._left = 0  # attempts left

    def committed(self, step: int) -> None:
        """Note a commit of a step; repeats have no effect."""
        if self._every and step % self._every == 0 and step != self.newest:
            self.newest, self._left = step, self._tries

    @property
    def due(self) -> bool:
        return self._left > 0

    def made(self, occasion: int) -> None:
        """Note that texts were generated, if this is still the newest occasion."""
        if occasion == self.newest:
            self._left = 0

    def failed(self) -> None:
        self._left = max(0, self._left - 1)


class Sampler:
    """Generates texts during training, while its node is the driver's."""

    def __init__(
        self,
        run: RunFile,
        tokenizer: Tokenizer,
        end: int | None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        tell: Callable[[Sampled], None],
    ) -> None:
        """`end`: the end-of-document token. `tell` gets each text as soon as it is complete."""
        self._prompts, how = run.training.prompts, run.training.sampling
        self._tokens = how.tokens
        self._sampling = Sampling(how.temperature, how.top_p, how.seed)
        self._tokenizer, self._end = tokenizer, end
        self._spawn, self._tell = spawn, tell
        self._occasions = Occasions(run.training.sample_every)
        self._step = 0  # the newest
        self._making: asyncio.Task[None] | None = None

    def committed(self, step: int, access: Access) -> None:
        """Begin texts that are due; called at each commit while this node is the driver's."""
        self._step = step
        self._occasions.committed(step)
        if self._occasions.due and (self._making is None or self._making.done()):
            self._making = self._spawn(self._make_due(access))

    def view_changed(self) -> None:
        """Cancel texts in progress at a view change: they may wait for a lost node."""
        if self._making is not None:
            self._making.cancel()

    async def _make_due(self, access: Access) -> None:
        well = True
        while well and self._occasions.due:
            occasion, step = self._occasions.newest, self._step
            try:
                await self._make_texts(step, access)
            except* (ExportError, ValueError) as errors:
                well = False
                log.warning("no samples at step %d: %s", step, errors.exceptions[0])
            if well:
                self._occasions.made(occasion)
            else:
                self._occasions.failed()

    async def _make_texts(self, step: int, access: Access) -> None:
        turns = asyncio.Semaphore(AT_A_TIME)

        async def go_on(prompt: str) -> None:
            async with turns, LivingStages(access) as stages:
                speaker = stages.speaker(self._tokenizer, self._end)
                parts = continuation(speaker, prompt, self._tokens, self._sampling)
                text = await asyncio.to_thread("".join, parts)
                self._tell(Sampled(step=step, prompt=prompt, text=text))

        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts:
                group.create_task(go_on(prompt))


def sampler_of(
    run: RunFile,
    corpus: Data | None,
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    tell: Callable[[Sampled], None],
) -> Sampler | None:
    """A node's generator of texts; None: no corpus, or none are wanted. Raises CorpusError."""
    if corpus is None or not run.training.sample_every:
        return None
    return Sampler(run, corpus.tokenizer(), corpus.index.end_of_document, spawn, tell)
