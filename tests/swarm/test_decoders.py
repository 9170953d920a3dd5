"""Decoders computed by transformers are trained, rebuilt and exported by a swarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.node.data.corpus import Corpus
from planaria.node.hugging_face.begin_from_model import with_model_here
from planaria.node.hugging_face.export import ModelParts, export
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.launch.resolve import resolve
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.modules import copy_with, empty_stage
from planaria.node.report.ledger import audit
from planaria.node.run_file import RunFile, RunFileError, from_fields, override
from planaria.node.state.regrouped_saves import model_as_saved
from planaria.node.state.saves import find_saves
from planaria.node.state.stage_state import SaveError
from tests.node.model.test_decoder import content, saved
from tests.swarm.in_process import LocalSwarm
from tests.swarm.small import small
from tests.swarm.test_in_process import losses, undisturbed


def run_of(folder: Path, key: str, stages: int | list[int] = 3, **changes: Any) -> RunFile:
    run = override(small(steps=8), **changes)
    others = run.model_dump(exclude_none=True, exclude={"model"})
    model = {key: str(folder), "stages": stages, "context": 32}
    return with_model_here(from_fields({**others, "model": model}))


@pytest.mark.parametrize(
    ("kind", "key"),
    [("gemma3_text", "from"), ("mixtral", "config")],
)
async def test_a_family_is_trained_healed_and_exported(
    corpus: Corpus, tmp_path: Path, kind: str, key: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder, out = tmp_path / "model", tmp_path / "out"
    sizes = {"num_hidden_layers": 6, "vocab_size": corpus.vocabulary}
    folder.mkdir()
    out.mkdir()
    if key == "from":
        saved(folder, kind, **sizes)
    else:
        (folder / "config.json").write_text(json.dumps(content(kind, **sizes)))
    run = run_of(folder, key, [2, 3, 1] if key == "config" else 3)
    run = override(run, recovery__policy="checkfree")
    checkpoint = Checkpoint.open(folder) if key == "from" else None
    async with LocalSwarm(run, corpus, out, checkpoint=checkpoint) as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        await swarm.replace(2, 0)
        await swarm.until(swarm.finished)
        flat = {
            stage: node.seat.arithmetic.tensors["weights"].clone()
            for (stage, _), (node, _) in swarm.nodes.items()
        }
    rebuilt = swarm.lines.events("rebuilt")
    begun = [e["method"] for e in rebuilt if not e["step"]]
    assert begun == ["origin"] * (3 if key == "from" else 0), "only stage 0 has the folder"
    methods = [e["method"] for e in rebuilt if e["step"]]
    assert methods == ["pretrained" if key == "from" else "checkfree"]
    assert losses(out)[:4] == pytest.approx(undisturbed(run, corpus, 4), rel=1e-5)
    assert audit(out).exact
    parts = ModelParts(swarm.config, lambda of, first, n: flat[of][first : first + n])
    export(tmp_path / "again", parts)
    tokens = torch.from_numpy(corpus.sample("validation", 32, 0))[None, :32]
    with torch.no_grad():
        ends, *bodies = (
            copy_with(empty_stage(run.config, of, swarm.own), flat[of]) for of in range(4)
        )
        x = ends.embed(tokens)
        for body in bodies:
            x = body(x)
        logits = ends.logits(x)
        theirs, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "again", output_loading_info=True
        )
        assert torch.equal(theirs.eval()(tokens).logits, logits)
    assert not any(report.values()), report
    ours = WholeModel.load(tmp_path / "again", torch.device("cpu"))
    assert torch.equal(ours.logits(tokens), logits)


async def test_layers_that_differ_are_averaged_where_their_shapes_are_equal(
    corpus: Corpus, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third of six layers, which is the first one of stage 2, has no experts."""
    sizes = {"num_hidden_layers": 6, "vocab_size": corpus.vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(content("qwen3_moe", **sizes)))
    run = override(run_of(tmp_path, "config"), data__path=str(data), recovery__policy="checkfree")
    config = run.config
    assert len({config.trained_in(stage) for stage in range(1, 4)}) == 2
    assert config.trained[1] == config.trained_in(1)
    resolve(run)
    assert (
        "values of stage 2: layers of its neighbours differ, and the rest would begin anew "
        "(model.layers.2.mlp.gate_proj.weight, "
    ) in caplog.text
    unlike = content("qwen3_moe", **sizes | {"num_hidden_layers": 4}, mlp_only_layers=[1])
    (tmp_path / "config.json").write_text(json.dumps(unlike))
    model = {"config": str(tmp_path), "stages": 4, "context": 32}
    other = with_model_here(from_fields({"model": model}))
    other = override(other, recovery__policy="checkfree+", data__path=str(data))
    with pytest.raises(RunFileError, match="stage 1 would be estimated from stage 2, whose layers"):
        resolve(other)
    async with LocalSwarm(run, corpus, tmp_path, tmp_path / "saves") as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        await swarm.replace(2, 0)
        await swarm.until(swarm.finished)
    rebuilt = [e["method"] for e in swarm.lines.events("rebuilt") if e["stage"] == 2]
    assert rebuilt == ["checkfree"]
    assert "tensors begin anew, since not all stages" in caplog.text
    assert audit(tmp_path).exact
    saves = find_saves(tmp_path / "saves")
    assert model_as_saved(saves, config).stages == 3
    with pytest.raises(SaveError, match="layers of this model differ in shape, so keep"):
        model_as_saved(saves, override(run, model__stages=2).config)
