"""Records to conversations, in the form that chat templates read.

A record is of one of FORMS, recognized by its fields. In each form, its messages pass
`_read_message`, whose rules are one function each. This module reads no files and knows no
templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args

from planaria.bootstrap.escaping import shortened
from planaria.node.data.chat import THOUGHT, Conversation
from planaria.node.data.corpus import CorpusError
from planaria.node.data.options import Form

FORMS: Final[dict[Form, tuple[str, ...]]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""Fields of the records of each form, in the order of precedence."""
ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "observation": "tool",
}
"""Aliases of roles."""
USUAL: Final = {"system", "developer", "user", "assistant", "tool", "ipython"}
assert {*FORMS, "text"} == {*get_args(Form)}


class Completion(NamedTuple):
    """A prompt and its completion, as texts."""

    place: str  # where it is, for errors
    prompt: str
    completion: str


def form_of(record: Mapping[str, Any], text_field: str) -> Form | None:
    """The first of FORMS whose fields a record has, nulls not counted; None: no form. Completions
    with a `label` are preference data, no examples."""
    present = {key for key, value in record.items() if value is not None}
    if text_field in present:
        return "text"
    form = next((form for form, fields in FORMS.items() if present >= {*fields}), None)
    return None if form == "completion" and "label" in present else form


