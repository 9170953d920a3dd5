"""Tokens per second of a swarm under TLS over those of a swarm in plain text. Also, the share of
the nodes' processor time for signatures.

Both swarms train at the same time, so that other load of the machine is the same for both.
Meanwhile each node writes the time that it took to make and check signatures.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from planaria.bootstrap import identity
from planaria.bootstrap.identity import Identity
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Lines, swarm

STAGES, REPLICAS = 2, 2
ROUNDS, SECONDS = 9, 10.0
FIRST: Final = 10  # steps that aren't measured
AS_FAST, SIGNING = 0.90, 0.01  # goals: ratio of tokens per second, share of signatures
COUNTED: Final = "signatures"
ALONE: Final = ("--save-dir", "none", "--cloud", "none")
Look = Callable[[], Lines]
"""Returns the ledger's lines of a swarm so far."""
RUN: Final = f"""
name = "trust"
steps = 1000000
[model]
preset = "mini"
stages = {STAGES}
[training]
optimizer = "adamw"
batch = 32
microbatch = 4
validation_microbatches = 0
[swarm]
replicas = {REPLICAS}
start_grace = 2
"""

# -- signatures ------------------------------------------------------------------------------------


class Spent:
    """Counts of the signatures that this process made and checked, and their processor time."""

    def __init__(self) -> None:
        self.signed = self.checked = 0
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - began

    def count(self) -> None:
        """Count from now on all signatures that bootstrap/identity.py makes or checks."""
        sign, content = Identity.sign, identity._serialized

        def signing(own: Identity, purpose: str, *parts: bytes) -> bytes:
            self.signed += 1
            with self.timed():
                return sign(own, purpose, *parts)

        def contained(message: Any) -> bytes:
            with self.timed():
                return content(message)

        class Checked:
            """A public key whose checks are counted."""

            @staticmethod
            def from_public_bytes(public: bytes) -> Checked:
                return Checked(public)

            def __init__(self, public: bytes) -> None:
                self.public = public

            def verify(checked, signature: bytes, data: bytes) -> None:  # noqa: N805
                self.checked += 1
                with self.timed():
                    Ed25519PublicKey.from_public_bytes(checked.public).verify(signature, data)

        for place, name, counted in (
            (Identity, "sign", signing),
            (identity, "_serialized", contained),
            (identity, "Ed25519PublicKey", Checked),
        ):
            setattr(place, name, counted)

    def write(self, file: Path) -> None:
        """Append the totals to the file twice a second, for ever."""
        with file.open("a") as lines:
            while True:
                totals = time.time(), time.process_time(), self.seconds, self.signed, self.checked
                lines.write(json.dumps(totals) + "\n")
                lines.flush()
                time.sleep(0.5)


def run_counted(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`. Of a node, count the signatures, and write the totals to a file
    beside its log."""
    if arguments[0] == "node":
        spent = Spent()
        spent.count()
        file = Path(arguments[arguments.index("--out") + 1]) / f"{COUNTED}-{os.getpid()}"
        threading.Thread(target=spent.write, args=(file,), daemon=True).start()
    run_planaria(arguments)


class Signed(NamedTuple):
    """The signatures of all nodes in a period."""

    share: float  # share of the nodes' processor time
    per_step: float  # signatures made and checked per step


def signed_in(folder: Path, began: float, steps: int) -> Signed:
    """Sum up the signatures since `began`, in which `steps` steps were committed."""
    sums = [0.0] * 4
    for file in folder.glob(f"{COUNTED}-*"):
        whole = file.read_text().rpartition("\n")[0]
        totals = [line for line in map(json.loads, whole.splitlines()) if line[0] >= began]
        ends = totals[0][1:], totals[-1][1:]
        sums = [a + last - first for a, first, last in zip(sums, *ends, strict=True)]
    processor, seconds, signed, checked = sums
    return Signed(seconds / processor, (signed + checked) / steps)


# -- tokens a second -------------------------------------------------------------------------------


def measure_swarms(run: RunFile, out: Path) -> tuple[list[float], Signed]:
    """Measure in each round tokens per second under TLS over those in plain text, and meanwhile the
    signatures of the nodes under TLS."""
    nodes = {
        f"{stage}.{replica}": ["node", "--stage", str(stage), "--threads", "1", *ALONE]
        for stage in range(STAGES + 1)
        for replica in range(REPLICAS)
    }
    with ExitStack() as stack:
        looks = [
            stack.enter_context(swarm(run, run_counted, out / kind, nodes, tls=kind == "tls"))
            for kind in ("plain", "tls")
        ]
        began, ratios = compare(*looks)
        steps = sum(line["time"] >= began for line in looks[1]())
        return ratios, signed_in(out / "tls" / "logs", began, steps)


def compare(reference: Look, other: Look) -> tuple[float, list[float]]:
    """Return when the measurement began, and for each round the tokens per second of `other` over
    those of `reference`."""
    while min(len(reference()), len(other())) < FIRST:
        time.sleep(0.2)
    began, ratios = time.time(), []
    for _ in range(ROUNDS):
        since = time.time()
        time.sleep(SECONDS)
        ratios.append(_rate(other(), since) / _rate(reference(), since))
    return began, ratios


def _rate(lines: Lines, since: float) -> float:
    """Return the tokens per second from the first commit after `since` on."""
    first, *others = [line for line in lines if line["time"] >= since]
    return float(sum(line["tokens"] for line in others) / (others[-1]["time"] - first["time"]))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        run = resolve(override(loads(RUN), data__path=str(folder / "data")))
        ratios, signed = measure_swarms(run, folder)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"ratio of tokens/s under TLS / in plain text: {middle:.3f} (quartiles {low:.3f} to "
        f"{high:.3f}; goal {AS_FAST})"
    )
    print(
        f"signatures: {signed.per_step:.1f} made or checked in a step by {(STAGES + 1) * REPLICAS} "
        f"nodes, {signed.share:.3%} of their processor time (goal: under {SIGNING:.0%})"
    )
    keep("trust", ratios=ratios, **signed._asdict())


if __name__ == "__main__":
    main()
