"""Conversations to text, by the chat template that comes with a tokenizer.

A template is Jinja, rendered as `apply_chat_template` of transformers does it, in a sandbox. It has
`strftime_now` only for a model to answer, since prepared data must not depend on the day. Text
between `{% generation %}` and `{% endgeneration %}` is the assistant's. In a template without these
tags, it is the text that depends on the assistant's messages, and the token behind each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from planaria.node.data.corpus import CorpusError, load_tokenizer
from planaria.node.data.tokenizer import (
    CONFIG,
    DEFAULT,
    FOR_TOOLS,
    TEMPLATE,
    chat_templates,
    read_template,
    special_tokens,
)

BEGIN, END, MARK = MARKS = "\ufdd0", "\ufdd1", "\ufdd2"
"""Unicode noncharacters, which no conversation has. BEGIN and END mark the assistant's text in a
template with generation tags. MARK replaces it, to find what of the text depends on it."""
THOUGHT: Final = "reasoning_content"
"""Key of a message for the assistant's thoughts."""
MARKED: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_FAILURES: Final = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,  # Python may raise it for Jinja's compiled template
    RuntimeError,  # RecursionError among them
    MemoryError,
)
"""Exceptions that a template may raise: it is a program that anybody may have written."""


class Conversation(NamedTuple):
    """A conversation as a list of messages, for a chat template."""

    place: str  # where it is, for errors
    messages: list[dict[str, Any]]  # content may be None
    tools: list[Any] | None = None
    unanswered: bool = False  # rendered with the generation prompt, for a model to answer
    unscored: Sequence[int] = ()  # indices of messages that aren't scored


class Rendered(NamedTuple):
    text: str
    scored: list[tuple[int, int]]
    """The assistant's spans: positions of the first character and behind the last one."""
    open_end: bool = False
    """True: no token ends the last span, only the end of the document."""


class Template(NamedTuple):
    """The source of a chat template, not yet compiled."""

    source: str
    name: str  # origin, for errors
    special_tokens: dict[str, str]  # bos_token, eos_token, ...
    ends: Sequence[str] = ()  # all special tokens of the tokenizer, any of which may end a turn
    for_tools: str = ""  # source for conversations with tools; empty: the same


class ChatTemplate:
    """A compiled chat template. Raises CorpusError when the template can't be read.

    `begins`: called before each rendering, of which a conversation needs several.
    """

    def __init__(self, template: Template, begins: Callable[[], object] = lambda: None) -> None:
        source, name, special_tokens, ends, for_tools = template
        with_tools = template._replace(source=for_tools, for_tools="")
        self._with_tools = ChatTemplate(with_tools, begins) if for_tools else None
        self._begins = begins
        self._name, self._special = name, special_tokens
        ends_and_special = sorted({*ends, *special_tokens.values()} - {""}, key=len, reverse=True)
        any_of = "|".join(map(re.escape, ends_and_special))
        eos = re.escape(special_tokens.get("eos_token", ""))
        of_turn = rf"\s*(?:{any_of})(?:(?:{any_of})*?{eos})?"  # one token, or several up to eos
        self._end = re.compile(of_turn if ends_and_special else r"(?!)")
        self._ends = re.compile(rf"\s*(?:{any_of})")
        self._marked = MARKED.search(source) is not None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CorpusError(f"{name}, line {error.lineno}: {error.message}") from error
        except _FAILURES as error:
            raise CorpusError(f"{name} is no template: {error!r}") from error

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation rendered by the template in this process. Raises CorpusError."""
        if conversation.tools is not None and self._with_tools is not None:
            return self._with_tools.render(conversation)
        messages = [
            {**message, "content": _NoContent()} if message.get("content") is None else message
            for message in conversation.messages
        ]
        text = self._render_text(conversation, messages, conversation.unanswered)
        if conversation.unanswered:
            return _without_marks(text)
        self._check_calls(conversation, messages, text)
        if not self._marked:
            return self._with_spans(conversation, messages, text)
        rendered = _without_marks(text)
        left_out = [
            self._span_of(conversation, messages, rendered.text, at) for at in conversation.unscored
        ]
        return rendered._replace(
            scored=[
                (begin, end)
                for begin, end in rendered.scored
                if not any(span and begin < span[1] and span[0] < end for span in left_out)
            ]
        )

    def _check_calls(
        self, conversation: Conversation, messages: list[dict[str, Any]], text: str
    ) -> None:
        """Raises CorpusError for a text without its messages' tool calls."""
        if not any(message.get("tool_calls") for message in messages):
            return
        without = [
            {key: value for key, value in message.items() if key != "tool_calls"}
            for message in messages
        ]
        try:
            ignored = self._render_text(conversation, without) == text
        except CorpusError:  # so it reads them
            return
        if ignored:
            raise CorpusError(
                f"{conversation.place}: {self._name} ignores calls of tools: give one that writes "
                "them with --chat-template, or leave the calls out"
            )

    def _with_spans(
        self, conversation: Conversation, messages: list[dict[str, Any]], text: str
    ) -> Rendered:
        """The conversation's text, with the assistant's spans and the tokens that end its turns."""
        scored, open_end = [], False
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at in conversation.unscored:
                continue
            if (span := self._span_of(conversation, messages, text, at)) is None:
                continue
            begin, end = span
            ending = self._end.match(text, end)
            open_end = ending is None and not text[end:].strip()
            scored.append((begin, ending.end() if ending else end))
        return Rendered(text, scored, open_end)

    def _span_of(
        self, conversation: Conversation, messages: list[dict[str, Any]], text: str, at: int
    ) -> tuple[int, int] | None:
        """The span of the text that depends on the assistant's message `at`; None: nothing does.

        It is where the text differs from a rendering with a mark in place of the message.
        """
        message, before = messages[at], ""
        others = [{"role": message["role"], "content": MARK}]
        if message.get("tool_calls"):  # a template may insist on a call before a tool's answer
            others.append(_with_calls(message, name=MARK, arguments={}))
        for other in others:
            changed = [*messages[:at], other, *messages[at + 1 :]]
            try:
                marked = _without_marks(self._render_text(conversation, changed)).text
                break
            except CorpusError:
                if other is others[-1]:
                    raise
                before = self._render_text(conversation, messages[:at], add_generation_prompt=True)
        if other is others[0] and marked.count(MARK) > 1:
            raise CorpusError(
                f"{conversation.place}: {self._name} writes message {at} more than "
                "once, so the assistant's tokens can't be marked: put {% generation %} and "
                "{% endgeneration %} around it in a copy of the template, and give that with "
                "--chat-template"
            )
        begin = _common_prefix(text, before or marked)
        end = _end_of_difference(text, marked, begin)
        ends_within = self._end.search(text, begin, end)  # a template may write the answer there
        if before or (ends_within and message.get("tool_calls")):
            of_calls = self._end_of_calls(conversation, messages, text, at)
            if before or self._ends.sub("", text[of_calls:end]):
                end = of_calls
        content = message["content"].strip()
        if content and text.endswith(content, 0, end):  # also if the template itself writes it
            begin = min(begin, end - len(content))
        # the model writes the tag before a thought, too, unless the generation prompt has it
        reformatted = "" if text.startswith(content, begin) else content
        before_answer, tag, _ = reformatted.partition("</think>")
        within = before_answer.rpartition("<think>")[2] if tag else ""
        if thought := message.get(THOUGHT, within).strip():
            prompt = self._render_text(conversation, messages[:at], add_generation_prompt=True)
            if text.startswith(prompt) and thought in text[len(prompt) : end]:
                begin = min(begin, len(prompt))
        return (begin, end) if begin < end else None

    def _end_of_calls(
        self, conversation: Conversation, messages: list[dict[str, Any]], text: str, at: int
    ) -> int:
        """Where the token is that ends the calls in message `at`; without one, the text's end."""
        other = _with_calls(messages[at], arguments={MARK: MARK})
        try:
            changed = [*messages[:at], other, *messages[at + 1 :]]
            marked = _without_marks(self._render_text(conversation, changed)).text
        except CorpusError:
            return len(text)
        behind = _end_of_difference(text, marked, _common_prefix(text, marked))
        ending = self._end.search(text, behind)
        return ending.start() if ending else len(text)

    def _render_text(
        self,
        conversation: Conversation,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
    ) -> str:
        """Render messages by the compiled template. Raises CorpusError."""
        self._begins()
        try:
            return self._template.render(
                messages=messages,
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **({"strftime_now": _strftime_now} if conversation.unanswered else {}),
                **self._special,
            )
        except (jinja2.TemplateError, *_FAILURES) as error:
            why = str(error) or type(error).__name__
            raise CorpusError(f"{conversation.place}: {self._name} refuses it: {why}") from error


