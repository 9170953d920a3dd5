"""How many samples each step has, where a run's batch has been changed."""

from __future__ import annotations

from typing import NamedTuple


class Batch(NamedTuple):
    """The batch of the steps up to `last`, in samples."""

    last: int
    samples: int
    microbatch: int


class Batches(NamedTuple):
    """The batch of each step, counted from 1: `samples`, but that of the first of `earlier`, which
    are in order, whose last step isn't past."""

    samples: int
    microbatch: int = 1
    earlier: tuple[Batch, ...] = ()

    def of(self, step: int) -> Batch:
        """The batch of a step; `last` is 0 where there is none."""
        for batch in self.earlier:
            if step <= batch.last:
                return batch
        return Batch(0, self.samples, self.microbatch)

    def until(self, step: int) -> int:
        """The number of samples in steps 1 to `step`, which is the position of the next one's."""
        total = done = 0
        for batch in self.earlier:
            steps = max(0, min(step, batch.last) - done)
            total, done = total + steps * batch.samples, done + steps
        return total + (step - done) * self.samples

    def changed(self, step: int, samples: int, microbatch: int) -> Batches:
        """With another batch behind `step`; what was to come behind it is forgotten."""
        kept = [batch for batch in self.earlier if batch.last < step]
        ending = Batch(step, *self.of(step)[1:])
        if step and ending[1:] != (samples, microbatch):
            kept.append(ending)
        return Batches(samples, microbatch, tuple(kept))
