"""Tests of dialogues: questions, and answers by a model's chat template."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data.chat import template_of
from planaria.node.data.corpus import load_tokenizer
from planaria.node.data.template_process import Renderer
from planaria.node.hugging_face.dialogue import Dialogue, end_of_turn
from planaria.node.hugging_face.generate import Sampling, Speaker
from tests.node.hugging_face.test_folders import transformers_model
from tests.node.stage.shapes import GROUPED

GREEDY = Sampling(temperature=0)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_in(folder: Path, template: str | None = CHATML, **config: Any) -> Tokenizer:
    """Write a tokenizer with one token per character and this config, and load it."""
    characters = {character: i for i, character in enumerate(string.printable[:96] + "\n")}
    tokenizer = Tokenizer(models.BPE(characters, []))
    tokenizer.decoder = decoders.Fuse()
    ends = ["<|im_start|>", "<|im_end|>", "</s>"]
    tokenizer.add_special_tokens([AddedToken(each) for each in ends])
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose greedy text has many different characters."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer_in(folder, eos_token="<|im_end|>")
    transformers_model(replace(GROUPED, vocabulary=100, context=256)).save_pretrained(folder)
    return folder


def ours(folder: Path, *arguments: object, typed: str = "") -> str:
    command = ["generate", folder, "--chat", "--temperature", 0, *arguments]
    done = CliRunner().invoke(app, list(map(str, command)), input=typed)
    assert done.exit_code == 0, done.output
    return done.stdout


def theirs(folder: Path, *turns: str, tokens: int) -> str:
    """Return transformers' answer. `turns`: the system's message, then questions and answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    roles = ["system", *["user", "assistant"] * len(turns)]
    messages = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = AutoModelForCausalLM.from_pretrained(folder).generate(
        **prompt, do_sample=False, max_new_tokens=tokens
    )
    new = generated[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("listed", [False, True])
def test_answers_are_those_of_transformers(model: Path, listed: bool) -> None:
    asked, config = ["Be brief.", "How many legs has a spider?"], model / "generation_config.json"
    tokenizer = load_tokenizer(model / "tokenizer.json")
    end = tokenizer.token_to_id("<|im_end|>")
    config.write_text(json.dumps({"eos_token_id": end}))
    free = theirs(model, *asked, tokens=20)
    stop = free[12]
    if listed:
        eos = {"eos_token_id": [end, tokenizer.token_to_id(stop)]}
        config.write_text(json.dumps(eos))
    expected = theirs(model, *asked, tokens=20).removesuffix(stop)  # it isn't special here
    assert expected == (free[: free.index(stop)] if listed else free)
    options = ("--system", asked[0], "--tokens", 20)
    assert ours(model, asked[1], *options) == f"{expected}\n"
    again = theirs(model, *asked, expected, "And an ant?", tokens=20)
    dialogue = ours(model, *options, typed=f"{asked[1]}\n\nAnd an ant?\n")
    assert dialogue == f"{expected}\n{again}\n"


def parrot(folder: Path, text: str, context: int = 400) -> tuple[Speaker, list[str]]:
    """Return a speaker that repeats the text, and the list of prompts that it gets."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode(text).ids
    asked: list[str] = []

    def each() -> Iterator[int]:
        while True:
            yield from ids

    tokens = each()

    def next_logits(known: torch.Tensor) -> torch.Tensor:
        asked.append(tokenizer.decode(known[0].tolist(), skip_special_tokens=False))
        return torch.nn.functional.one_hot(torch.tensor(next(tokens)), 100).float()

    return Speaker(next_logits, tokenizer, None, 100, context, folder), asked


def test_the_templates_own_end_ends_an_answer(tmp_path: Path) -> None:
    tokenizer_in(tmp_path, eos_token="</s>")
    speaker, asked = parrot(tmp_path, "Eight.<|im_end|>\nand so on")
    with Dialogue("", 100, GREEDY) as dialogue:
        assert "".join(dialogue.answer(speaker, "Legs?")) == "Eight."
    assert asked[0] == "<|im_start|>user\nLegs?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }} </s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_which_token_ends_a_turn(tmp_path: Path, template: str, end: str | None) -> None:
    tokenizer = tokenizer_in(tmp_path, template)
    with Renderer(template_of(tmp_path / "tokenizer.json")) as renderer:
        token = end_of_turn(renderer, tokenizer)
    assert token == (None if end is None else tokenizer.token_to_id(end))


def test_the_oldest_turns_are_left_out_of_what_is_too_long(tmp_path: Path, caplog: Any) -> None:
    tokenizer_in(tmp_path)
    speaker, asked = parrot(tmp_path, "Yes<|im_end|>", context=100)
    with Dialogue("Be brief", 20, GREEDY) as dialogue:
        for number in range(3):
            assert "".join(dialogue.answer(speaker, f"Question {number}")) == "Yes"
        with pytest.raises(
            ValueError, match=r"takes 2\d\d tokens .* context is 100: ask a shorter"
        ):
            list(dialogue.answer(speaker, 200 * "?"))
    last = asked[-1]
    assert "Be brief" in last
    assert "Question 0" not in last
    assert "Question 2" in last
    assert "oldest questions and answers" in caplog.text


def test_an_answer_that_is_cut_is_said_to_be(tmp_path: Path, caplog: Any) -> None:
    tokenizer_in(tmp_path)
    speaker, _ = parrot(tmp_path, "and so on, ")
    with Dialogue("", 5, GREEDY) as dialogue:
        assert "".join(dialogue.answer(speaker, "Well?")) == "and s"
    assert "the answer is cut after 5 tokens (--tokens)" in caplog.text


@pytest.mark.parametrize(
    ("template", "arguments", "why"),
    [
        (None, ["--chat"], "has no chat template"),
        ("{{ raise_exception('no systems') }}", ["--chat"], "refuses it: no systems"),
        (CHATML, ["--system", "Be brief."], "add --chat"),
    ],
)
def test_what_can_not_be_answered_is_refused(
    model: Path, template: str | None, arguments: list[str], why: str
) -> None:
    before = (model / "tokenizer_config.json").read_text()
    tokenizer_in(model, template)
    done = CliRunner().invoke(app, ["generate", str(model), "Well?", *arguments])
    (model / "tokenizer_config.json").write_text(before)
    assert done.exit_code == 1
    assert why in done.stderr
    assert "--chat-template" not in done.stderr
