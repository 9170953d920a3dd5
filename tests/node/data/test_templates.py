"""Tests of which tokens of a conversation are scored, by templates like published ones."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.node.data.chat import ChatTemplate, Conversation, Template
from planaria.node.data.corpus import CorpusError

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}" + PROMPT
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + "
    "m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}" + PROMPT
)
QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}"
    '{% endif %}{{ \'\n<tool_call>\n{"name": "\' }}{{ call.name }}{{ \'", "arguments": \' }}'
    "{{ call.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
)
QWEN_TOOL = (
    "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% if loop.last or "
    "loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN25 = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    + QWEN_CALLS
    + "{% elif m.role == 'tool' %}"
    + QWEN_TOOL
    + "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}" + PROMPT
)
QWEN3 = (
    "{% set ns = namespace(last=messages | length - 1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% set thought = '' %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
    "{{ content.lstrip('\n') }}{% else %}"
    "{{ '<|im_start|>assistant\n' + content }}{% endif %}{% if m.tool_calls %}"
    + QWEN_CALLS
    + "{% else %}{{ '<|im_end|>\n' }}{% endif %}{% elif m.role == 'tool' %}"
    + QWEN_TOOL
    + "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}" + PROMPT
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{% if 'tool_calls' in m %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}{% else %}"
    "{{ m['content'] | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% set ns = namespace(index=0) %}{% for m in messages if m.role != 'tool' and m.tool_calls is "
    "undefined %}{% if (m['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}"
    "{% endfor %}{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + '[/INST]' }}{% elif m.tool_calls is defined %}"
    "{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{{ ']' + eos_token }}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + "
    "eos_token }}{% else %}{{ '[TOOL_RESULTS] ' + m['content'] + '[/TOOL_RESULTS]' }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set role = 'model' if m['role'] == "
    "'assistant' else m['role'] %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + "
    "' [/INST]' }}{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
COMMAND_R7B = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m['role'] == 'user' %}"
    "{{ '<|USER_TOKEN|>' + m['content'] + eos_token }}{% else %}{{ '<|CHATBOT_TOKEN|>"
    "<|START_RESPONSE|>' + m['content'] + '<|END_RESPONSE|>' + eos_token }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
)
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATES = {
    "ChatML": (CHATML, IM, "<|im_end|>"),
    "SmolLM2": (SMOLLM2, IM, "<|im_end|>"),
    "Qwen 2.5": (QWEN25, IM, "<|im_end|>"),
    "Qwen 3": (QWEN3, IM, "<|im_end|>"),
    "Llama 3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "Mistral": (MISTRAL, ["[INST]", "[/INST]", "[TOOL_CALLS]"], "</s>"),
    "Gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "Llama 2": (LLAMA2, [], " </s>"),
    "Command R7B": (
        COMMAND_R7B,
        ["<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        "<|END_RESPONSE|></s>",
    ),
    "no end": (NO_END, [], ""),
}
"""Source, special tokens, and the text that ends a turn."""
THOUGHTFUL = "<think>\nmaybe\n</think>\n\nyes"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def scored(name: str, *messages: dict[str, Any], unscored: tuple[int, ...] = ()) -> list[str]:
    source, ends, _ = TEMPLATES[name]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(Template(source, name, special, ends))
    conversation = Conversation("line 1", list(messages), unscored=unscored)
    text, spans, _ = template.render(conversation)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "answers", [["yes"], ["yes", "no"], ["yes", "yes", "user"], ["</", "\n\\"]]
)
def test_what_the_assistant_says_is_scored_with_its_end(name: str, answers: list[str]) -> None:
    messages = [message for answer in answers for message in (user("yes"), assistant(answer))]
    trims = name in ("Llama 3", "Mistral", "Gemma", "Qwen 3")
    expected = [answer.strip() if trims else answer for answer in answers]
    assert scored(name, *messages) == [answer + TEMPLATES[name][2] for answer in expected]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_not_to_be_learned_is_left_out(name: str) -> None:
    messages = user("q"), assistant("a"), user("q"), assistant("b")
    assert scored(name, *messages, unscored=(1,)) == ["b" + TEMPLATES[name][2]]


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("Qwen 2.5", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'),
        ("Qwen 3", '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'),
        ("Llama 3", '{"name": "f", "parameters": {"x": 1}}<|eot_id|>'),
        ("Mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]</s>'),
    ],
)
def test_calls_of_tools_are_scored(name: str, called: str) -> None:
    answered = {"role": "tool", "content": "5"}
    messages = user("q"), assistant(None, tool_calls=[CALL]), answered, assistant("It is 5.")
    assert scored(name, *messages) == [called, "It is 5." + TEMPLATES[name][2]]


@pytest.mark.parametrize("generation", ["", "{% generation %}"])
def test_calls_that_the_template_would_leave_out_are_refused(generation: str) -> None:
    """It would be learned to say nothing instead."""
    end = generation.replace("generation", "endgeneration")
    source = f"{{% for m in messages %}}{generation}{{{{ m.content }}}}</s>{end}{{% endfor %}}"
    template = ChatTemplate(Template(source, "it", {"eos_token": "</s>"}))
    messages = [user("q"), assistant(None, tool_calls=[CALL]), assistant("It is 5.")]
    with pytest.raises(CorpusError, match="line 1: it ignores calls of tools"):
        template.render(Conversation("line 1", messages))


def test_what_a_tool_answers_is_not_scored_though_the_template_writes_it_by_the_call() -> None:
    """As Gemma 4's and gpt-oss's do, with the tool's name."""
    answers = (
        "{% for t in messages if t.role == 'tool' %}{{ '<|response>' + "
        "m.tool_calls[0].function.name + ':' + t.content + '<response|>' }}{% endfor %}"
    )
    source = (
        "{% for m in messages if m.role != 'tool' %}{{ '<|turn>' + m.role + ':' }}"
        "{% if m.tool_calls %}{{ '<|call>' + m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<call|>' }}" + answers + "{% else %}"
        "{{ m.content + '<turn|>' }}{% endif %}{% endfor %}"
    )
    ends = ["<|turn>", "<turn|>", "<|call>", "<call|>", "<|response>", "<response|>"]
    template = ChatTemplate(Template(source, "it", {"eos_token": "</s>"}, ends))
    messages = [user("?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "sun"}]
    rendered = template.render(Conversation("", [*messages, assistant("yes")]))
    shown = [rendered.text[begin:end] for begin, end in rendered.scored]
    assert shown == ['<|call>f{"x": 1}<call|>', "yes<turn|>"]


def test_thoughts_are_scored_where_the_template_shows_them() -> None:
    thoughtful = assistant(THOUGHTFUL)
    for same in thoughtful, assistant("<think>maybe</think>yes"), assistant("maybe</think>\nyes"):
        assert scored("Qwen 3", user("q"), same) == [f"{THOUGHTFUL}<|im_end|>"]
    turns = user("q"), thoughtful, user("and"), assistant("no")
    assert scored("Qwen 3", *turns) == ["yes<|im_end|>", "no<|im_end|>"]
    apart = assistant("yes", reasoning_content="maybe\n")
    assert scored("Qwen 3", user("q"), apart) == [f"{THOUGHTFUL}<|im_end|>"]
    assert scored("Qwen 3", user("q"), apart, user("and"), apart) == [
        "yes<|im_end|>",
        f"{THOUGHTFUL}<|im_end|>",
    ]


def test_a_document_that_no_token_ends_is_left_to_its_end_token() -> None:
    conversation = Conversation("line 1", [user("q"), assistant("a")])
    for name in ("ChatML", "no end"):
        source, ends, _ = TEMPLATES[name]
        rendered = ChatTemplate(Template(source, name, {}, ends)).render(conversation)
        assert rendered.open_end is (name == "no end")


def test_no_content_is_no_text_and_none() -> None:
    source = (
        "{% for m in messages %}{{ '<' + m.content + '>' ~ (m.content is none) }}"
        "{{ m.tool_calls and 'call' }}{% endfor %}"
    )
    conversation = Conversation("line 1", [user(""), assistant(None, tool_calls=[CALL])])
    template = ChatTemplate(Template(source, "it", {}))
    assert template.render(conversation).text == "<>False<>Truecall"


def test_a_template_may_ask_for_the_day_if_a_model_is_to_answer() -> None:
    """As gpt-oss's does. Prepared data must not depend on the day."""
    template = ChatTemplate(Template("{{ strftime_now('%%') + messages[0].content }}", "it", {}))
    question = Conversation("line 1", [user("?")], unanswered=True)
    assert template.render(question).text == "%?"
    with pytest.raises(CorpusError, match="'strftime_now' is undefined"):
        template.render(question._replace(unanswered=False))


def test_what_is_written_twice_can_not_be_told() -> None:
    template = ChatTemplate(Template("{{ messages[0].content * 2 }}", "it", {}))
    with pytest.raises(
        CorpusError, match=r"line 1: it writes message 0 more than once.*generation"
    ):
        template.render(Conversation("line 1", [assistant("a")]))


def test_a_marked_message_that_is_not_to_be_learned_is_left_out() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}. {% endfor %}"
    )
    conversation = Conversation("", [assistant("a"), assistant("b")], unscored=[0])
    template = ChatTemplate(Template(source, "it", {}))
    assert template.render(conversation).scored == [(3, 4)]
