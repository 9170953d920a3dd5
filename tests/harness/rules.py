"""Rules of a transaction, for tests that depend on few of them."""

from __future__ import annotations

from typing import Final

from planaria.node.transaction.rules import TransactionRules
from planaria.recovery.policy import POLICIES

RULES: Final = TransactionRules(
    stages=4,
    steps=100,
    microbatches=4,
    validation_microbatches=2,
    validate_every=0,
    clip=1.0,
    policy=POLICIES["checkfree"],
    strict=True,
    masking=True,
    relearn=False,
    progress=60.0,
    lr_scale=lambda step, boosted_at: 1.0,
)
