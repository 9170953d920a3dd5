"""What the run file says to the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planaria.recovery.decide import Policy
from planaria.recovery.masking import Masking


@dataclass(frozen=True)
class TransactionRules:
    """How far to train, by which steps, and what to do about a loss."""

    stages: int  # body stages, L
    steps: int
    microbatches: int
    validation_microbatches: int
    validate_every: int  # steps; 0: only at the end
    clip: float
    policy: Policy
    strict: bool  # stop where the policy can't serve
    masking: Masking
    relearn: bool  # what was rebuilt inexactly
    progress: float  # seconds without any before an attempt is given up
    lr_scale: Callable[[int, int], float]  # (step, boosted_at) -> factor
    adapters: bool = False  # are all that is trained, beside the weights of a checkpoint
    relearn_seconds: float = 20.0  # at most, while all others wait
    tokens: int = 1 << 31  # of a microbatch, at most
    spot_check: float = 0.0  # share of visits that are done twice, at stages with replicas
    tolerance: float = 0.05  # of what nodes make of the same, relative
    exclude: bool = False  # whose gradients stand out

    @property
    def swapped(self) -> bool:
        """Half of the microbatches visit the end stages in swapped order."""
        return self.policy == "checkfree+"
