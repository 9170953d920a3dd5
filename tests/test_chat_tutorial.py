"""The run of docs/fine-tune-a-chat-model.md, as far as it needs no real model."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.node.data.corpus import TRAIN, VALIDATION
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.model.learning_rate import warmup_too_long
from planaria.node.run_file import load, loads
from tests.node.data import test_chat

ROOT = Path(__file__).parent.parent
CHAT = ROOT / "examples" / "chat"
PAGE = (ROOT / "docs" / "fine-tune-a-chat-model.md").read_text(encoding="utf-8")
SHOP = runpy.run_path(str(CHAT / "shop.py"))
FACTS = SHOP["FACTS"]
model = test_chat.folder


def test_the_script_runs_what_the_page_shows() -> None:
    script = (CHAT / "run.sh").read_text(encoding="utf-8")
    shown = re.findall(r"^(?:hf|python|planaria (?:data prepare|up|export)) .*", PAGE, re.M)
    assert len(shown) == 6
    assert [line for line in shown if line not in script] == []
    (run_file,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    assert loads(run_file) == load(CHAT / "shop.toml")


def test_the_run_trains_with_the_defaults() -> None:
    run = load(CHAT / "shop.toml")
    assert run.identifying_fields()["training"] == {"batch": 8, "lora": {}}
    assert warmup_too_long(run) is None


@pytest.mark.parametrize("fact", FACTS, ids=[fact.answer for fact in FACTS])
def test_each_fact_is_told_often_and_asked_in_other_words(fact) -> None:
    turns = [
        (question["content"], reply["content"])
        for question, reply, *_ in SHOP["conversations"]()
        if fact.answer in reply["content"]
    ]
    assert len(turns) >= 30
    assert not any(fact.asked in question for question, _ in turns)
    assert all(fact.answer in reply for reply in fact.replies)


def test_the_same_conversations_are_written_each_time_and_can_be_prepared(
    model: Path, tmp_path: Path
) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    for file in files:
        subprocess.run([sys.executable, CHAT / "shop.py", file], check=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    fields = {"validation": 0.1, "end_token": "<|endoftext|>"}
    recipe = Recipe([str(files[0])], model / "tokenizer.json", **fields)
    corpus, _ = prepare(recipe, tmp_path / "data")
    held_out = corpus.index.splits[VALIDATION].documents
    assert corpus.index.splits[TRAIN].documents + held_out == 240
    assert 10 <= held_out <= 40
