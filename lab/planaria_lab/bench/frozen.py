"""Memory of nodes that train adapters beside frozen weights, over the plan's forecast.

`python -m planaria_lab.bench.frozen [--context TOKENS]`. A registry and three processes train some
steps. The models have the shapes of SmolLM2-135M and TinyLlama-1.1B, random weights in bf16, and a
base in bf16 or nf4. What is compared is the peak memory of each node (VmHWM) without that of its
libraries. The latter is the peak of a node of the same stage of a tiny model, less the plan's
forecast for it. Nodes have MALLOC_MMAP_THRESHOLD_ set: without it, glibc's heap may keep half as
much again in unused fragments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.data.tokenizer import TOKENIZER
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.model.checkpoint import INDEX
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.large import MB, high_water
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import swarm
from planaria_lab.planning.memory import needed, whole

RUN: Final = """
name = "frozen"
steps = 2
[model]
stages = 2
[training]
batch = 2
microbatch = 1
precision = "bf16"
validation_microbatches = 0
[training.lora]
"""
MEASURED: Final = ("SmolLM2-135M", "TinyLlama-1.1B")
SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "TinyLlama-1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
    "Llama-3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}
BASES: Final = ("nf4", "bf16")


def written(figures: dict[str, Any], data: Path, folder: Path) -> Path:
    """Write a model with random weights in bf16, tensor by tensor, and the data's tokenizer to the
    folder; return the folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**figures)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    files = {}
    for name, parameter in model.named_parameters():
        values = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if values.dim() > 1:
            values.normal_(std=config.initializer_range)
        files[name] = f"{name}.safetensors"
        save_file({name: values}, folder / files[name])
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    shutil.copy(data / TOKENIZER, folder)
    return folder


def most(run: RunFile, out: Path) -> dict[int, int]:
    """Train a run; return the peak bytes of each stage's node until the last step."""
    nodes = {f"{stage}.0": ["node", "--stage", str(stage)] for stage in range(3)}
    nodes = {slot: [*words, "--threads", "1", "--seats", "1"] for slot, words in nodes.items()}
    highest = dict.fromkeys(range(3), 0)
    with swarm(run, run_planaria, out, nodes, mortal=nodes) as look:
        while not (lines := look()) or lines[-1]["step"] < run.steps:
            for slot, process in look.processes.running().items():
                if slot in nodes:
                    stage = int(slot[0])
                    highest[stage] = max(highest[stage], high_water(process))
            time.sleep(0.2)
    return highest


def compare(run: RunFile, folder: Path, out: Path, base: str, libraries: dict[int, float]) -> None:
    """Train a model, and print and keep a row for each stage. `libraries`: bytes of the libraries,
    by stage."""
    resolved = resolve(override(run, model__from=str(folder), training__lora__base=base))
    for stage, taken in most(resolved, out).items():
        parts = needed(resolved, resolved.config, stage, [1, 1, 1], narrow=True)
        plan, own = whole(parts).both, taken - libraries[stage]
        keep(
            "frozen",
            model=folder.name,
            base=base,
            stage=stage,
            context=resolved.config.context,
            bytes=taken,
            libraries=libraries[stage],
            planned=plan,
            parts={name: size.both for name, size in parts.items()},
        )
        print(
            f"| {folder.name} | {base} | {stage} | {own / MB:,.0f} | {plan / MB:,.0f} | "
            f"{own / plan:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(SHIPPED)], vocabulary=2048), out / "data")
        run = override(loads(RUN), data__path=str(out / "data"))
        small = written(SMALL, out / "data", out / "small")
        print("| model | base | stage | MB | plan | ratio |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for base in BASES:
            tiny = override(
                run, model__from=str(small), model__context=32, training__lora__base=base
            )
            tiny = resolve(tiny)
            taken = most(tiny, out / f"small-{base}")
            libraries = {
                stage: size - whole(needed(tiny, tiny.config, stage, [1, 1, 1], narrow=True)).both
                for stage, size in taken.items()
            }
            for name in MEASURED:
                folder = out / name
                if not folder.exists():
                    written(MODELS[name], out / "data", folder)
                longer = override(run, model__context=options.context)
                compare(longer, folder, out / f"{name}-{base}", base, libraries)


if __name__ == "__main__":
    main()
