"""The small run that the swarms of these tests train, each with its own changes."""

from __future__ import annotations

from typing import Any

from planaria.node.run_file import RunFile, loads, override

SMALL = loads("""
steps = 8
[model]
preset = "tiny"
dim = 32
context = 32
[training]
optimizer = "adamw"  # Muon rounds to steps of 2^-11, so that a last digit may count
batch = 4
microbatch = 1
warmup = 5
validation_microbatches = 2
[wire]  # so that losses compare to the last digits
activations = "none"
gradients = "none"
""")


def small(stages: int | list[int] = 2, replicas: int = 1, **changes: Any) -> RunFile:
    """Return the run, with one layer per stage or as listed; `changes` are as for `override`."""
    changes = {"model__layers": stages if isinstance(stages, int) else sum(stages)} | changes
    return override(SMALL, model__stages=stages, swarm__replicas=replicas, **changes)
