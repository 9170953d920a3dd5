"""A dialogue with a model, by the chat template beside its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Self

from tokenizers import Tokenizer

from planaria.node.data.chat import Conversation, template_of
from planaria.node.data.corpus import CorpusError
from planaria.node.data.template_process import Renderer
from planaria.node.data.tokenizer import TOKENIZER
from planaria.node.hugging_face.generate import (
    Sampling,
    Speaker,
    decode_pieces,
    encode_text,
    generate,
)
from planaria.node.model.config import read_stop_tokens

log = logging.getLogger("planaria")

REMEDY: Final = "without --chat, the model continues a text"
PLACE: Final = "the conversation"
"""Name of the conversation in errors."""
ANSWER: Final = "planarian"
"""An answer for finding what the template puts behind one."""


class Dialogue:
    """A dialogue with a model so far. Used within `with`: a child process renders the template."""

    def __init__(self, system: str, tokens: int, sampling: Sampling) -> None:
        """`system`: the system's message, or empty; `tokens`: limit of an answer."""
        self._system = [_message("system", system)] if system else []
        self._turns: list[dict[str, Any]] = []  # a question, its answer, and so on
        self._tokens, self._sampling = tokens, sampling
        self._renderer: Renderer | None = None  # from the first question on
        self._stops: set[int | None] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def answer(self, speaker: Speaker, question: str) -> Iterator[str]:
        """Yield the model's answer in pieces, until it ends its turn. Take all of it before the
        next question. Raises CorpusError when the template can't be used, UnsupportedModelError,
        and ValueError for a question that is too long."""
        renderer = self._renderer or self._start(speaker)
        asked = _message("user", question)
        prompt = self._prompt(renderer, speaker, asked)
        most = min(self._tokens, speaker.context - len(prompt))
        tokens = generate(
            speaker.next_logits, prompt, most, speaker.context, self._sampling, self._stops
        )
        written: list[int] = []
        pieces: list[str] = []
        for piece in decode_pieces(speaker.tokenizer, written, tokens):
            pieces.append(piece)
            yield piece
        if len(written) == most:
            why = "--tokens" if most == self._tokens else f"context: {speaker.context} tokens"
            log.warning("the answer is cut after %d tokens (%s)", most, why)
        self._turns += [asked, _message("assistant", "".join(pieces))]

    def _start(self, speaker: Speaker) -> Renderer:
        """Start the renderer, and find stop tokens. Raises CorpusError, UnsupportedModelError."""
        assert speaker.folder is not None
        template = template_of(speaker.folder / TOKENIZER, remedy=REMEDY)
        self._renderer = renderer = Renderer(template)
        tokenizer, eos = speaker.tokenizer, template.special_tokens.get("eos_token", "")
        self._stops = {speaker.end, tokenizer.token_to_id(eos), end_of_turn(renderer, tokenizer)}
        self._stops |= {*read_stop_tokens(speaker.folder)}
        return renderer

    def _prompt(self, renderer: Renderer, speaker: Speaker, asked: dict[str, Any]) -> list[int]:
        """Tokens of the dialogue, without turns that find no room. Raises CorpusError,
        ValueError."""
        room = min(self._tokens, speaker.context // 2)
        forgotten = 0
        while True:
            messages = [*self._system, *self._turns, asked]
            text = renderer.render(Conversation(PLACE, messages, unanswered=True)).text
            prompt = encode_text(speaker, text)
            if len(prompt) + room <= speaker.context or not self._turns:
                break
            del self._turns[:2]
            forgotten += 1
        if forgotten:
            log.warning(
                "the conversation is longer than the model's context of %d tokens: the oldest "
                "questions and answers (%d) are left out",
                speaker.context,
                forgotten,
            )
        if len(prompt) >= speaker.context:
            raise ValueError(
                f"the question takes {len(prompt)} tokens with the chat template, and the model's "
                f"context is {speaker.context}: ask a shorter one"
            )
        return prompt


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def end_of_turn(renderer: Renderer, tokenizer: Tokenizer) -> int | None:
    """Special token that a chat template puts behind an answer; None: it is plain text."""
    messages = [_message("user", "?"), _message("assistant", ANSWER), _message("user", "?")]
    with suppress(CorpusError):  # `answer` will raise it
        text = renderer.render(Conversation(PLACE, messages, unanswered=True)).text
        _, answer, behind = text.rpartition(ANSWER)
        ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False).ids if answer else []
        if ids and ids[0] in tokenizer.get_added_tokens_decoder():
            return int(ids[0])
    return None