class _NoContent(str):
    """The content of a message that has none. A template's test `is none` holds for it, as in
    transformers, and it is written as an empty string."""


def _with_calls(message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A message with these fields in each of its tool calls."""
    calls = [
        {**call, "function": {**call["function"], **fields}}
        if "function" in call
        else {**call, **fields}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _end_of_difference(text: str, other: str, begin: int) -> int:
    """Where a text ends to differ from another one, which is equal up to `begin`."""
    return len(text) - _common_prefix(text[begin:][::-1], other[begin:][::-1])


def _common_prefix(text: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        same = text.startswith(other[least:middle], least)
        least, most = (middle, most) if same else (least, middle - 1)
    return least


def template_of(
    tokenizer: Path, file: Path | None = None, remedy: str = "give one with --chat-template FILE"
) -> Template:
    """The chat template in `file`, or else the one beside a tokenizer.json (chat_template.jinja,
    tokenizer_config.json). Raises CorpusError, which ends with the remedy, without one."""
    folder = tokenizer.absolute().parent
    special = special_tokens(folder)
    added = load_tokenizer(tokenizer).get_added_tokens_decoder().values()
    ends = [token.content for token in added if token.special]
    if file is not None:
        return Template(read_template(file), str(file), special, ends)
    templates = chat_templates(folder)
    if DEFAULT not in templates:
        raise CorpusError(
            f"{folder} has no chat template, by which messages become text: neither {TEMPLATE} "
            f"nor chat_template in {CONFIG}; {remedy}"
        )
    place = folder / (TEMPLATE if (folder / TEMPLATE).is_file() else CONFIG)
    for_tools = templates.get(FOR_TOOLS, "")
    return Template(templates[DEFAULT], f"the chat template in {place}", special, ends, for_tools)


class _Generation(Extension):
    """Jinja tag `{% generation %}`, which marks the text inside."""

    tags = {"generation"}  # noqa: RUF012 (as it is in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _without_marks(text: str) -> Rendered:
    """A template's output without BEGIN and END, with the spans that these mark."""
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
    environment.tests["none"] = lambda value: value is None or isinstance(value, _NoContent)
    environment.globals["raise_exception"] = _raise_template_error
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's filter `tojson` for chat templates, without the HTML escapes of Jinja's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
