"""Tests that texts become the same tokens as in transformers, and end as the files say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from planaria.node.data.corpus import BEGINS, SPLITS, Corpus, CorpusError
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.data.tokenizer import Bos, same_tokenizer, text_bounds

TEXTS = [f"hello wörld, <s> this is text {i}</s> about planarians\n 漢" for i in range(20)]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
KINDS = ["byte-level", "sentencepiece"]
AROUND = ["$A", "<s> $A", "<s> $A </s>", None]
"""What the post-processor puts around a text; None: there is no post-processor."""


def tokenizer_of(kind: str) -> tuple[Tokenizer, Any]:
    """Return an untrained tokenizer and its trainer."""
    special = ["<unk>", "<s>", "</s>", "<end>"]
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    return made, trainers.BpeTrainer(
        vocab_size=len(special) + 300,
        special_tokens=special[:4],
        initial_alphabet=alphabet,
        show_progress=False,
    )


def write(folder: Path, kind: str = "byte-level", around: str | None = None, **config: Any) -> Path:
    """Write a tokenizer's folder, and return the path of its tokenizer.json."""
    made, trainer = tokenizer_of(kind)
    made.train_from_iterator(["hello, this is a text about planarians " * 5] * 5, trainer)
    if around is not None:
        made.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def prepared(folder: Path, tokenizer: Path, **how: Any) -> Corpus:
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return prepare(Recipe([str(source)], tokenizer, validation=0.3, **how), folder / "data")[0]


def documents(corpus: Corpus) -> Iterator[list[int]]:
    for name in SPLITS:
        split = corpus.index.splits[name]
        tokens = np.fromfile(corpus.path / split.shards[0].name, np.dtype(corpus.index.dtype))
        if split.masks is None:
            begins = np.flatnonzero(tokens == corpus.index.end_of_document)[:-1] + 1
        else:
            marks = np.fromfile(corpus.path / split.masks[0].name, np.uint8)
            begins = np.flatnonzero(marks & BEGINS)[1:]
        yield from (part.tolist() for part in np.split(tokens, begins))


