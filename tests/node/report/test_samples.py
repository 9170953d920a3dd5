"""Samples of a model's text, which may hold anything, as files and terminals show them."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from planaria.node.report.events import Sampled, shown
from planaria.node.report.samples import SamplesFile, sample_markdown


def test_each_part_has_its_step_its_prompt_and_the_text_in_a_block(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path, "mine")
    file.add(Sampled(step=40, prompt="It was", text=" a  dark\nnight"))
    file.add(Sampled(step=80, prompt="", text="Once"))
    file.close()
    SamplesFile(tmp_path, "mine").add(Sampled(step=120, prompt="", text="x"))
    assert (tmp_path / "samples.md").read_text() == (
        "# Samples of mine\n\n"
        "## Step 40, after `It was`\n\n```text\na dark\nnight\n```\n\n"
        "## Step 80\n\n```text\nOnce\n```\n\n"
        "## Step 120\n\n```text\nx\n```\n\n"
    )


@given(st.text(), st.text())
def test_no_text_gets_out_of_its_block_or_moves_a_cursor(prompt: str, text: str) -> None:
    part = sample_markdown(Sampled(step=1, prompt=prompt, text=text))
    head, rest = part.split("\n\n", 1)
    fence = re.match("`+", rest)
    assert fence is not None
    *body, last = rest.removesuffix("\n\n").split("\n")[1:]
    assert last == fence[0]
    assert not any(line.strip().startswith(last) for line in body)
    assert all(line.isprintable() for line in (head, *body))


def test_a_line_for_a_terminal_tells_what_would_steer_it() -> None:
    assert shown("a\x1b[31mb\r\nc\u202ed") == "a\\x1b[31mb c\\u202ed"
    assert shown("x" * 300, 10) == "xxxxxxx..."
    sample = Sampled(step=3, prompt="It was", text=" a dark\nnight")
    assert sample.sentence("n") == "step 3: It was a dark night"
