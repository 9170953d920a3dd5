"""Memory that a node needs while it loads a stage with a frozen base: `OUT=lab/results/loading
python -m planaria_lab.bench.loading [BASE]...`.

The stage has four layers of TinyLlama-1.1B with random weights, and adapters of rank 16. It is
loaded from folders in bf16, in float32 and in bitsandbytes' nf4, and from another process by a
link. The rise is the peak resident memory of a process while it makes the stage (VmHWM, reset
before), less its memory before. By then it has loaded a small model in the same way, so its
libraries are loaded. The process that sends the stage has the bf16 folder and serves stage 0; its
rise is measured, too.

Goal: 1.2 times the base, plus its largest tensor as stored, plus the adapters with their gradient
and moments.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, get_args

import torch
import uvloop

from planaria.node.hugging_face.begin_from_model import with_model_here
from planaria.node.model.checkpoint import Checkpoint, Place
from planaria.node.model.dequantized import KINDS, Quantized
from planaria.node.model.modules import empty_stage
from planaria.node.model.quantized import size_of, slots
from planaria.node.model.shape import Base, ModelConfig, named_shapes
from planaria.node.run_file import RunFile, dumps, loads, override
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.torch_stage import TorchStage
from planaria.node.state.stage_state import Age
from planaria.node.state.transfer import WEIGHTS, WantedState
from planaria.node.wire.link import teach_malloc
from planaria.node.wire.link_table import Peer
from planaria.recovery.facts import ORIGIN
from planaria_lab.bench.copying import KEY
from planaria_lab.bench.fetching import DEADLINE, JOINER, VALUE, _Node
from planaria_lab.bench.frozen import MODELS, SMALL
from planaria_lab.bench.rows import keep

MIB: Final = 1 << 20
RUN: Final = """
name = "loading"
[model]
stages = 1
context = 128
[training]
batch = 1
microbatch = 1
validation_microbatches = 0
[training.lora]
rank = 16
"""
LARGE: Final = {**MODELS["TinyLlama-1.1B"], "num_hidden_layers": 4, "vocab_size": 2048}
FOLDERS: Final = {"bf16": torch.bfloat16, "float32": torch.float32, "nf4": torch.bfloat16}
FORK: Final = multiprocessing.get_context("fork")
GIVER, HOST, GOAL = "giver", "127.0.0.1", 1.2


def write(figures: dict[str, Any], kind: str, folder: Path) -> None:
    """Write a model with random weights to the folder."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**figures))
    model.to(FOLDERS[kind]).save_pretrained(folder)
    if kind == "nf4":
        config: Any = BitsAndBytesConfig
        how = config(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cpu", quantization_config=how
        )
        model.save_pretrained(folder)


