"""The model card (README.md) of an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile

LOADING = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
```
"""

HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- planaria
---

# {name}

A language model of {parameters:,} parameters, trained with planaria.
"""

OWN_HEAD = """\
---
tags:
- planaria
---

# {name}

A language model of {parameters:,} parameters, trained with planaria. Its architecture is code of
its own, which has to be there; its tensors are in `model*.safetensors`: those of a block as
`layers.N.` and the name that the code has for them, those of the ends under their own names.
"""

ADAPTERS = """\
---
base_model: {quoted}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- planaria
---

# {name}

Adapters of {parameters:,} parameters for {base}, trained with planaria.
The package `peft` adds them to the model:
"""


def model_card(
    run: RunFile,
    config: ModelConfig,
    step: int,
    doubt: str,
    summary: Mapping[str, Any],
    merged: bool = False,
    base: str = "",
) -> str:
    """Text of the model card. `doubt`: why it isn't the model as of the step, or empty. `summary`:
    the content of `summary.json`, or empty. `merged`: the adapters are in the weights. `base`: name
    of the model that the run began from."""
    training = run.training
    rows = {
        "steps": f"{step} of {run.steps}" + (f" ({doubt})" if doubt else ""),
        "tokens": f"{run.batches.samples_until(step) * config.context:,}",
        "batch": f"{training.batch} samples of {config.context} tokens",
        "data": f"content {run.data.content or 'unknown'}",
        "vocabulary": f"{config.vocabulary:,}",
        "layers": f"{config.layers}, of width {config.dim}, {config.heads} heads",
        "seed": str(run.seed),
    }
    own_code = config.own is not None and not config.own.decoder
    if config.own is not None and own_code:
        rows["code"] = f"{config.own.module}, of the digest {config.own.source}"
    if base:
        rows["began from"] = base
    if (lora := config.lora) is not None:
        rows["adapters"] = (
            f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.targets)}"
            + (f", beside a base in {lora.base}" if lora.base else "")
        )
    losses = summary.get("loss", {})
    for name, label in (("last", "loss, last step"), ("validation", "loss, validation")):
        if losses.get(name) is not None:
            rows[label] = f"{losses[name]:.4f} nats a token"
    # an export has no subspace
    head, count = OWN_HEAD if own_code else HEAD, replace(config, subspace=None).values_in
    if lora is not None and not merged:
        head, count = ADAPTERS, config.trained_in
    parameters = sum(map(count, range(config.stages + 1)))
    quoted = json.dumps(base, ensure_ascii=False)  # is YAML, too
    text = head.format(base=base, quoted=quoted, name=run.name, parameters=parameters)
    text += "" if head == OWN_HEAD else LOADING
    text += "\n| | |\n| --- | --- |\n"
    text += "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return text + _recoveries(summary.get("rebuilds", []))


def _recoveries(rebuilds: Sequence[Mapping[str, Any]]) -> str:
    if not rebuilds:
        return ""
    rows = "".join(
        f"| {row['stage']} | {row['step']} | {row['method']} | "
        f"{'yes' if row.get('exact') else 'no'} |\n"
        for row in rebuilds
    )
    return f"""
## Stages that were lost while it was trained

| stage | rebuilt at step | method | exact |
| --- | --- | --- | --- |
{rows}"""
