"""Conversations to text, by the chat template that comes with a tokenizer.

A template is Jinja, rendered as `apply_chat_template` of transformers does it, in a sandbox; it has
no `strftime_now`, since what is prepared must not depend on the day. What lies between its
`{% generation %}` and `{% endgeneration %}` is the assistant's. In a template without them, an
assistant's message is what its rendering adds to that of all before it and the generation prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from planaria.bootstrap.small_files import read_small
from planaria.node.data.corpus import CorpusError
from planaria.node.data.tokenizer import CONFIG, TEMPLATE, read_object, special_tokens

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what the assistant says, while a text is rendered: Unicode has no characters there."""
MARKED: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_FAILURES: Final = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,  # Python finds it in what Jinja has made of the template
    RuntimeError,  # RecursionError among them
    MemoryError,
)
"""What a template may raise, which is a program of whoever wrote it."""


class Conversation(NamedTuple):
    """One that is there in messages."""

    place: str  # where, in words
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    unanswered: bool = False  # rendered with the generation prompt, for a model to answer


class Rendered(NamedTuple):
    text: str
    scored: list[tuple[int, int]]
    """What the assistant says: its first characters, and those behind its last ones."""


def conversation(place: str, record: Mapping[str, Any]) -> Conversation:
    """Of a record with `messages`, and perhaps `tools`. Raises CorpusError."""
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise CorpusError(f"{place}: 'messages' is no list of messages but {_named(messages)}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CorpusError(
                f"{place}: message {number} has no role, as in "
                '{"role": "user", "content": "What is a planarian?"}, but is ' + _named(message)
            )
    text = json.dumps(record, ensure_ascii=False, default=str)
    if BEGIN in text or END in text:
        raise CorpusError(f"{place} has U+FDD0 or U+FDD1, which are no characters: remove them")
    return Conversation(place, messages, record.get("tools"))


class Template(NamedTuple):
    """One that is yet to be compiled."""

    source: str
    name: str  # says where it is from
    special_tokens: dict[str, str]


class ChatTemplate:
    """`name` says where the template is from; `special_tokens` has bos_token, eos_token, ... Raises
    CorpusError when it can't be read."""

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str]) -> None:
        self._name, self._special = name, special_tokens
        self._marked = MARKED.search(source) is not None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CorpusError(f"{name}, line {error.lineno}: {error.message}") from error
        except _FAILURES as error:
            raise CorpusError(f"{name} is no template: {error!r}") from error

    def render(self, conversation: Conversation) -> Rendered:
        """Raises CorpusError."""
        found = self._text(conversation, len(conversation.messages), conversation.unanswered)
        if self._marked or conversation.unanswered:
            return _unmarked(found)
        return Rendered(found, list(self._turns(conversation, found)))

    def _turns(self, conversation: Conversation, whole: str) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            before = self._text(conversation, number, add_generation_prompt=True)
            said = self._text(conversation, number + 1)
            if not (said.startswith(before) and whole.startswith(said)):
                raise CorpusError(
                    f"{conversation.place}: {self._name} renders message {number} otherwise when "
                    "another one follows, so what the assistant says can't be told: put "
                    "{% generation %} and {% endgeneration %} around it in a copy of the template, "
                    "and give that with --chat-template"
                )
            yield len(before), len(said)

    def _text(
        self, conversation: Conversation, count: int, add_generation_prompt: bool = False
    ) -> str:
        """Of its first messages. Raises CorpusError."""
        try:
            return self._template.render(
                messages=conversation.messages[:count],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (jinja2.TemplateError, *_FAILURES) as error:
            why = str(error) or type(error).__name__
            raise CorpusError(f"{conversation.place}: {self._name} refuses it: {why}") from error


def template_of(
    tokenizer: Path, file: Path | None = None, remedy: str = "give one with --chat-template FILE"
) -> Template:
    """That of `file`, or the one beside a tokenizer.json: chat_template.jinja, or the chat_template
    of tokenizer_config.json. Raises CorpusError, which ends with the remedy when there is none."""
    folder = tokenizer.absolute().parent
    config, special = read_object(folder / CONFIG), special_tokens(folder)
    beside = folder / TEMPLATE
    if file is None and beside.exists():
        file = beside
    if file is not None:
        return Template(_read(file), str(file), special)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by their names
        found = {one["name"]: one["template"] for one in found}.get("default")
    if not isinstance(found, str):
        raise CorpusError(
            f"{folder} has no chat template, by which messages become text: neither {beside.name} "
            f"nor chat_template in tokenizer_config.json; {remedy}"
        )
    return Template(found, f"the chat template in {folder / CONFIG}", special)


def _read(file: Path) -> str:
    """Raises CorpusError."""
    try:
        return read_small(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"can't read {file}: {error}") from error


class _Generation(Extension):
    """`{% generation %}`: marks in the text what is inside."""

    tags = {"generation"}  # noqa: RUF012 (as it is in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _unmarked(text: str) -> Rendered:
    parts: list[str] = []
    scored: list[tuple[int, int]] = []
    length = began = 0
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN:
            began = length
        elif part == END:
            scored.append((began, length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), scored)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what HTML has a meaning for."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _named(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
