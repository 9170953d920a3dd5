"""Tests of conversations in various formats, converted to the one that chat templates read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria.node.data.chat import ChatTemplate, Conversation, Template
from planaria.node.data.corpus import CorpusError
from planaria.node.data.messages import Completion, conversation_of, form_of

ASKED = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def read(*messages: Any, **fields: Any) -> Conversation:
    parsed = conversation_of("line 1", {"messages": list(messages), **fields})
    assert isinstance(parsed, Conversation)
    return parsed


def says(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (says([{"type": "text", "text": "a"}, {"text": "b"}, "c"]), says("abc")),
        (says([{"type": "text", "text": "a", "image": None}]), says("a")),
        (says(None, tool_calls=[CALL]), says(None, tool_calls=[CALL])),
        ({"role": "assistant", "tool_calls": [CALL]}, says(None, tool_calls=[CALL])),
        (says("a", tool_calls=[], name=None, more={"x": None, "y": 1}), says("a", more={"y": 1})),
        ({"role": "gpt", "content": "a"}, says("a")),
        ({"role": "Model", "content": "a"}, says("a")),
        ({"from": "bot", "value": "a"}, says("a")),
        ({"role": "human", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "critic", "content": "a"}, {"role": "critic", "content": "a"}),
        ({"role": "user", "content": None}, {"role": "user", "content": None}),
    ],
)
def test_a_message_in_the_one_form(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(message).messages == [expected]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_names_that_transformers_gives_them(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{% for m in messages %}{{ m.thinking }}, {{ m.reasoning_content }}{% endfor %}"
    message = says("a", **{name: "hm"})
    [text], _ = render_jinja_template([[message]], chat_template=template)
    rendered = ChatTemplate(Template(template, "it", {})).render(read(message))
    assert rendered.text == text == "hm, hm"


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}, {"x": 1, "y": None}])
@pytest.mark.parametrize("wrapped", [True, False])
def test_arguments_of_a_call_are_an_object(arguments: Any, wrapped: bool) -> None:
    inner, expected = {"name": "f", "arguments": arguments}, {"name": "f", "arguments": {"x": 1}}
    call = {"function": inner} if wrapped else inner
    [message] = read(says(None, tool_calls=[call])).messages
    assert message["tool_calls"] == [{"function": expected} if wrapped else expected]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        *(([TOOL], [TOOL]), (json.dumps([TOOL]), [TOOL]), ([json.dumps(TOOL)], [TOOL])),
        ([{**TOOL, "strict": None}], [TOOL]),
        *((None, None), ([], None), ("", None)),
    ],
)
def test_tools_are_a_list_of_objects_or_none(tools: Any, expected: Any) -> None:
    assert read(ASKED, tools=tools).tools == expected


@pytest.mark.parametrize(
    ("fields", "unscored"),
    [
        ({"weight": 0}, [0]),
        ({"weight": 1}, []),
        ({"weight": None, "train": None}, []),
        ({"train": False}, [0]),
        ({"train": True}, []),
    ],
)
def test_a_message_may_say_that_it_is_not_to_be_learned(
    fields: dict[str, Any], unscored: list[int]
) -> None:
    parsed = read(says("a", **fields))
    assert (parsed.unscored, parsed.messages) == (unscored, [says("a")])


@pytest.mark.parametrize(
    ("record", "form", "messages", "unscored"),
    [
        ({"messages": [ASKED, says("a")]}, "messages", [ASKED, says("a")], []),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            *("sharegpt", [ASKED, says("a")], []),
        ),
        (
            {"conversations": [says("a")], "system": "s"},
            *("sharegpt", [{"role": "system", "content": "s"}, says("a")], []),
        ),
        ({"instruction": "q", "output": "a"}, "alpaca", [ASKED, says("a")], []),
        (
            {"instruction": "q", "input": "more", "output": "a", "system": "", "history": None},
            *("alpaca", [{"role": "user", "content": "q\nmore"}, says("a")], []),
        ),
        (
            {"instruction": "q", "input": None, "output": "a", "history": [["q", "b"]]},
            *("alpaca", [ASKED, says("b"), ASKED, says("a")], []),
        ),
        (
            {"prompt": [ASKED, says("b"), ASKED], "completion": [says("a")]},
            *("completion", [ASKED, says("b"), ASKED, says("a")], [0, 1, 2]),
        ),
    ],
)
def test_each_form_is_told_by_its_fields(
    record: dict[str, Any], form: Any, messages: list[Any], unscored: list[int]
) -> None:
    assert form_of(record, "text") == form
    assert form_of({**record, "text": None}, "text") == form
    assert form_of({**record, "text": "t"}, "text") == "text"
    parsed = conversation_of("line 1", record, form)
    assert isinstance(parsed, Conversation)
    assert (parsed.messages, parsed.unscored) == (messages, unscored)


def test_completions_that_may_be_bad_examples_are_of_no_form() -> None:
    record = {"prompt": "q", "completion": "a"}
    assert form_of(record, "text") == "completion"
    assert form_of({**record, "label": False}, "text") is None


def test_a_prompt_and_its_completion_may_be_texts() -> None:
    record = {"prompt": "1 + 1 =", "completion": " 2", "messages": None}
    assert form_of(record, "text") == "completion"
    assert conversation_of("line 1", record, "completion") == Completion("line 1", "1 + 1 =", " 2")
    assert form_of({"question": "1 + 1 ="}, "text") is None


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": []}, r"'messages' is no list of messages but \[\]"),
        ({"messages": ["hi"]}, "message 0 has no role, as in .* but is 'hi'"),
        ({"messages": [{"role": 1}]}, "message 0 has no role"),
        ({"messages": [says([{"type": "image_url"}])]}, "a part .* is of type 'image_url'"),
        ({"messages": [says(["a", 1])]}, "a part of the content is of type 'int'"),
        ({"messages": [says({"a": 1})]}, "the content is no text and no list of parts but {'a'"),
        ({"messages": [says(None)]}, "message 0: the assistant says nothing"),
        ({"messages": [says(" ", tool_calls=[])]}, "message 0: the assistant says nothing"),
        ({"messages": [says("a", tool_calls="f")]}, "tool_calls is no list of calls but 'f'"),
        ({"messages": [says("", tool_calls=[{"f": 1}])]}, "a call of a tool has no name"),
        (
            {"messages": [says("", tool_calls=[{"name": "f", "arguments": "{"}])]},
            "the arguments of f: '{' is not JSON",
        ),
        (
            {"messages": [says("", tool_calls=[{"name": "f", "arguments": "[]"}])]},
            r"the arguments of f are no object but \[\]",
        ),
        ({"messages": [ASKED], "tools": "weather"}, "'tools': 'weather' is not JSON"),
        ({"messages": [ASKED], "tools": '{"name": "f"}'}, "'tools' is no list of objects but {"),
        ({"messages": [ASKED], "tools": [1]}, "'tools' has no object but 1"),
        ({"messages": [says("a", weight=0.5)]}, "weight is 0 or 1, not 0.5"),
        ({"messages": [says("a", train="no")]}, "train is true or false, not 'no'"),
        (
            {"conversations": [{"from": "narrator", "value": "a"}]},
            "message 0 has the unknown role 'narrator'",
        ),
        ({"instruction": "q", "output": 5}, "'output' is no text but int"),
        ({"instruction": "q", "output": ""}, "message 1: the assistant says nothing"),
        (
            {"instruction": "q", "output": "a", "history": ["q"]},
            "'history' is no list of",
        ),
        ({"prompt": "q", "completion": []}, "must be two texts or two lists of messages, not str"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(
    record: dict[str, Any], why: str
) -> None:
    form = form_of(record, "text")
    assert form is not None
    with pytest.raises(CorpusError, match=f"line 1:? ?.*{why}"):
        conversation_of("line 1", record, form)


def test_a_form_that_is_named_needs_its_fields() -> None:
    with pytest.raises(CorpusError, match=r"no field 'output', as records of --format alpaca"):
        conversation_of("line 1", {"instruction": "q"}, "alpaca")
