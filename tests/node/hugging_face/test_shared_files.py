"""Tests of the tokenizer's files, as observers get them from nodes of stage 0, which may lie."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import virtual_time

from planaria.bootstrap.registry_pb2 import View
from planaria.node.data.corpus import Corpus
from planaria.node.data.tokenizer import PART, SHARED, read_part
from planaria.node.hugging_face import through_swarm
from planaria.node.hugging_face.export import ExportError, Vocabulary
from planaria.node.hugging_face.living_run import Access, routes_to
from planaria.node.hugging_face.through_swarm import LivingStages
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.observer_client import ObserverConversation
from planaria.node.wire.tensors import encode
from tests.node.hugging_face.test_living_run import member
from tests.swarm.small import small


class Giver:
    """A node with all seats, which sends files of a folder as those of its data."""

    def __init__(self, folder: Path, node: str, address: str) -> None:
        self.folder, self.node, self.address, self.lost = folder, node, address, ""

    def open(self, heard: Callable[[pb.Message], None], ended: object) -> None:
        self.heard = heard

    def send(self, message: pb.Message) -> bool:
        if message.WhichOneof("body") == "pin_request":
            answer = pb.Message(pinned=pb.Pinned(transfer=message.pin_request.transfer))
        else:
            answer = self.given(Frame.parse(message.carried.head, message.carried.payload))
        answer.sender = message.seat
        asyncio.get_running_loop().call_soon(self.heard, answer)
        return True

    def given(self, asked: Frame) -> pb.Message:
        part = read_part([self.folder], asked.fields["file"], asked.fields["first"])
        fields = {"transfer": asked.fields["transfer"]}
        return Frame(
            "state", NEVER, fields, *encode([torch.tensor([*part], dtype=torch.uint8)], "none")
        ).in_message()

    async def close(self) -> None: ...


def fetched(given: Path, kept: Path, content: str, model: Path | None = None) -> Vocabulary:
    async def view() -> View:
        return View(members=[member("a", 0, 1)])

    def converse(node: str, address: str) -> ObserverConversation:
        return Giver(given, node, address)

    async def ask() -> Vocabulary:
        run = small(stages=1, model__vocabulary=512, data__content=content)
        async with LivingStages(Access(run, view, converse, routes_to)) as stages:
            return await stages.vocabulary(None, model, kept)

    kept.mkdir(exist_ok=True)
    return virtual_time.run(ask())


@pytest.fixture
def corpus(data: Path) -> Corpus:
    return Corpus.open(data)


@pytest.fixture
def given(data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    for name in SHARED:
        if (data / name).exists():
            shutil.copy(data / name, folder)
    return folder


def test_what_comes_is_a_prepared_folder_without_its_tokens(
    given: Path, corpus: Corpus, tmp_path: Path
) -> None:
    (given / "chat_template.jinja").write_bytes(bytes(2 * PART))
    kept = tmp_path / "kept"
    vocabulary = fetched(given, kept, corpus.content)
    assert vocabulary == Vocabulary(kept / "tokenizer.json", corpus.index.end_of_document)
    names = {path.name for path in given.iterdir()}
    assert {path.name for path in kept.iterdir()} == names
    assert all((kept / name).read_bytes() == (given / name).read_bytes() for name in names)
    (given / "tokenizer.json").unlink()
    assert fetched(given, kept, corpus.content) == vocabulary, "it is there already"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("index.json", None, "no prepared data"),
        ("index.json", b"{" * 5000, "is damaged"),
        ("tokenizer.json", b"{}", "isn't that of its index"),
        ("tokenizer.json", None, "can't read"),
        ("chat_template.jinja", bytes(5 * PART), f"has more than {4 * PART} bytes"),
    ],
)
def test_what_can_not_be_the_runs_is_refused(
    given: Path, corpus: Corpus, tmp_path: Path, monkeypatch, name: str, content, why: str
) -> None:
    monkeypatch.setattr(through_swarm, "LARGEST", 4 * PART)
    (given / name).unlink(missing_ok=True)
    if content is not None:
        (given / name).write_bytes(content)
    with pytest.raises(ExportError, match=rf"gives no tokenizer: .*{why}.* by --data"):
        fetched(given, tmp_path / "kept", corpus.content)


def test_an_index_of_other_data_is_refused_unless_the_run_began_from_a_tokenizer(
    given: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="is of other data than the run's"):
        fetched(given, tmp_path / "kept", "0" * 32)
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(given / "tokenizer.json", model)
    (model / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    vocabulary = fetched(given, tmp_path / "kept", "0" * 32, model)
    assert vocabulary == Vocabulary(model / "tokenizer.json", 7, model)