def conversation_of(
    place: str, record: Mapping[str, Any], form: Form = "messages"
) -> Conversation | Completion:
    """The conversation in a record of this form. `place`: for errors. Raises CorpusError."""
    for field in FORMS[form]:
        if record.get(field) is None:
            fields = ", ".join(record) or "none"
            raise CorpusError(
                f"{place} has no field {field!r}, as records of --format {form} have: its fields "
                f"are {fields}"
            )
    prompted = 0  # messages of the prompt
    match form:
        case "completion":
            prompt, completion = record["prompt"], record["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return Completion(place, prompt, completion)
            if not (isinstance(prompt, list) and isinstance(completion, list)):
                raise CorpusError(
                    f"{place}: 'prompt' and 'completion' must be two texts or two lists of "
                    f"messages, not {type(prompt).__name__} and {type(completion).__name__}"
                )
            messages, prompted = [*prompt, *completion], len(prompt)
        case "alpaca":
            messages = _alpaca_messages(place, record)
        case "sharegpt":
            messages = _message_list(place, "conversations", record["conversations"])
            if record.get("system"):
                messages = [{"role": "system", "content": record["system"]}, *messages]
        case _:
            messages = _message_list(place, "messages", record["messages"])
    read = [_read_message(f"{place}: message {at}", message) for at, message in enumerate(messages)]
    unscored = [at for at, (_, scored) in enumerate(read) if not scored or at < prompted]
    tools = _tools(place, record.get("tools"))
    return Conversation(place, [message for message, _ in read], tools, unscored=unscored)


def _message_list(place: str, field: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{place}: {field!r} is no list of messages but {shortened(value)}")
    return value


def _alpaca_messages(place: str, record: Mapping[str, Any]) -> list[Any]:
    """The messages of an Alpaca record: instruction and input are the user's, in two lines."""
    for field in ("system", "instruction", "input", "output"):
        if not isinstance(record.get(field) or "", str):
            raise CorpusError(f"{place}: {field!r} is no text but {type(record[field]).__name__}")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorpusError(
                f"{place}: 'history' is no list of questions with answers but has {shortened(pair)}"
            )
        messages += _question_and_answer(*pair)
    question = "\n".join(filter(None, (record["instruction"], record.get("input"))))
    return [*messages, *_question_and_answer(question, record["output"])]


def _question_and_answer(question: object, answer: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _read_message(place: str, message: object) -> tuple[dict[str, Any], bool]:
    """A message for a template, and whether it is scored if the assistant's. Raises CorpusError."""
    if not isinstance(message, dict):
        raise CorpusError(f"{place} has no role, as in {_EXAMPLE}, but is {shortened(message)}")
    fields = _without_nulls(message)
    scored = _pop_scored(place, fields)
    role = _pop_role(place, fields)
    content = _pop_content(place, fields)
    thoughts = _thoughts(place, fields)
    calls = _pop_calls(place, fields)
    if role == "assistant" and not content.strip() and not calls:
        raise CorpusError(
            f"{place}: the assistant says nothing: it needs content, or a call of a tool"
        )
    more = {"tool_calls": calls} if calls else {}
    return {**fields, **thoughts, "role": role, "content": content or None, **more}, scored


_EXAMPLE: Final = '{"role": "user", "content": "What is a planarian?"}'


def _without_nulls(value: Any) -> Any:
    """Drop a record's keys whose value is null: Arrow gives all records the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _pop_scored(place: str, fields: dict[str, Any]) -> bool:
    """Remove `weight` and `train` from a message: with 0 or false it isn't scored."""
    weight, train = fields.pop("weight", 1), fields.pop("train", True)
    if weight not in (0, 1):
        raise CorpusError(f"{place}: weight is 0 or 1, not {shortened(weight)}")
    if not isinstance(train, bool):
        raise CorpusError(f"{place}: train is true or false, not {shortened(train)}")
    return bool(weight) and train


def _pop_role(place: str, fields: dict[str, Any]) -> str:
    """A message's role, by its usual name. Also removes ShareGPT's key for it, `from`."""
    sender = fields.pop("from", None)
    role = fields.get("role", sender)
    if not isinstance(role, str):
        raise CorpusError(f"{place} has no role, as in {_EXAMPLE}, but is {shortened(fields)}")
    name = ROLES.get(role.lower(), role.lower())
    if name in USUAL:
        return name
    if "role" not in fields:
        raise CorpusError(
            f"{place} has the unknown role {role!r}: use {', '.join(sorted({*USUAL, *ROLES}))}"
        )
    return role  # the template may know it


def _pop_content(place: str, fields: dict[str, Any]) -> str:
    """A message's content as one text. Also removes ShareGPT's key for it, `value`."""
    value = fields.pop("value", "")
    content = fields.get("content", value)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CorpusError(
            f"{place}: the content is no text and no list of parts but {shortened(content)}"
        )
    return "".join(_text_of_part(place, part) for part in content)


def _text_of_part(place: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise CorpusError(
            f"{place}: a part of the content is of type {shortened(kind)}, but training reads only "
            "text: leave it out"
        )
    return text


def _thoughts(place: str, fields: dict[str, Any]) -> dict[str, str]:
    """The assistant's thoughts in a message, by the names that transformers has for templates."""
    names = THOUGHT, "thinking", "reasoning"
    thought = next((fields[name] for name in names if name in fields), "")
    if not isinstance(thought, str):
        raise CorpusError(f"{place}: {THOUGHT} is no text but {shortened(thought)}")
    return {"thinking": fields.get("thinking", thought), THOUGHT: thought} if thought else {}


def _pop_calls(place: str, fields: dict[str, Any]) -> list[Any]:
    """A message's tool calls, with arguments as objects, removed from it."""
    calls = fields.pop("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise CorpusError(f"{place}: tool_calls is no list of calls but {shortened(calls)}")
    return [_read_call(place, call) for call in calls]


def _read_call(place: str, call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise CorpusError(f"{place}: a call of a tool has no name: {shortened(call)}")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(f"{place}: the arguments of {inner['name']}", arguments)
    if not isinstance(arguments, dict):
        raise CorpusError(
            f"{place}: the arguments of {inner['name']} are no object but {shortened(arguments)}"
        )
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _tools(place: str, tools: object) -> list[Any] | None:
    """A record's tools as objects; None: no tools."""
    tools = _parse_json(f"{place}: 'tools'", tools) if isinstance(tools, str) and tools else tools
    if not tools:
        return None
    if not isinstance(tools, list):
        raise CorpusError(f"{place}: 'tools' is no list of objects but {shortened(tools)}")
    parsed = [
        _parse_json(f"{place}: a tool", tool) if isinstance(tool, str) else tool for tool in tools
    ]
    if not_objects := [tool for tool in parsed if not isinstance(tool, dict)]:
        raise CorpusError(f"{place}: 'tools' has no object but {shortened(not_objects[0])}")
    return [_without_nulls(tool) for tool in parsed]


def _parse_json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place}: {shortened(text)} is not JSON: {error}") from error