def status(figure: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    match = re.search(rf"^{figure}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) << 10


def begin() -> int:
    """Set the allocator up as in a node, reset VmHWM, and return the memory of this process in
    bytes."""
    teach_malloc()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def made(text: str, from_folder: bool, stage: int = 1) -> TorchStage:
    """Make a stage as a node does, with weights only if `from_folder`. `text`: the run file."""
    run = loads(text)
    checkpoint = Checkpoint.open(Path(run.model.origin or "")) if from_folder else None
    beginning = InitialStages(run, run.config, checkpoint)
    return TorchStage(stage, beginning, torch.device("cpu"))


def from_folder(small: str, large: str) -> int:
    made(small, True)
    before = begin()
    stage = made(large, True)
    rise = status("VmHWM") - before
    del stage
    return rise


def give(small: str, large: str, pipe: Connection) -> None:
    uvloop.run(_give([made(text, True, stage=0) for text in (small, large)], pipe))


async def _give(stages: list[TorchStage], pipe: Connection) -> None:
    node = _Node(GIVER)
    pipe.send(await node.links.start(f"{HOST}:0"))
    node.links.set_peers(1, [Peer(JOINER, "", KEY.public)], [JOINER])
    for stage in stages:
        before = begin()
        node.state = stage.checkpoint_state(1)
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        rise = status("VmHWM") - before
    pipe.send(rise)
    await node.stop()


def take(small: str, large: str, port: int, giver: Connection) -> int:
    return uvloop.run(_take([small, large], port, giver))


async def _take(texts: list[str], port: int, giver: Connection) -> int:
    node = _Node(JOINER)
    node.links.set_peers(1, [Peer(GIVER, f"{HOST}:{port}", KEY.public)], [GIVER])
    while GIVER not in node.links.peers:  # noqa: ASYNC110 (as in fetching)
        await asyncio.sleep(0.05)
    stages = []
    for text in texts:
        await asyncio.to_thread(giver.recv)
        before = begin()
        stages.append(await node.exchanges.outcome(_fetched(node, text)))
        rise = status("VmHWM") - before
        giver.send("next")
    await node.stop()
    return rise


async def _fetched(node: _Node, text: str) -> TorchStage:
    stage = await node.exchanges.compute(partial(made, text, False))
    wanted = WantedState(1, Age(0, 0), {WEIGHTS: stage.lacking}, kind=ORIGIN)
    weights = (await node.client.fetch(wanted, [GIVER], DEADLINE)).state.tensors[WEIGHTS]
    await node.exchanges.compute(partial(stage.take_frozen_weights, weights, GIVER))
    return stage


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `work` in a new process. All work runs so, which keeps the heap of this
    process small."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(work(*arguments)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def from_peer(small: str, large: str) -> tuple[int, int]:
    """Return the rises of the process that makes the stage, and of the process that sends it."""
    here, other_end = FORK.Pipe()
    process = FORK.Process(target=give, args=(small, large, other_end))
    process.start()
    other_end.close()
    try:
        return apart(take, small, large, here.recv(), here), here.recv()
    finally:
        process.join()


def sizes(config: ModelConfig, checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the bytes of stage 1's base, and of its largest tensor in its file."""
    packed = 4 * sum(map(size_of, slots(empty_stage(config, 1))))
    return packed, max(stored(checkpoint.places[name]) for name in named_shapes(config, 1))


def stored(place: Place) -> int:
    codes = place.codes if isinstance(place, Quantized) else place
    return codes.size * KINDS[codes.kind].itemsize


def compare(run: RunFile, origin: str, rise: int, giver: int | None = None) -> None:
    """Print and keep a row. `giver`: the rise of the process that sends the stage."""
    config, base = run.config, run.training.lora and run.training.lora.base
    packed, largest = sizes(config, Checkpoint.open(Path(run.model.origin or "")))
    state = config.state_bytes(1) + VALUE * config.trained_in(1)
    goal = GOAL * packed + largest + state
    figures = {"packed": packed, "largest": largest, "adapters": state, "rise": rise}
    keep("loading", base=base, origin=origin, **figures, goal=round(goal), giver=giver)
    cells = " | ".join(f"{value / MIB:,.0f}" for value in (*figures.values(), goal))
    given = "" if giver is None else f"{giver / MIB:,.0f}"
    print(f"| {base} | {origin} | {cells} | {rise / goal:.2f} | {given} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print("| base | from | base, MiB | largest | adapters | rise | goal | rise / goal | giver |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as directory:
        for kind in FOLDERS:
            folders = [Path(directory, kind, size) for size in ("small", "large")]
            for figures, folder in zip((SMALL, LARGE), folders, strict=True):
                apart(write, figures, kind, folder)
            for base in sys.argv[1:] or get_args(Base):
                small, large = (apart(taken_in, folder, base) for folder in folders)
                compare(loads(large), kind, apart(from_folder, small, large))
                if kind == "bf16":
                    compare(loads(large), "peer", *from_peer(small, large))


def taken_in(folder: Path, base: str) -> str:
    """Return the text of a run file for a run that begins from the folder."""
    changes = {"model__from": str(folder), "training__lora__base": base}
    run = override(loads(RUN), **changes)
    return dumps(with_model_here(run))


if __name__ == "__main__":
    main()
