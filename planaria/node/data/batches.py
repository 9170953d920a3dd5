"""How many samples each step has, where a run's batch has been changed."""

from __future__ import annotations

from typing import NamedTuple


class Batch(NamedTuple):
    """The batch size, in samples, of a run's steps up to `last`."""

    last: int
    samples: int
    microbatch: int


class Batches(NamedTuple):
    """The batch sizes of a run's steps, counted from 1: `samples`, or that of the first of
    `earlier` whose last step isn't past. `earlier` is in order."""

    samples: int
    microbatch: int = 1
    earlier: tuple[Batch, ...] = ()

    def at_step(self, step: int) -> Batch:
        """The batch size at a step; `last` is 0 where no change follows."""
        for batch in self.earlier:
            if step <= batch.last:
                return batch
        return Batch(0, self.samples, self.microbatch)

    def samples_until(self, step: int) -> int:
        """The number of samples in steps 1 to `step`, the position of the next step's first."""
        total = done = 0
        for batch in self.earlier:
            steps = max(0, min(step, batch.last) - done)
            total, done = total + steps * batch.samples, done + steps
        return total + (step - done) * self.samples

    def changed_after(self, step: int, samples: int, microbatch: int) -> Batches:
        """The batch sizes with another one after `step`, in place of later changes."""
        kept = [batch for batch in self.earlier if batch.last < step]
        ending = Batch(step, *self.at_step(step)[1:])
        if step and ending[1:] != (samples, microbatch):
            kept.append(ending)
        return Batches(samples, microbatch, tuple(kept))