def in_transformers(folder: Path, **how: Any) -> list[list[int]]:
    """Tokenize the texts with the folder's tokenizer in transformers; special tokens are text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    return [tokenizer(text, **how)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", AROUND)
def test_documents_are_what_transformers_makes_of_texts(
    kind: str, around: str | None, tmp_path: Path
) -> None:
    # add_bos_token: transformers 5 ignores it if there is a tokenizer.json
    tokenizer = write(tmp_path / "from", kind, around, **NAMED, add_bos_token=True)
    corpus = prepared(tmp_path, tokenizer)
    expected = in_transformers(tokenizer.parent)
    if "</s>" not in (around or ""):
        expected = [[*ids, 2] for ids in expected]
    assert sorted(documents(corpus)) == sorted(expected)
    assert list(corpus.index.begin) == ([1] if "<s>" in (around or "") else [])
    assert corpus.index.end_of_document == 2
    assert (corpus.path / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("how", [{"bos": "yes"}, {"bos": "no"}, {"end_token": "<end>"}])
def test_what_is_asked_for_instead_is_what_transformers_makes_by_the_prepared_folder(
    around: str | None, how: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = write(tmp_path / "from", "byte-level", around, **NAMED)
    corpus = prepared(tmp_path, tokenizer, **how)
    begin = {"yes": [1], "no": []}.get(how.get("bos", ""), [1] if "<s>" in (around or "") else [])
    end = 3 if "end_token" in how else 2
    bare = in_transformers(tokenizer.parent, add_special_tokens=False)
    assert sorted(documents(corpus)) == sorted([*begin, *ids, end] for ids in bare)
    own = in_transformers(corpus.path)
    if "</s>" not in (around or ""):
        own = [[*ids, end] for ids in own]
    assert sorted(documents(corpus)) == sorted(own)
    assert text_bounds(corpus.tokenizer(), corpus.path) == (tuple(begin), end)
    assert same_tokenizer(tokenizer, corpus.path / "tokenizer.json")


@pytest.mark.parametrize(
    ("config", "mapped", "model", "end"),
    [
        ({"eos_token": "<end>"}, {}, {}, 3),
        ({"eos_token": {"__type": "AddedToken", "content": "<end>"}}, {}, {"eos_token_id": 2}, 3),
        ({"eos_token": "<end>", "added_tokens_decoder": {}}, {"eos_token": "</s>"}, {}, 3),
        ({"eos_token": "<end>"}, {"eos_token": "</s>"}, {}, 2),
        ({"eos_token": None}, {"eos_token": "<end>"}, {"eos_token_id": 2}, 3),
        ({}, {}, {"eos_token_id": 3}, 3),
        ({}, {}, {"eos_token_id": [3, 2]}, 3),
        ({}, {}, {"eos_token_id": 1 << 40}, None),
        ({}, {}, {}, None),
    ],
)
def test_the_end_is_what_the_files_name(
    config: dict[str, Any],
    mapped: dict[str, Any],
    model: dict[str, Any],
    end: int | None,
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    file = write(tmp_path / "from")
    names = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    for name, fields in zip(names, (config, mapped, model), strict=True):
        if fields:
            (file.parent / name).write_text(json.dumps(fields))
    tokenizer = Tokenizer.from_file(str(file))
    assert text_bounds(tokenizer, file.parent).end == end
    if config:
        assert AutoTokenizer.from_pretrained(file.parent).eos_token_id == end


@pytest.mark.parametrize(
    ("around", "config", "how", "why"),
    [
        (None, {}, {}, "no file in .* says which token ends a document: name it with --end-token"),
        (None, {}, {"end_token": "<stop>"}, "--end-token <stop>: the tokenizer has no such token"),
        (None, {"eos_token": "<stop>"}, {}, "from names <stop> as eos_token, .* no such token"),
        (None, {"eos_token": "</s>"}, {"bos": "yes"}, "--bos yes: no file in .* names a bos_token"),
        ("$A </s> <s>", NAMED, {}, "ends a text with 2 tokens, .* --end-token"),
    ],
)
def test_bounds_that_nobody_can_tell_are_refused(
    around: str | None, config: dict[str, Any], how: dict[str, Any], why: str, tmp_path: Path
) -> None:
    tokenizer = write(tmp_path / "from", "byte-level", around, **config)
    with pytest.raises(CorpusError, match=why):
        prepared(tmp_path, tokenizer, **how)


def test_bounds_are_known_where_a_text_has_no_tokens(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "C": 2, "G": 3}, []))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert made.encode("a", add_special_tokens=False).ids == []
    assert text_bounds(made, tmp_path) == ((0,), 1)


@pytest.mark.parametrize("bos_token", ["<s>", "</s>"])
def test_documents_begin_with_their_begin_token(bos_token: str, tmp_path: Path) -> None:
    """It may also be the token that ends them. For a sample's first tokens it isn't known."""
    tokenizer = write(tmp_path / "from", bos_token=bos_token, eos_token="</s>")
    corpus = prepared(tmp_path, tokenizer, bos="yes")
    split = corpus.index.splits["train"]
    tokens = corpus.sample("train", split.tokens - 1, 0)[:-1]
    begins = np.flatnonzero(corpus.begins("train", split.tokens - 1, 0)[2:]) + 2
    assert len(begins) == split.documents - 1
    assert (tokens[begins] == corpus.index.begin[0]).all()
    assert (tokens[begins - 1] == corpus.index.end_of_document).all()


def some_talks(folder: Path) -> tuple[list[list[dict[str, str]]], Path]:
    """Write a file of conversations, and return both."""
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        for text in ("hello", "and", "about", "text")
    ]
    source = folder / "talks.jsonl"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return talks, source


@pytest.mark.parametrize("end_token", [None, "<end>"])
def test_a_conversation_begins_and_ends_as_its_template_says(
    end_token: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content + eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = write(tmp_path / "from", "byte-level", "<s> $A", chat_template=template)
    (tokenizer.parent / "special_tokens_map.json").write_text(json.dumps(NAMED))
    talks, source = some_talks(tmp_path)
    recipe = Recipe([str(source)], tokenizer, validation=0.3, end_token=end_token)
    corpus, _ = prepare(recipe, tmp_path / "data")
    for folder in [corpus.path, *([] if end_token else [tokenizer.parent])]:
        theirs = AutoTokenizer.from_pretrained(folder)
        expected = [theirs.apply_chat_template(talk)["input_ids"] for talk in talks]
        assert sorted(documents(corpus)) == sorted(expected)
        assert all(ids.count(1) == 1 for ids in expected)
    for bos in get_args(Bos)[1:]:
        with pytest.raises(CorpusError, match=f"--bos {bos} is for texts"):
            prepare(replace(recipe, bos=bos), tmp_path / "other")


def test_transformers_reads_the_tokenizer_of_llama_2_as_it_is(tmp_path: Path) -> None:
    """Its tokenizer.json puts a space before each text between special tokens, but transformers 5
    makes a LlamaTokenizer without that."""
    from transformers import AutoTokenizer

    template = "{% for m in messages %}{{ m.content + eos_token }}\n{% endfor %}"
    tokenizer = write(
        tmp_path / "from",
        "sentencepiece",
        tokenizer_class="LlamaTokenizer",
        legacy=False,
        chat_template=template,
        **NAMED,
    )
    fields = json.loads(tokenizer.read_text())
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    fields |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    tokenizer.write_text(json.dumps(fields))
    talks, source = some_talks(tmp_path)
    corpus, _ = prepare(Recipe([str(source)], tokenizer, validation=0.3), tmp_path / "data")
    theirs = AutoTokenizer.from_pretrained(corpus.path)
    expected = [theirs.apply_chat_template(talk)["input_ids"] for talk in talks]
    assert sorted(documents(corpus)) == sorted(expected)


def test_transformers_reads_another_pre_tokenizer_than_that_of_gpt_2_as_it_is(tmp_path) -> None:
    """transformers 5 makes a GPT2Tokenizer without it. Code that the folder names isn't there."""
    from transformers import AutoTokenizer

    code = {"AutoTokenizer": [None, "own.Tokenizer"]}
    file = write(tmp_path / "from", tokenizer_class="GPT2Tokenizer", auto_map=code, **NAMED)
    tokenizer = Tokenizer.from_file(str(file))
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert tokenizer.pre_tokenizer is not None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    fields = json.loads(tokenizer.to_str())
    fields["model"]["vocab"]["12"] = len(fields["model"]["vocab"])
    fields["model"]["merges"].append(["1", "2"])
    file.write_text(json.dumps(fields))
    corpus = prepared(tmp_path, file)
    assert sorted(documents(corpus)) == sorted([*ids, 2] for ids in in_transformers(corpus.path))
    trusted = AutoTokenizer.from_pretrained(corpus.path, trust_remote_code=True)
    assert trusted("12").tokens() == ["1", "2"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_is_written_anew_is_the_same(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = write(tmp_path / "from", kind, None, **NAMED)
    AutoTokenizer.from_pretrained(file.parent).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() != file.read_bytes()
    assert same_tokenizer(file, tmp_path / "saved" / "tokenizer.json")
    fields = json.loads(file.read_text())
    fields["model"]["merges"] = [" ".join(pair) for pair in fields["model"]["merges"]]
    del fields["model"]["ignore_merges"]  # older files lack it
    older = tmp_path / "older.json"
    older.write_text(json.dumps(dict(reversed(fields.items()))))
    assert same_tokenizer(file, older)
    fields["model"]["merges"].pop()
    older.write_text(json.dumps(fields))
    assert not same_tokenizer(file, older)
    fields = json.loads(file.read_text())
    fields["normalizer"] = {"type": "NFC"}
    older.write_text(json.dumps(fields))
    assert not same_tokenizer(file, older)
