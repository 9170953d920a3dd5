"""Tests of RoPE scaling against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.node.hugging_face.begin_from_model import with_model
from planaria.node.hugging_face.export import ModelParts, export
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.shape import RopeScaling
from planaria.node.run_file import dumps, from_fields, loads
from planaria.node.stage.initial import InitialStages
from tests.node.hugging_face.test_folders import logits_of, some_tokens, transformers_model
from tests.node.stage.shapes import GROUPED

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
KINDS: dict[str, tuple[dict[str, Any], int]] = {  # with the longest context
    "default": ({"rope_type": "default"}, 24),
    "linear": ({"rope_type": "linear", "factor": 2.0}, 48),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 48),
    "yarn": (YARN, 32),
    "yarn, scaled": (YARN | {"attention_factor": 0.8, "truncate": False}, 32),
    "yarn, by weights": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_slow": 0.5}, 32),
    "yarn, of zeros": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 0}, 32),
    "yarn, of one place": (YARN | {"beta_fast": 1.0, "truncate": False}, 32),
    "yarn, by positions": (YARN | {"factor": None}, 24),
    "yarn, of all positions": ({"rope_type": "yarn", "factor": 2.0}, 48),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 24),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_at_any_length(tmp_path: Path, kind: str) -> None:
    """This holds in one process, in stages and for an export, also with names from before version
    5. It holds beyond the config's positions as far as RoPE is scaled."""
    model, out, (rope, reach) = tmp_path / "model", tmp_path / "out", KINDS[kind]
    transformers_model(replace(GROUPED, rope_theta=10_000.0)).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    if kind != "llama3":  # names before version 5
        del config["rope_parameters"]
        old = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
        config |= {"rope_theta": 10_000.0, "rope_scaling": old}
    else:
        config["rope_parameters"] = {"rope_theta": 10_000.0, **rope}
    (model / "config.json").write_text(json.dumps(config))

    assert Checkpoint.open(model).config.context == reach
    run = with_model(from_fields({"model": {"from": str(model), "stages": 3, "context": reach}}))
    assert loads(dumps(run)) == with_model(run) == run
    beginning = InitialStages(run, run.config, Checkpoint.open(model))
    ends, *body = (beginning.stage(stage) for stage in range(4))
    flat = [torch.cat([p.detach().flatten() for p in part.parameters()]) for part in (ends, *body)]
    export(out, ModelParts(run.config, lambda of, at, count: flat[of][at : at + count]))
    for length in (1, reach, 7, 24):
        tokens = some_tokens(GROUPED, length)
        wanted = logits_of(model, tokens)
        assert wanted.std() > 0.5
        with torch.no_grad():
            staged = ends.logits(reduce(lambda x, part: part(x), body, ends.embed(tokens)))
        for got in (staged, WholeModel.load(model, torch.device("cpu")).logits(tokens)):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        torch.testing.assert_close(logits_of(out, tokens), wanted, rtol=0, atol=1e-4)


def test_of_two_ways_in_one_config_it_is_the_one_that_transformers_takes(tmp_path: Path) -> None:
    transformers_model(GROUPED).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = some_tokens(GROUPED, 24)
    model = WholeModel.load(tmp_path, torch.device("cpu"))
    assert (model.config.rope_scaling, model.config.rope_theta) == (RopeScaling("linear", 4.0), 50)
    torch.testing.assert_close(model.logits(tokens), logits_of(tmp_path, tokens), rtol=0, atol=1e-4)
