"""A swarm trains, loses a stage, and its living model is exported; then it is ended, and its model
is exported from its saves."""

from __future__ import annotations

import math
import re
import shutil
import signal
from pathlib import Path

import torch
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data.corpus import Corpus
from tests.swarm.paced import pace_up
from tests.swarm.small import small


def planaria(*arguments: object, typed: str = "") -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), input=typed)
    assert done.exit_code == 0, done.output
    return done.output


def transformers_loss(folder: Path, rows: torch.Tensor) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


def test_the_model_of_a_living_run_is_a_folder_that_transformers_reads(up, data, tmp_path) -> None:
    """A node of stage 0 sends tokenizer and chat template."""
    run = small(steps=100_000, saves__every=4, model__attn_mask_type="block_causal")
    chats = shutil.copytree(data, tmp_path / "chats")
    (chats / "chat_template.jinja").write_text("{{ messages[-1].content }}, she said")
    swarm = up(run, "--kill", "1@6", at=chats, before=pace_up)
    swarm.wait_until("saves of one step", lambda: swarm.committed() >= 14)
    living = tmp_path / "living"
    join = (swarm.out / "registry.address").read_text().strip()
    before, aborted = swarm.committed(), len(swarm.events("aborted"))
    exported = planaria("export", "--join", join, "--out", living)
    text = planaria("generate", "--join", join, "once", "--tokens", 4)
    assert text.startswith("once")
    ask = ["generate", "--join", join, "--chat", "--tokens", 4]
    assert planaria(*ask, "How old?", "--data", chats).endswith("\n")
    dialogue = planaria(*ask, typed="How old?\nWhy?\n")
    assert len(dialogue.splitlines()) >= 2
    evaluated = planaria("evaluate", "--join", join, "--data", data, "--samples", 2)
    assert re.search(r"[\d.]+ nats a token(.|\n)*of the model of step \d+", evaluated)
    (step,) = re.findall(r"has the model of step (\d+)", exported)
    assert before <= int(step) <= swarm.committed()
    swarm.wait_until("it to train on", lambda: swarm.committed() >= int(step) + 4)
    assert len(swarm.events("aborted")) == aborted
    swarm.end(signal.SIGINT)
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    (step,) = re.findall(
        r"has the model of step (\d+)", planaria("export", swarm.out, "--out", folder)
    )
    assert swarm.committed() - 8 < int(step) <= swarm.committed()
    corpus = Corpus.open(data)
    context = small().model.context or 64
    rows = torch.stack(
        [torch.from_numpy(corpus.sample("validation", context, index)) for index in range(6)]
    )
    assert transformers_loss(living, rows) < math.log(corpus.vocabulary)
    for exported_to in (living, folder):
        question = [{"role": "user", "content": "How old?"}]
        tokenizer = AutoTokenizer.from_pretrained(exported_to)
        asked = tokenizer.apply_chat_template(question, tokenize=False)
        assert asked == "How old?, she said"
        assert tokenizer("once")["input_ids"] == corpus.tokenizer().encode("once").ids
