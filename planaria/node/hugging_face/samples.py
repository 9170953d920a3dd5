"""Text that a run's own stages make while it is trained, so that one sees it learn.

The driver's node does it, as `planaria generate --join` would, but by its own links. The step
transaction knows nothing of it: nobody waits for a text, and when one can't be finished, because
somebody was lost, it is begun again with the next commit, by whoever drives then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tokenizers import Tokenizer

from planaria.node.hugging_face.export import ExportError
from planaria.node.hugging_face.generate import Sampling, texts
from planaria.node.hugging_face.living_run import Access
from planaria.node.hugging_face.through_swarm import LivingStages
from planaria.node.report.events import Sampled
from planaria.node.run_file import RunFile

log = logging.getLogger(__name__)

AT_A_TIME: Final = 3
"""Prompts that are gone on from: while a stage looks at one, others look at the rest."""
TRIES: Final = 3
"""Of one occasion, but for those that a new view has ended."""


class Occasions:
    """When samples are due: pure. Those that can't be made are tried again with a later commit."""

    def __init__(self, every: int, tries: int = TRIES) -> None:
        self._every, self._tries = every, tries
        self.newest = 0  # step for which some were due
        self._left = 0  # tries that it has

    def committed(self, step: int) -> None:
        """It may be said several times."""
        if self._every and step % self._every == 0 and step != self.newest:
            self.newest, self._left = step, self._tries

    @property
    def due(self) -> bool:
        return self._left > 0

    def made(self, occasion: int) -> None:
        """Of what was the newest one then."""
        if occasion == self.newest:
            self._left = 0

    def failed(self) -> None:
        self._left = max(0, self._left - 1)


class Sampler:
    """What one node does of it, while it drives the run."""

    def __init__(
        self,
        run: RunFile,
        tokenizer: Tokenizer,
        end: int | None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        tell: Callable[[Sampled], None],
    ) -> None:
        """`end`: the token that ends a document. `tell` gets each text, as soon as it is made."""
        self._prompts, how = run.training.prompts, run.training.sampling
        self._tokens = how.tokens
        self._sampling = Sampling(how.temperature, how.top_p, how.seed)
        self._tokenizer, self._end = tokenizer, end
        self._spawn, self._tell = spawn, tell
        self._occasions = Occasions(run.training.sample_every)
        self._step = 0  # the newest
        self._making: asyncio.Task[None] | None = None

    def committed(self, step: int, access: Access) -> None:
        """While this node is the driver's."""
        self._step = step
        self._occasions.committed(step)
        if self._occasions.due and (self._making is None or self._making.done()):
            self._making = self._spawn(self._make_due(access))

    def viewed(self) -> None:
        """Somebody has gone, or come: what is under way may wait for nobody."""
        if self._making is not None:
            self._making.cancel()

    async def _make_due(self, access: Access) -> None:
        well = True
        while well and self._occasions.due:
            occasion, step = self._occasions.newest, self._step
            try:
                await self._make(step, access)
            except* (ExportError, ValueError) as errors:
                well = False
                log.warning("no samples at step %d: %s", step, errors.exceptions[0])
            if well:
                self._occasions.made(occasion)
            else:
                self._occasions.failed()

    async def _make(self, step: int, access: Access) -> None:
        turns = asyncio.Semaphore(AT_A_TIME)

        async def go_on(prompt: str) -> None:
            async with turns, LivingStages(access) as stages:
                speaker = stages.speaker(self._tokenizer, self._end)
                parts = texts(speaker, prompt, self._tokens, self._sampling)
                text = await asyncio.to_thread("".join, parts)
                self._tell(Sampled(step=step, prompt=prompt, text=text))

        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts:
                group.create_task(go_on(prompt))
