"""Tests of which tokens a model is evaluated on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from planaria.node.data.corpus import UNSCORED, CorpusError, read_index
from planaria.node.hugging_face.evaluate import Portion, evaluate
from planaria.node.hugging_face.options import EvaluateOptions
from planaria.node.hugging_face.through_swarm import check_data
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.run_file import RunFile, from_fields, override
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.torch_stage import TorchStage
from tests.node.hugging_face.test_folders import exported
from tests.node.stage.shapes import GROUPED

CPU = torch.device("cpu")


def test_all_of_a_text_is_scored(data: Path) -> None:
    portion = Portion(data, "validation", 16, samples=5, apart=False)
    inputs, targets = portion.rows(0, 3)
    assert inputs.shape == targets.shape == (3, 16)
    assert (targets[:, :-1] == inputs[:, 1:]).all()
    assert portion.rows(3, 3)[0].shape == (2, 16)
    evaluation = portion.evaluation(160.0)
    assert (evaluation.tokens, evaluation.loss) == (80, 2.0)
    assert evaluation.bits_per_byte is not None
    assert "bits per byte" in evaluation.rows()


def test_of_conversations_what_the_assistant_says(conversations: Path) -> None:
    portion = Portion(conversations, "train", 16, samples=None, apart=False)
    _, targets = portion.rows(0, portion.count)
    scored = int((targets != UNSCORED).sum())
    assert 0 < scored < targets.numel()
    evaluation = portion.evaluation(3.0 * scored)
    assert (evaluation.tokens, evaluation.loss) == (scored, 3.0)
    assert evaluation.perplexity == math.exp(3.0)
    assert list(evaluation.rows()) == ["tokens", "loss", "perplexity"]
    mute = Portion(
        conversations, "train", 2, samples=1, apart=False
    )  # its only words are those of a role
    assert (mute.rows(0, 1)[1] == UNSCORED).all()
    with pytest.raises(CorpusError, match=r"none of the tokens in 1 samples .* is scored"):
        mute.evaluation(0.0)


def test_each_corpus_of_a_mixture_is_the_runs_data(data: Path, caplog) -> None:
    corpora = [{"path": "a", "content": read_index(data).content}, {"path": "b", "content": "x"}]
    for known in (corpora, corpora[1:]):
        check_data(from_fields({"data": {"corpora": known, "content": "both"}}), data)
        assert ("isn't the run's data" in caplog.text) is (len(known) == 1)


def in_transformers(folder: Path, *rows: torch.Tensor) -> float:
    """Return the mean loss of inputs, targets, beginnings; each document is computed alone."""
    from transformers import AutoModelForCausalLM

    model, total = AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0
    for inputs, targets, begins in zip(*rows, strict=True):
        for at in np.split(np.arange(len(inputs)), np.flatnonzero(begins[1:]) + 1):
            with torch.inference_mode():
                logits = model(inputs[None, at]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, targets[at], reduction="sum"))
    return total / int((rows[1] != UNSCORED).sum())


def test_documents_are_kept_apart_for_a_model_that_was_trained_so(
    conversations: Path, tmp_path: Path
) -> None:
    """This holds for an exported folder, and for the stages of a swarm."""
    run = override(RunFile(), training__batch=64, training__microbatch=64)
    apart = replace(GROUPED, vocabulary=512, attn_mask_type="block_causal")
    options = EvaluateOptions(data=conversations, split="train", samples=40)
    losses, flat = {}, {}
    for config in (replace(apart, attn_mask_type="causal"), apart):
        folder = tmp_path / config.attn_mask_type
        flat = exported(folder, config)
        tokenizer = json.loads((conversations / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))  # as a new file
        model = WholeModel.load(folder, CPU)
        losses[config.attn_mask_type] = evaluate(model, folder, options).loss
    portion = Portion(conversations, "train", apart.context, 40, apart=True)
    inputs, targets, begins = portion.rows(0, portion.count)
    assert begins[:, 1:].any()
    wanted = in_transformers(tmp_path / "block_causal", inputs, targets, begins)
    assert losses["block_causal"] == pytest.approx(wanted, abs=1e-4)
    assert abs(losses["causal"] - wanted) > 1e-3
    stages = [
        TorchStage(stage, InitialStages(run, apart), CPU) for stage in range(apart.stages + 1)
    ]
    x = stages[0].evaluate([inputs, begins], head=False, weights=flat[0])
    for stage in stages[1:]:
        x = stage.evaluate([x], head=False, weights=flat[stage.stage])
    seen = stages[0].evaluate([x, targets], head=True, weights=flat[0])
    scored = int((targets != UNSCORED).sum())
    assert float(seen) / scored == pytest.approx(losses["block_causal"], abs=1e-4)
    with pytest.raises(ValueError, match="a token outside the vocabulary of 512"):
        stages[0].evaluate([targets.clamp(max=-1), begins], head=False)
