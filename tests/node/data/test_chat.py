"""Tests of conversations as text, tokens and masks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.data import shard_writers
from planaria.node.data.chat import ChatTemplate, Conversation, Template, template_of
from planaria.node.data.corpus import TRAIN, UNSCORED, VALIDATION, Corpus, CorpusError
from planaria.node.data.mixture import (
    Mixture,
    count_scored,
    inputs_and_targets,
)
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.data.tokenizer import chat_templates, context_of_model

CONVERSATIONS = Path(__file__).parents[2] / "conversations.jsonl"
MARKED = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def messages() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in CONVERSATIONS.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of a chat model."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CONVERSATIONS.read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, chat_template=MARKED)
    return folder


def write_config(folder: Path, **fields: Any) -> None:
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def thirty_texts(folder: Path) -> Path:
    records = [{"text": f"One {n} two three four."} for n in range(30)]
    return write_records(folder / "texts.jsonl", records)


def recipe(folder: Path, *inputs: Path, **fields: Any) -> Recipe:
    sources = [str(path) for path in inputs or (CONVERSATIONS,)]
    fields = {"validation": 0.3, "end_token": "<|endoftext|>", **fields}
    return Recipe(sources, folder / "tokenizer.json", **fields)


@pytest.fixture(scope="module")
def chat(folder: Path) -> Corpus:
    return prepare(recipe(folder), folder / "data")[0]


def documents(corpus: Corpus) -> list[tuple[list[int], list[bool]]]:
    """Return tokens and masks of each conversation, in any order."""
    texts = []
    for split in (TRAIN, VALIDATION):
        context = corpus.index.splits[split].tokens - 1
        tokens = corpus.sample(split, context, 0).tolist()
        scored = [False, *corpus.scored(split, context, 0).tolist()]
        while tokens:
            end = tokens.index(corpus.index.end_of_document) + 1
            texts.append((tokens[:end], scored[:end]))
            tokens, scored = tokens[end:], scored[end:]
    return texts


def test_tokens_and_masks_are_those_of_transformers(folder: Path, chat: Corpus) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", chat_template=MARKED
    )
    expected = []
    for conversation in messages():
        encoded = theirs.apply_chat_template(
            conversation, return_assistant_tokens_mask=True, return_dict=True
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        assert any(mask)
        expected.append(([*ids, 0], [*map(bool, mask), False]))
    assert sorted(documents(chat)) == sorted(expected)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_template_that_makes_the_same_tokens_is_taken_over(
    is_chat: bool, folder: Path, tmp_path: Path
) -> None:
    """It may have another generation prompt, which `planaria generate --chat` needs."""
    source = CONVERSATIONS if is_chat else thirty_texts(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for template in (MARKED.partition("{% if add_generation_prompt %}")[0], MARKED):
        write_config(tmp_path, chat_template=template)
        corpus, _ = prepare(recipe(tmp_path, source), tmp_path / "data")
        assert chat_templates(corpus.path) == {"default": template}
    assert not prepare(recipe(tmp_path, source), tmp_path / "data")[1]


def test_a_conversation_that_the_template_refuses_is_left_out(
    folder: Path, chat: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = [[{"role": "robot", "content": "Beep."}], [{"role": "user", "content": "\ud800"}]]
    lines = CONVERSATIONS.read_text() + "".join(json.dumps({"messages": m}) + "\n" for m in refused)
    (tmp_path / "chats.jsonl").write_text(lines)
    template = tmp_path / "strict.jinja"
    refusing = "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    template.write_text(refusing + MARKED)
    how = recipe(folder, tmp_path / "chats.jsonl", chat_template=template)
    assert prepare(how, tmp_path / "data")[0].content == chat.content
    for reason in ("strict.jinja refuses it: no robots", "the record is not valid Unicode"):
        assert reason in caplog.text


def test_a_template_without_marks_scores_what_a_message_adds(folder: Path, chat: Corpus) -> None:
    other = folder / "unmarked"
    other.mkdir()
    shutil.copy(folder / "tokenizer.json", other)
    write_config(other, chat_template=[{"name": "default", "template": UNMARKED}])
    assert prepare(recipe(other), other / "data")[0].content == chat.content
    (other / "chat_template.jinja").write_text(MARKED.replace("'\n' }}{% if", "' ' }}{% if"))
    rendered = ChatTemplate(template_of(other / "tokenizer.json")).render(
        Conversation("", messages()[3])
    )
    assert rendered.text.startswith("<s><|im_start|>user How many legs")
    assert [rendered.text[begin:end] for begin, end in rendered.scored] == ["Eight.<|im_end|>"]


def test_the_end_of_a_document_is_there_once(folder: Path) -> None:
    template = folder / "ending.jinja"
    ended = MARKED.replace("{% if add_generation", "{{ '<|endoftext|>' }}{% if add_generation")
    template.write_text(ended)
    corpus, _ = prepare(recipe(folder, chat_template=template), folder / "ending")
    assert len(documents(corpus)) == len(messages())


def test_an_end_of_turn_that_would_be_split_is_refused(folder: Path, tmp_path: Path) -> None:
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["added_tokens"] = [t for t in fields["added_tokens"] if t["content"] != "<|im_end|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    write_config(tmp_path, chat_template=MARKED, bos_token="<s>")
    with pytest.raises(CorpusError, match=r"ends with <\|im_end\|>, .* is no special token"):
        prepare(recipe(tmp_path, end_token=None), tmp_path / "data")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)  # as the message says
    corpus, _ = prepare(recipe(tmp_path, end_token=None), tmp_path / "data")
    assert corpus.index.end_of_document in corpus.sample(TRAIN, 256, 0)


def test_masks_are_content_and_damage_to_them_is_found(
    folder: Path, chat: Corpus, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.jinja"
    whole.write_text("{% generation %}" + UNMARKED + "{% endgeneration %}")
    other, _ = prepare(recipe(folder, chat_template=whole), tmp_path / "data")
    shards = [corpus.index.splits[TRAIN].shards[0].checksum for corpus in (chat, other)]
    assert shards[0] == shards[1]
    assert chat.content != other.content
    scored = [corpus.index.splits[TRAIN].scored or 0 for corpus in (chat, other)]
    ends = sum(tokens[-1] == 0 for tokens, _ in documents(other))
    ends -= other.index.splits[VALIDATION].documents
    assert 0 < scored[0] < scored[1] == other.index.splits[TRAIN].tokens - ends
    mask = tmp_path / "data" / "train-00000.mask"
    mask.write_bytes(bytes([0]) + mask.read_bytes()[1:])
    with pytest.raises(CorpusError, match=r"train-00000\.mask is damaged: its checksum"):
        Corpus.open(tmp_path / "data").scored(TRAIN, 8, 0)
    index = tmp_path / "data" / "index.json"
    index.write_text(index.read_text().replace('"masks"', '"other"'))
    with pytest.raises(CorpusError, match=r"index\.json is damaged"):
        Corpus.open(tmp_path / "data")


def test_a_target_is_scored_or_is_not(chat: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(chat.count(TRAIN, 16))
    inputs, targets = inputs_and_targets(chat, TRAIN, 16, ids)
    tokens = np.stack([chat.sample(TRAIN, 16, index) for index in ids])
    np.testing.assert_array_equal(inputs, tokens[:, :-1])
    scored = targets != UNSCORED
    np.testing.assert_array_equal(targets[scored], tokens[:, 1:][scored])
    assert count_scored(chat, 16, ids) == scored.sum() < scored.size
    assert not scored.any(axis=1).all()  # some samples have no scored tokens


def test_where_documents_begin(folder: Path, chat: Corpus, tmp_path: Path) -> None:
    """A text begins after the token that ends one; a conversation may contain that token."""
    ending = tmp_path / "ending.jinja"
    ending.write_text(MARKED.replace("<|im_end|>", "<|endoftext|>"))
    corpus, _ = prepare(recipe(folder, chat_template=ending), tmp_path / "data")
    split = corpus.index.splits[TRAIN]
    whole = corpus.sample(TRAIN, split.tokens - 1, 0)[:-1].tolist()
    starts = np.flatnonzero(corpus.begins(TRAIN, split.tokens - 1, 0)).tolist()
    assert len(starts) == split.documents
    start = corpus.tokenizer().token_to_id("<s>")
    assert starts == [at for at, token in enumerate(whole) if token == start]
    texts = thirty_texts(tmp_path)
    plain, _ = prepare(recipe(folder, texts), tmp_path / "texts")
    tokens, begins = plain.sample(TRAIN, 64, 0), plain.begins(TRAIN, 64, 0)
    assert begins.any()
    assert not begins[0]
    np.testing.assert_array_equal(begins[1:], tokens[:-2] == plain.index.end_of_document)
    both = Mixture([plain, corpus], [1, 1])
    second = plain.count(TRAIN, 16)
    *_, rows = inputs_and_targets(both, TRAIN, 16, [0, second], apart=True)
    np.testing.assert_array_equal(rows[0], plain.begins(TRAIN, 16, 0))
    np.testing.assert_array_equal(rows[1], corpus.begins(TRAIN, 16, 0))


def test_shards_of_masks_go_with_those_of_tokens(
    folder: Path, chat: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writers, "SHARD_TOKENS", 100)
    small, _ = prepare(recipe(folder), tmp_path / "data")
    assert len(small.index.splits[TRAIN].masks or []) > 3
    assert sorted(documents(small)) == sorted(documents(chat))


def test_texts_and_conversations_are_a_mixture(folder: Path, chat: Corpus, tmp_path: Path) -> None:
    texts = thirty_texts(tmp_path)
    with pytest.raises(
        CorpusError, match=r"prepare each kind apart, and train on all with \[\[data"
    ):
        prepare(recipe(folder, texts, CONVERSATIONS), tmp_path / "both")
    plain, _ = prepare(recipe(folder, texts), tmp_path / "texts")
    both = Mixture([plain, chat], [1, 1])
    first = plain.count(TRAIN, 16)
    _, targets = inputs_and_targets(both, TRAIN, 16, [0, first, first + 1])
    assert (targets[0] != UNSCORED).all()
    own = inputs_and_targets(chat, TRAIN, 16, [0, 1])[1]
    np.testing.assert_array_equal(targets[1:], own)
    ids = np.array([0, first, first + 1])
    assert count_scored(both, 16, ids) == 16 + (own != UNSCORED).sum()


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"messages": "hi"}, "line 1: 'messages' is no list of messages but 'hi'"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "line 1 has one of U\\+FDD0"),
        ({"messages": [{"role": "user", "content": "?"}]}, "the assistant says nothing"),
    ],
)
def test_what_is_no_conversation(
    folder: Path, tmp_path: Path, record: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(f"{json.dumps(record)}\n" * 40)
    with pytest.raises(CorpusError, match=problem):
        prepare(recipe(folder, file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for message in messages %}", "line 1: Unexpected end of template"),
        ("{{ raise_exception('Roles must alternate') }}", "refuses it: Roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses it: .*unsafe"),
        ("{{ strftime_now('%Y') }}", "refuses it: 'strftime_now' is undefined"),
    ],
)
def test_a_template_that_can_not_be_used(
    folder: Path, tmp_path: Path, template: str, problem: str
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(template)
    with pytest.raises(CorpusError, match=f"own.jinja,? {problem}"):
        prepare(recipe(folder, chat_template=file), tmp_path / "out")


def test_what_is_missing_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"need the tokenizer of the model .* --tokenizer"):
        prepare(Recipe([str(CONVERSATIONS)]), tmp_path / "out")
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(CorpusError, match=r"has no chat template.* --chat-template FILE"):
        prepare(recipe(tmp_path), tmp_path / "out")
    text = tmp_path / "a.txt"
    text.write_text("CHAPTER 1\nOne.\nCHAPTER 2\nTwo.\n")
    with pytest.raises(CorpusError, match="first document is a text"):
        prepare(recipe(folder, text, chat_template=text), tmp_path / "out")


def test_tools_reach_the_template() -> None:
    template = ChatTemplate(Template("{{ tools | tojson }}{{ messages[0].content }}", "it", {}))
    record = Conversation("", [{"role": "user", "content": "<é>"}], [{"name": "weather"}])
    assert template.render(record).text == '[{"name": "weather"}]<é>'


@pytest.mark.parametrize("in_files", [False, True])
def test_conversations_with_tools_have_the_template_for_them(
    folder: Path, tmp_path: Path, in_files: bool
) -> None:
    """It is known to transformers by its name, also in the prepared folder."""
    from transformers import AutoTokenizer

    model, tools = tmp_path / "model", [{"type": "function", "function": {"name": "weather"}}]
    model.mkdir()
    shutil.copy(folder / "tokenizer.json", model)
    named = {"default": UNMARKED, "tool_use": f"{{{{ tools | tojson }}}}{MARKED}"}
    listed = [{"name": name, "template": source} for name, source in named.items()]
    write_config(model, bos_token="<s>", chat_template=listed)
    if in_files:
        AutoTokenizer.from_pretrained(model).save_pretrained(model)
        assert (model / "additional_chat_templates" / "tool_use.jinja").exists()
    records = [
        {"messages": talk, "tools": tools if n % 2 else []} for n, talk in enumerate(messages())
    ]
    corpus, _ = prepare(
        recipe(model, write_records(tmp_path / "talks.jsonl", records)), tmp_path / "data"
    )
    for place in (model, corpus.path):
        theirs = AutoTokenizer.from_pretrained(place)
        expected = [
            [*theirs.apply_chat_template(r["messages"], r["tools"] or None)["input_ids"], 0]
            for r in records
        ]
        assert sorted(tokens for tokens, _ in documents(corpus)) == sorted(expected)


def test_inspect_shows_what_is_scored(folder: Path, chat: Corpus) -> None:
    shown = CliRunner().invoke(
        app, ["data", "inspect", str(folder / "data"), "--verify", "--context", "120"]
    )
    assert shown.exit_code == 0, shown.output
    assert "scored" in shown.output
    sample = shown.output.partition("what is scored in ⟦⟧:\n")[2]
    assert sample.count("<s><|im_start|>") == 3
    assert sample.count("<|im_start|>assistant\n⟦") >= 3


def write_records(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize("form", ["sharegpt", "completion"])
def test_the_same_conversations_in_another_form(
    folder: Path, chat: Corpus, tmp_path: Path, form: str
) -> None:
    def record(conversation: list[dict[str, str]]) -> dict[str, Any]:
        if form == "sharegpt":
            names = {"user": "human", "assistant": "gpt"}
            turns = [
                {"from": names.get(turn["role"], turn["role"]), "value": turn["content"]}
                for turn in conversation
            ]
            return {"conversations": turns, "text": None}
        return {"prompt": [], "completion": conversation}

    file = write_records(tmp_path / "other.jsonl", [record(turns) for turns in messages()])
    assert prepare(recipe(folder, file), tmp_path / "data")[0].content == chat.content
    with pytest.raises(CorpusError, match="--format alpaca have"):
        prepare(recipe(folder, file, format="alpaca"), tmp_path / "alpaca")


def test_of_a_prompt_and_its_completion_the_latter_and_the_end_are_scored(
    folder: Path, tmp_path: Path
) -> None:
    """As in trl, both are tokenized as one text, followed by the end token."""
    pairs = [(f"{n} + {n} =", f" {2 * n}.") for n in range(40)]
    records = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    file = write_records(tmp_path / "pairs.jsonl", records)
    corpus, _ = prepare(recipe(folder, file, bos="yes"), tmp_path / "data")
    tokenizer = corpus.tokenizer()
    expected = []
    for prompt, answer in pairs:
        ids = tokenizer.encode(prompt + answer, add_special_tokens=False).ids
        asked = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
        mask = [False] * (1 + asked) + [True] * (len(ids) - asked + 1)
        expected.append(([tokenizer.token_to_id("<s>"), *ids, 0], mask))
    assert sorted(documents(corpus)) == sorted(expected)
    assert not (tmp_path / "data" / "chat_template.jinja").exists()


def test_where_no_token_ends_a_turn_the_end_of_the_document_is_scored(
    folder: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    corpus, _ = prepare(recipe(folder, chat_template=plain), tmp_path / "data")
    texts = documents(corpus)
    assert len(texts) == len(messages())
    assert all(mask[-1] for _, mask in texts)


def test_conversations_that_are_too_long_are_counted_and_cut_or_left_out(
    folder: Path, chat: Corpus, tmp_path: Path
) -> None:
    lengths = sorted(len(tokens) for tokens, _ in documents(chat))
    context = lengths[len(lengths) // 2]
    longer = sum(length > context for length in lengths)
    corpora = {
        how: prepare(recipe(folder, context=context, longer=how), tmp_path / how)[0]
        for how in ("cut", "leave-out")
    }
    assert corpora["cut"].content == chat.content
    sources = [corpus.index.source for corpus in corpora.values()]
    assert [source.cut for source in sources if source] == [longer, 0]
    left_out = f"conversations of more than {context} tokens"
    assert [source.left_out.get(left_out) for source in sources if source] == [None, (longer, 0)]
    kept = [(tokens, mask) for tokens, mask in documents(chat) if len(tokens) <= context]
    assert sorted(documents(corpora["leave-out"])) == sorted(kept)


def test_the_context_is_that_of_the_model(folder: Path, tmp_path: Path) -> None:
    assert context_of_model(tmp_path) is None
    shutil.copy(folder / "tokenizer.json", tmp_path)
    write_config(tmp_path, chat_template=MARKED, model_max_length=10**30)
    assert context_of_model(tmp_path) is None
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 300}')
    assert context_of_model(tmp_path) == 300
    corpus, _ = prepare(recipe(tmp_path), tmp_path / "data")
    assert corpus.index.source and corpus.index.source.context == 300


def test_a_bad_conversation_is_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    bad = [
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "assistant", "content": "half \ud83d"}]},
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
    ]
    good = [{"messages": conversation} for conversation in messages()]
    file = write_records(tmp_path / "some.jsonl", [*bad, *good])
    corpus, _ = prepare(recipe(folder, file), tmp_path / "data")
    assert corpus.index.source and corpus.index.source.left_out == {"bad rows": (3, 0)}
    assert len(documents(corpus)) == len(good)


def test_a_terminal_that_knows_few_characters_shows_the_others_in_escapes(
    chat: Corpus, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planaria", "data", "inspect", chat.path],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "assistant\n[[" in done.stdout.decode("latin-1")
