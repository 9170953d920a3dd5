"""Tests that each key of the run file has an effect. Another value changes the rules of registry,
driver or model, or a live swarm reads the key in the module that is listed here."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from planaria.node.agent import transaction_rules
from planaria.node.launch.resolve import registry_rules, resolve
from planaria.node.model.shape import model_config
from planaria.node.run_file import RunFile, Section, override
from tests.swarm.in_process import LocalSwarm
from tests.swarm.small import small

ROOT = Path(__file__).parents[2]
BASE = small(stages=4, model__vocabulary=512, saves__keep=6)


def keys(section: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key that isn't a table, and its value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from keys(value, f"{path}{name}.")
        else:
            yield f"{path}{field.alias or name}", value


CHANGED = {
    "name": "other",
    "model.from": "elsewhere",
    "model.config": "elsewhere",
    "model.content": ["0" * 32],
    "model.module": "package.module:build",
    "model.parts": {"source": "0", "ends": [["w", [512, 64]]], "block": [["w", [64, 64]]]},
    "model.preset": "midi",
    "model.stages": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.layers": 8,
    "model.hidden": 64,
    "model.rope_scaling": {
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8,
    },
    "model.attention_bias": True,
    "model.mlp_bias": True,
    "model.family": "qwen2",
    "model.head_dim": 4,
    "model.norm_eps": 1e-6,
    "model.tied": True,
    "model.positions": 4096,
    "model.window": 4096,
    "model.attn_mask_type": "block_causal",
    "model.subspace": 8,
    "data.path": "elsewhere",
    "data.content": "0" * 64,
    "data.corpora": [{"path": "elsewhere"}],
    "training.precision": "bf16",
    "training.optimizer": "muon",
    "training.lr": 0.5,
    "training.lr_floor": 0.5,
    "training.sampling.top_p": 0.5,
    "training.schedule": "linear",
    "training.betas": (0.8, 0.9),
    "training.weight_decay": 0.5,
    "training.lora": {"rank": 4},
    "recovery.policy": "snapshot",
    "recovery.relearn.seconds": 30.0,
    "recovery.masking": "abort",
    "recovery.wait_for_saves": 5.0,
    "recovery.snapshot.fraction": 0.5,
    "recovery.snapshot.codec": "none",
    "recovery.checkpoint.dir": "elsewhere",
    "wire.activations": "int8",
    "wire.gradients": "int8",
    "wire.averaging": "int8",
    "saves.milestones": 20,
    "trust.gradients": "exclude",
    "notify.command": "cat",
    "changes": [{"step": 5, "was": ["training.batch=8"]}],
}
"""Other values of keys, where the double or the opposite isn't valid."""

USED = {
    "node/agent.py": ["training.in_flight"],
    "node/daemon.py": ["name", "saves.in_flight", "saves.milestones"],
    "node/hugging_face/samples.py": [
        *("training.sample_every", "training.prompts", "training.sampling.tokens"),
        *("training.sampling.temperature", "training.sampling.top_p", "training.sampling.seed"),
    ],
    "node/hugging_face/begin_from_model.py": ["model.config"],
    "node/launch/own_folders.py": ["recovery.checkpoint.dir"],
    "node/launch/resolve.py": ["data.corpora"],
    "node/node.py": ["swarm.silence"],
    "node/run_file.py": ["data.path", "training.optimizer", "wire.rank_after", "changes"],
    "node/stage/torch_stage.py": ["training.precision"],
    "node/stage/initial.py": ["seed", "model.content"],
    "node/model/learning_rate.py": [
        *("training.lr", "training.warmup", "training.schedule", "training.lr_floor"),
        *("training.decay_share", "training.rewarm"),
    ],
    "node/stage/optimizer.py": [
        *("training.muon_lr", "training.betas", "training.weight_decay"),
    ],
    "node/stage/work.py": ["training.compile", "training.recompute"],
    "node/state/copies.py": [
        *("recovery.snapshot.fraction", "recovery.snapshot.period", "recovery.snapshot.codec"),
        *("recovery.snapshot.moments", "recovery.snapshot.mbps"),
    ],
    "node/state/holdings.py": [
        *("recovery.relearn.steps", "recovery.checkpoint.every", "saves.every", "saves.keep"),
        "recovery.snapshot.first",
    ],
    "node/state/rebuild.py": [
        *("recovery.relearn.tokens", "recovery.relearn.passes"),
        *("recovery.relearn.lr", "recovery.relearn.enough", "recovery.relearn.each_step"),
        "recovery.relearn.within",
    ],
    "node/averaging/coding.py": ["wire.averaging", "wire.rank"],
}


