"""A swarm trains, loses a stage, and its model is taken home; it is ended in the middle, and
has its model in its saves."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import torch
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data.corpus import Corpus
from tests.swarm.small import small


def planaria(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def transformers_loss(folder: Path, rows: torch.Tensor) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


def test_the_model_of_a_living_run_is_a_folder_that_transformers_reads(up, data, tmp_path) -> None:
    run = small(steps=100_000, saves__every=4, model__attn_mask_type="block_causal")
    swarm = up(run, "--kill", "1@6")
    swarm.wait_until("saves of one step", lambda: swarm.committed() >= 14)
    living = tmp_path / "living"
    join = (swarm.out / "registry.address").read_text().strip()
    before, aborted = swarm.committed(), len(swarm.events("aborted"))
    exported = planaria("export", "--join", join, "--out", living, "--data", data)
    said = planaria("generate", "--join", join, "once", "--tokens", 4, "--data", data)
    assert said.startswith("once")
    evaluated = planaria("evaluate", "--join", join, "--data", data, "--samples", 2)
    assert re.search(r"[\d.]+ nats a token(.|\n)*of the model of step \d+", evaluated)
    (step,) = re.findall(r"has the model of step (\d+)", exported)
    assert before <= int(step) <= swarm.committed()
    swarm.wait_until("it to train on", lambda: swarm.committed() >= int(step) + 4)
    assert len(swarm.events("aborted")) == aborted
    swarm.end(signal.SIGINT)
    folder = tmp_path / "model"
    (step,) = re.findall(
        r"has the model of step (\d+)", planaria("export", swarm.out, "--out", folder)
    )
    assert swarm.committed() - 8 < int(step) <= swarm.committed()
    corpus = Corpus.open(data)
    rows = torch.from_numpy(corpus.samples("validation", small().model.context or 64, range(6)))
    assert transformers_loss(living, rows) < math.log(corpus.vocabulary)
