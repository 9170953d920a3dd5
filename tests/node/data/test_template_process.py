"""Tests of chat templates that may be harmful, in a process of their own."""

from __future__ import annotations

import os

import pytest

from planaria.node.data.chat import Conversation, Template
from planaria.node.data.corpus import CorpusError
from planaria.node.data.template_process import Renderer

SAID = [{"role": "user", "content": "Ho\ud800w?"}, {"role": "assistant", "content": "So."}]
HERE = Conversation("chats.jsonl, line 1", SAID)


def template(source: str) -> Template:
    return Template(source, "bad.jinja", {"eos_token": "</s>"})


def test_one_process_renders_many_conversations_and_tells_what_it_refuses() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% elif m.content == 'no' %}{{ raise_exception('\x1b[2J') }}"
        "{% elif m.content == 'huge' %}{{ ('x' * 2000000000) | length }}{% else %}> {% endif %}"
        "{% endfor %}{{ eos_token }}"
    )
    with Renderer(template(source)) as renderer:
        for _ in range(2):
            rendered = renderer.render(HERE)
            assert (rendered.text, rendered.scored) == ("> So.</s>", [(2, 5)])
            refused = Conversation("line 2", [{"role": "user", "content": "no"}])
            with pytest.raises(CorpusError, match=r"line 2: bad.jinja refuses it: \\x1b\[2J"):
                renderer.render(refused)
            huge = Conversation("line 3", [{"role": "user", "content": "huge"}])
            with pytest.raises(CorpusError, match=r"line 3: bad.jinja refuses it: MemoryError"):
                renderer.render(huge)


def test_ctrl_c_does_not_reach_the_process() -> None:
    with Renderer(template("")) as renderer:
        assert os.getpgid(renderer._process.pid) != os.getpgid(0)


def test_what_is_no_template_is_refused_at_once() -> None:
    with pytest.raises(CorpusError, match=r"bad.jinja, line 1: "):
        Renderer(template("{% for %}"))


def test_a_template_that_never_ends_is_ended() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless = Renderer(template("{% if messages %}" + loops + "{% endif %}"), patience=1.0)
    with endless, pytest.raises(CorpusError, match=r"for chats.jsonl, line 1: it takes more than"):
        endless.render(HERE)
    with pytest.raises(CorpusError, match=r"can't be used for it: it takes more than 1 s"):
        Renderer(template("{{ 9 ** (9 ** 9) }}"), patience=1.0)


def test_a_long_conversation_may_take_longer_than_a_rendering() -> None:
    work = "{% for a in range(99999) %}{% endfor %}"
    many = [{"role": "assistant", "content": str(number)} for number in range(200)]
    source = work + "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    with Renderer(template(source), patience=0.5) as renderer:
        assert len(renderer.render(Conversation("line 1", many)).scored) == len(many)
