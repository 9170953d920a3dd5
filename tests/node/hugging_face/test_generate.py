"""Tests of the choice of the next token, and of the end of a text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data.corpus import load_tokenizer
from planaria.node.data.tokenizer import text_bounds
from planaria.node.hugging_face.export import Vocabulary
from planaria.node.hugging_face.generate import (
    Sampling,
    Speaker,
    choose_token,
    continuation,
    generate,
)
from planaria.node.hugging_face.samples import Occasions
from tests.node.data.test_tokenizer import AROUND, NAMED, write
from tests.node.hugging_face.test_folders import exported
from tests.node.stage.shapes import GROUPED

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def drawn(sampling: Sampling, times: int = 400) -> Counter[int]:
    generator = torch.Generator().manual_seed(sampling.seed)
    return Counter(choose_token(LOGITS, sampling, generator) for _ in range(times))


def test_without_temperature_it_is_the_likeliest() -> None:
    assert drawn(Sampling(temperature=0)) == {0: 400}


def test_of_the_likeliest_tokens_as_many_as_have_the_share() -> None:
    assert drawn(Sampling(1.0, top_p=0.5)).keys() == {0}
    assert drawn(Sampling(1.0, top_p=0.6)).keys() == {0, 1}
    counts = drawn(Sampling(1.0, top_p=1.0))
    assert counts.keys() == {0, 1, 2, 3}
    assert 160 < counts[0] < 240
    assert drawn(Sampling(4.0, 1.0))[3] > counts[3]


def test_the_same_seed_gives_the_same_tokens_and_what_is_too_long_is_forgotten() -> None:
    asked = []

    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        asked.append(tokens.tolist()[0])
        return LOGITS

    sampling = Sampling(1.0, 1.0, seed=5)
    first = list(generate(next_logits, [3, 3], 8, 4, sampling))
    assert len(first) == 8
    assert asked[0] == [3, 3]
    assert asked[-1] == first[3:7]
    assert first == list(generate(next_logits, [3, 3], 8, 4, sampling))
    assert first != list(generate(next_logits, [3, 3], 8, 4, Sampling(1.0, 1.0, seed=6)))


def test_the_end_of_the_document_ends_it() -> None:
    tokens = iter([1, 2, 0, 1])

    def next_logits(known: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(tokens)), 4).float()

    assert list(generate(next_logits, [3], 8, 4, Sampling(temperature=0), ends=[0])) == [1, 2]


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_what_cannot_be_sampled_by_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--t"):
        Sampling(**wrong)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("prompt", ["hello, this", ""])
def test_a_prompt_becomes_what_transformers_makes_of_it(
    around: str | None, prompt: str, tmp_path: Path
) -> None:
    """Only the end token that a post-processor may add is left out."""
    from transformers import AutoTokenizer

    folder = write(tmp_path / "model", "sentencepiece", around, **NAMED).parent
    wanted = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    wanted = [token for token in wanted if token != 2] or [2]
    asked = []

    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        asked.append(tokens.tolist()[0])
        return torch.nn.functional.one_hot(torch.tensor(2), 400).float()

    tokenizer = load_tokenizer(folder / "tokenizer.json")
    speaker = Speaker(next_logits, tokenizer, text_bounds(tokenizer, folder).end, 400, 16)
    assert list(continuation(speaker, prompt, 4, Sampling(temperature=0))) == []
    assert asked == [wanted]


def test_a_prompt_with_tokens_that_the_model_lacks_is_refused_by_their_names(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model"))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<one>", "<more>"])
    speaker = Speaker(lambda _: LOGITS, tokenizer, None, size, 16)
    why = rf"2 tokens more than the model, .* the text has <more> \({size + 1}\): .*\({size + 2}\)"
    with pytest.raises(ValueError, match=why):
        continuation(speaker, "hello <more>", 4, Sampling())


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Python reads bytes of a command line that aren't UTF-8 as halves of surrogate pairs."""
    tokenizer = load_tokenizer(write(tmp_path / "model"))
    speaker = Speaker(lambda _: LOGITS, tokenizer, None, 400, 16)
    with pytest.raises(ValueError, match="the text is not UTF-8 behind 'caf'"):
        continuation(speaker, "caf\udce9", 4, Sampling())


def test_text_is_printed_as_it_is(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "tokenizer")
    config = replace(GROUPED, vocabulary=load_tokenizer(tokenizer).get_vocab_size())
    exported(tmp_path / "model", config, vocabulary=Vocabulary(tokenizer, 2))
    text = "if x:\n\tprint('[red] :smile:')\n"
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "model"), text, "--tokens", "1"])
    assert done.output.startswith(text)


@pytest.mark.parametrize(
    ("logits", "prompt", "why"),
    [(LOGITS, [], "prompt has no tokens"), (LOGITS * float("nan"), [1], "diverged")],
)
def test_what_no_text_comes_of_is_refused(
    logits: torch.Tensor, prompt: list[int], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        list(generate(lambda _: logits, prompt, 1, 4, Sampling()))


def test_samples_are_due_once_a_step_until_they_are_made_or_have_failed_too_often() -> None:
    occasions = Occasions(every=10, tries=2)
    for step in (1, 9):
        occasions.committed(step)
        assert not occasions.due
    occasions.committed(10)
    assert occasions.due
    occasions.failed()
    occasions.committed(10)  # by another seat
    occasions.committed(11)
    assert occasions.due
    occasions.failed()
    assert not occasions.due
    occasions.committed(20)
    occasions.committed(30)
    occasions.made(20)
    assert occasions.due, "those of step 30 became due meanwhile"
    occasions.made(30)
    assert not occasions.due
    occasions.committed(30)
    assert not occasions.due
    never = Occasions(every=0)
    never.committed(10)
    assert not never.due