MUON = {"training__optimizer": "muon"}
OF_THE_REGISTRY = {"notify.command"}
"""Keys that no node gets (tests/node/page/test_notifying.py)."""


def changed(key: str, value: Any) -> RunFile:
    if key in CHANGED:
        other = CHANGED[key]
    else:
        other = not value if isinstance(value, bool) else 2 * value or 2
    together = {"data.corpora": {"data__path": ""}, "training.muon_lr": MUON}.get(key, {})
    return override(BASE, **together, **{key.replace(".", "__"): other})


def gone_by(run: RunFile) -> list[object]:
    """Return the rules and figures that registry, driver and model derive from the run file."""
    config = model_config(run.model, 512)
    by_driver = transaction_rules(run, config)
    scales = [by_driver.lr_scale(step, 1) for step in (2, 100, 150)]
    by_driver = replace(by_driver, lr_scale=min)
    return [replace(registry_rules(run), run="any"), config, by_driver, scales]


def test_every_key_has_an_effect_or_is_listed() -> None:
    listed = {key for keys in USED.values() for key in keys} | OF_THE_REGISTRY
    without = {key for key, value in keys(BASE) if gone_by(changed(key, value)) == gone_by(BASE)}
    assert without == listed


@contextmanager
def noting(read: defaultdict[str, set[str]]) -> Iterator[None]:
    """Record in `read`, for each section's class and key, which modules of planaria read it."""
    usual: Callable[[Section, str], Any] = Section.__getattribute__

    def noted(self: Section, name: str) -> Any:
        if name in type(self).model_fields:
            file = Path(sys._getframe(1).f_code.co_filename).resolve()
            if file.is_relative_to(ROOT / "planaria"):
                key = type(self).model_fields[name].alias or name
                read[f"{type(self).__name__}.{key}"].add(str(file.relative_to(ROOT / "planaria")))
        return usual(self, name)

    Section.__getattribute__ = noted  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del Section.__getattribute__


def by_class(key: str) -> str:
    section, (*tables, last) = RunFile(), key.split(".")
    for table in tables:
        section = getattr(section, table)
    return f"{type(section).__name__}.{last}"


async def test_a_live_swarm_reads_what_is_listed(corpus, data, tmp_path) -> None:
    read: defaultdict[str, set[str]] = defaultdict(set)
    for policy in ("checkfree", "checkpoint"):  # a policy that guesses, and one with files
        out = tmp_path / policy
        out.mkdir()
        run = override(
            BASE,
            data__path=str(data),
            recovery__policy=policy,
            recovery__checkpoint__dir="shared",
            recovery__relearn__passes=1,
            training__sample_every=2,
        )
        with noting(read):
            resolve(run)
            async with asyncio.timeout(300), LocalSwarm(run, corpus, out, out / "saves") as swarm:
                await swarm.until(lambda: swarm.committed() >= 3)
                await swarm.replace(2, 0)
                await swarm.until(swarm.finished)
    unread = {
        key: (module, sorted(read[by_class(key)]))
        for module, keys in USED.items()
        for key in keys
        if module not in read[by_class(key)]
    }
    assert unread == {}
