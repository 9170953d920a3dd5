"""A table of families of decoders in transformers, and whether they compute the same in stages:
`python -m planaria_lab.bench.decoders [FAMILY ...]`.

Each model is first computed whole and cut into stages. Then a swarm trains it twice: from weights
and from a config. Both runs lose a stage, and are exported; transformers and planaria compute
logits from each export. A row has the largest differences, relative to the largest value.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch

from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.launch.resolve import SHIPPED
from planaria.node.model.decoder import Decoder
from planaria.node.model.decoder_trial import sees_too_much, small_model, whole_and_cut
from planaria_lab.bench.rows import keep

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW: Final = {"sliding_window": 16}
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {**WINDOW, "head_dim": 16},
    "phi3": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "smollm3": {},
    "glm4": {"head_dim": 16},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "gpt2": {},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**WINDOW, "head_dim": 16},
    "cohere2": WINDOW,
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "gpt_neox": {},
    "starcoder2": {},
    "nemotron": {},
    "exaone4": WINDOW,
    "lfm2": {},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
STAGES: Final = 3
COLUMNS: Final = "family", "logits", "gradients", "packed", "from", "exported", "config", "exported"
RUN: Final = """
steps = 6
[data]
path = {data}
[model]
{key} = {folder}
stages = 3
context = 32
[training]
optimizer = "adamw"
batch = 4
"""


class Outcome(NamedTuple):
    """The method by which the lost stage was rebuilt, and the difference of the export's logits
    between planaria and transformers."""

    method: str
    exported: float


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(FAMILIES)
    print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|")
    with TemporaryDirectory() as folder:
        work = Path(folder)
        data = work / "prose"
        _command("data", "prepare", str(SHIPPED), "--out", str(data), "--vocabulary", "512")
        for family in chosen:
            cells = list(row(family, work / family, data))
            print("| " + " | ".join((family, *cells)) + " |", flush=True)
            keep("decoders", family=family, cells=cells)


def row(family: str, work: Path, data: Path) -> Iterator[str]:
    """Yield the cells of a family's row, without its name."""
    content = {"model_type": family, **SIZES, **FAMILIES[family]}
    decoder = Decoder(json.dumps(content))
    cut = [decoder.layers // STAGES] * STAGES
    alone = whole_and_cut(decoder, cut, block_causal=False)
    yield f"{alone.logits:.0e}"
    yield f"{alone.gradients:.0e}"
    packed = whole_and_cut(decoder, cut, block_causal=True)
    apart = sees_too_much(small_model(decoder), block_causal=True) < 1e-5
    yield f"{max(packed[:2]):.0e}" if apart else "not kept apart"
    small_model(decoder, {}).save_pretrained(work / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (data / name).exists():
            (work / "model" / name).write_bytes((data / name).read_bytes())
    for key in ("from", "config"):
        outcome = heal(work / key, work / "model", key, data)
        yield outcome.method
        yield f"{outcome.exported:.0e}"


def heal(out: Path, folder: Path, key: str, data: Path) -> Outcome:
    """Train with a loss of stage 2 after step 3, and export. Raises SystemExit."""
    out.mkdir()
    file = out / "run.toml"
    file.write_text(RUN.format(data=json.dumps(str(data)), key=key, folder=json.dumps(str(folder))))
    run = str(out / "run")
    _command("up", str(file), "--kill", "2@3", "--out", run, "--oversubscribe")
    _command("export", run, "--out", str(out / "model"))
    rebuilds = json.loads((out / "run/summary.json").read_text())["rebuilds"]
    return Outcome(rebuilds[0]["method"], difference(out / "model"))


@torch.no_grad()
def difference(folder: Path) -> float:
    """Return the largest difference between the logits that transformers and planaria compute from
    an exported folder, relative to the largest logit."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3, 35)[None]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    theirs = model.eval()(tokens).logits
    ours = WholeModel.load(folder, torch.device("cpu")).logits(tokens)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _command(*arguments: str) -> None:
    """Run `planaria`. Raises SystemExit with the last line of its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "planaria", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        raise SystemExit(f"planaria {' '.join(arguments)}: {lines[-1] if lines else 'failed'}")


if __name__ == "__main__":
    main()
