"""The run file's settings for the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from planaria.recovery.policy import Policy

SLOWEST: Final = 100e3
"""Bytes per second at which a state comes at least; more slowly, that is no progress."""


@dataclass(frozen=True)
class TransactionRules:
    """What the run file sets for drivers: training length, steps, and what is done about losses."""

    stages: int  # body stages, L
    steps: int
    microbatches: int
    validation_microbatches: int
    validate_every: int  # steps; 0: only at the end
    clip: float
    policy: Policy
    strict: bool  # stop where the policy can't serve
    masking: bool  # whether attempts go on without lost replicas
    relearn: bool  # whether stages that were rebuilt inexactly relearn
    progress: float  # seconds without progress before an attempt is given up
    lr_scale: Callable[[int, int], float]  # (step, boosted_at) -> factor
    adapters: bool = False  # whether only adapters are trained, beside checkpoint weights
    single_waits: bool = False  # whether a single stage waits for a lost node's save, too
    relearn_seconds: float = 20.0  # maximum, while all others wait
    tokens: int = 1 << 31  # maximum tokens of a microbatch
    state_bytes: int = 1 << 50  # that a rebuild fetches, at most
    spot_check: float = 0.0  # share of visits computed twice, at stages with replicas
    tolerance: float = 0.05  # relative difference between correct nodes' results, at most
    audits: bool = False  # whether sums of gradients are audited
    exclude: bool = False  # whether those who fail audits are excluded
