"""Fuzz targets: functions of bytes, one for each reader of bytes from outside.

A target returns; readers refuse input by their documented errors, and anything else raised is a
bug. Where a checksum would hide the code behind it, the target inserts the right one, as attackers
could. Input is bounded as it is where the reader gets it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np
from google.protobuf.message import DecodeError
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from planaria.bootstrap.address import Address, AddressError
from planaria.bootstrap.admission import Admission, AdmissionError
from planaria.bootstrap.authority import Role, is_issued_by, to_pem, who_in
from planaria.bootstrap.enrolment_pb2 import EnrolRequest
from planaria.bootstrap.identity import Identity, is_signed
from planaria.bootstrap.invites import MARK, InviteError, NotAdmitted
from planaria.bootstrap.invites import decode as decode_invite
from planaria.bootstrap.journal import Journal, JournalError, _file_of, read_view
from planaria.bootstrap.registry_pb2 import Member, NewView, Relay, Seat, View
from planaria.bootstrap.store import Store, StoreError
from planaria.bootstrap.views import is_genuine, sign, unpacked, view_in
from planaria.node.data.chat import ChatTemplate, Conversation, Template
from planaria.node.data.corpus import CorpusError, Index, read_index
from planaria.node.launch.errors import SwarmError
from planaria.node.local.plan import PLAN, read_plan
from planaria.node.model.checkpoint import ONE_FILE, Checkpoint
from planaria.node.model.config import CONFIG, UnsupportedModelError, read_config, to_config
from planaria.node.model.shape import ModelConfig
from planaria.node.report.ledger import LedgerError, audit, audit_merged, merge
from planaria.node.run_file import RunFileError, dumps, loads
from planaria.node.state.save_file import METADATA, SaveFile, _checksum, encode_header
from planaria.node.state.stage_state import SaveError
from planaria.node.transaction.bounds import fault_to_driver, fault_to_member
from planaria.node.wire import lowrank
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import (
    HEAD_LIMIT,
    Descriptor,
    Form,
    Frame,
    WireError,
    encoded_size,
    parse_chunk,
    seal,
    unseal,
)
from planaria.node.wire.greetings import DIAL, Greetings
from planaria.node.wire.session import (
    Begun,
    DialRefused,
    Forgotten,
    Hello,
    Outdated,
    Session,
    SessionBounds,
)
from planaria.node.wire.tensors import decode, decode_low_rank
from tests.bootstrap.fake_etcd import FakeEtcd
from tests.harness.rules import RULES

SMALL: Final = ModelConfig(
    vocabulary=8,
    dim=4,
    heads=2,
    kv_heads=2,
    layers=1,
    stages=1,
    context=4,
    hidden=4,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    learning_rate=1e-3,
)
BOUNDS: Final = SessionBounds(chunk=64, window=256, payload=1 << 16, messages=1 << 16, held=1 << 17)
MESSAGES: Final = [
    {"role": "user", "content": "What is a planarian?"},
    {"role": "assistant", "content": "A flatworm."},
]
IN_MEMORY: Final = next((place for place in ("/dev/shm",) if os.access(place, os.W_OK)), None)
"""A folder where flushing a file costs nothing; None: there is none."""
IDENTITY: Final = Identity.generate()
ADMISSION: Final = Admission(None)
SECRET: Final = ADMISSION.invite(Role.NODE)[1]


def _view(number: int, names: str, former: View) -> View:
    members = [
        Member(node=name, address=f"{name}:1", joined=n + 1, seats=[Seat(stage=n, since=number)])
        for n, name in enumerate(names)
    ]
    view = View(run="r", number=number, members=members, driver=names[0], banned=["0" * 32])
    view.relays.append(Relay(a="a", b="b", via="c"))
    sign(view, IDENTITY, former)
    return view


HELD: Final = _view(7, "abcdef", View())
LATER: Final = _view(8, "abdegh", HELD)


@contextmanager
def folder_with(**files: bytes) -> Iterator[Path]:
    """Make a folder with these files; double underscores in their names become dots."""
    with tempfile.TemporaryDirectory(prefix="planaria-fuzz-", dir=IN_MEMORY) as made:
        folder = Path(made)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        yield folder


def pieces(data: bytes) -> Iterator[bytes]:
    """Split the data into pieces, each of which begins with its length in two bytes."""
    while data:
        length = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + length]
        data = data[2 + length :]


def text_of(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


# --- links


def chunks(data: bytes) -> None:
    """Read chunks of a link whose peer sends anything, with right checksums."""
    session = Session(1, BOUNDS)
    session.outbox.push(Frame("state", (1, 1), {}, [], bytes(500)))
    with suppress(WireError):
        for piece in pieces(data):
            session.outbox.next(0.0)
            chunk = parse_chunk(piece)
            with suppress(WireError):
                chunk.verify()
            if chunk.order:
                list(session.inbox.take(chunk))
            else:  # the fields of an acknowledgement
                session.outbox.acknowledge(chunk.frame, chunk.offset, 0.0)
            session.inbox.acknowledged()


def frames(data: bytes) -> None:
    """Parse a frame, a head and a payload, and decode the tensors that the head describes."""
    head, payload = data[2 : 2 + int.from_bytes(data[:2], "little")], data[2:]
    payload = payload[len(head) :]
    with suppress(WireError):
        frame = Frame.parse(head, payload, BOUNDS.payload)
        assert len(head) <= HEAD_LIMIT
        decode(frame.descriptors, bytearray(payload))
        packed = frame.head() if frame.fields else head
        assert str(Frame.parse(packed, payload).fields) == str(frame.fields)


MATRICES: Final = (40, 30), (30,), (30, 7, 3), (9, 200)


def factors(data: bytes) -> None:
    """Decode factors of a low-rank gradient. The data has the row's begin and length, the rank, and
    the factors' bytes, which get right checksums."""
    head, body = data[:5].ljust(5, b"\0"), data[5:]
    start, size = (int.from_bytes(head[of : of + 2], "little") % 5000 for of in (0, 2))
    rank = head[4] % 8 + 1
    cuts = lowrank.cuts(MATRICES, rank, start, size)
    with suppress(WireError):
        parts = _filled(lowrank.forms(cuts, rank), body)
        assert len(decode_low_rank(*parts, size, cuts, rank)) == size


def _filled(forms: list[Form], body: bytes) -> tuple[list[Descriptor], bytearray]:
    """Return descriptors and payload of tensors of these forms; the body is padded with zeros."""
    descriptors, payload = [], bytearray()
    for form in forms:
        length = encoded_size(math.prod(form.shape), form.dtype, form.codec)
        part, body = body[:length].ljust(length, b"\0"), body[length:]
        descriptors.append(Descriptor(*form, xxh3_64_intdigest(part), length))
        payload += part
    return descriptors, payload


def messages(data: bytes) -> None:
    with suppress(WireError):
        unseal(data)
    with suppress(DecodeError):
        message = pb.Message.FromString(unseal(seal(data)))
        fault_to_driver(message, RULES)
        fault_to_member(message, 2)
        if message.WhichOneof("body") == "carried":
            with suppress(WireError):
                Frame.parse(message.carried.head, message.carried.payload)


def hellos(data: bytes) -> None:
    session = Session(7, BOUNDS)
    session.send(b"message")
    session.next_message()
    session.outbox.push(Frame("call", (1, 1), {}, [], b"payload"))
    session.outbox.next(0.0)
    for line in text_of(data).split("\n"):
        for hello in (line, f"{line} {xxh3_64_hexdigest(line.encode())}"):
            with suppress(WireError, Outdated, Begun, Forgotten):
                session.resume(Hello.parse(hello))
        with suppress(DialRefused):
            Greetings("r", "n", IDENTITY).verify(DIAL, "m", IDENTITY.public, line)


# --- files


def journals(data: bytes) -> None:
    """Read the data as a journal's file, and as the view in one."""
    for content in (data, _file_of(data)):
        with folder_with(journal=content) as folder, suppress(JournalError):
            read_view(folder / "journal")
            Journal(folder / "journal", "r", IDENTITY).close()


def ledgers(data: bytes) -> None:
    with folder_with(**{"ledger__jsonl": data}) as folder, suppress(LedgerError):
        merged = merge([folder / "ledger.jsonl"])
        if merged.header.get("steps", 0) <= 100 and merged.header["batch"] <= 64:
            audit_merged(merged)
            audit(folder)


def saves(data: bytes) -> None:
    """Read the data as a save, and as header fields and tensors of saves with right checksums."""
    contents = [data]
    with suppress(ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length])[METADATA]
        fields.pop("xxh3", None)
        contents.append(bytes(encode_header(fields)) + data[8 + length :])
        header = json.dumps({METADATA: {**fields, "xxh3": _checksum(fields)}}).encode()
        contents.append(len(header).to_bytes(8, "little") + header + data[8 + length :])
    for content in contents:
        with folder_with(save=content) as folder, suppress(SaveError):
            SaveFile.open(folder / "save").check()


def run_files(data: bytes) -> None:
    with suppress(RunFileError):
        run = loads(text_of(data))
        assert loads(dumps(run)) == run


def plans(data: bytes) -> None:
    """Read the plan of a run that `planaria up` resumes."""
    with folder_with(**{PLAN.replace(".", "__"): data}) as folder, suppress(SwarmError):
        read_plan(folder)


def corpora(data: bytes) -> None:
    """Read the index of a corpus, as it is and with the right content hash."""
    contents = [data]
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        fields = json.loads(data)
        index = Index.model_validate(fields)
        contents.append(json.dumps({**fields, "content": index.content_hash()}).encode())
    for content in contents:
        with folder_with(**{"index__json": content}) as folder, suppress(CorpusError):
            read_index(folder)


def checkpoints(data: bytes) -> None:
    """Read a checkpoint's file of weights, beside a valid config.json."""
    config = json.dumps(to_config(SMALL, "float32", None)).encode()
    files = {CONFIG: config, ONE_FILE: data}
    with (
        folder_with(**{name.replace(".", "__"): file for name, file in files.items()}) as folder,
        suppress(UnsupportedModelError),
    ):
        checkpoint = Checkpoint.open(folder)
        for name in checkpoint.places:
            assert checkpoint.read(name).dtype == np.float32


def configs(data: bytes) -> None:
    with (
        folder_with(**{CONFIG.replace(".", "__"): data}) as folder,
        suppress(UnsupportedModelError),
    ):
        read_config(folder)


def templates(data: bytes) -> None:
    with suppress(CorpusError):
        source = Template(text_of(data), "the template", {"eos_token": "</s>"})
        template = ChatTemplate(source)
        template.render(Conversation("here", MESSAGES))


# --- identities


def keys(data: bytes) -> None:
    with suppress(ValueError):
        Identity.from_pem(data)
    public, signature = data[:32], data[32:]
    assert not is_signed(public, signature, "fuzz", data)


def invites(data: bytes) -> None:
    """Decode an invite's text, and an invite with these contents and the right checksum."""
    whole = data + crc32(data).to_bytes(4, "little")
    for text in (text_of(data), MARK + urlsafe_b64encode(whole).decode().rstrip("=")):
        with suppress(InviteError):
            assert decode_invite(text).registries


def enrolments(data: bytes) -> None:
    """Answer a request for a certificate, rightly signed and with a valid invite."""
    signature = IDENTITY.sign("enrol", data)
    request = EnrolRequest(
        secret=SECRET, public_key=IDENTITY.public, request=data, signature=signature
    )
    with suppress(NotAdmitted):
        who, certificate = ADMISSION.enrol(request)
        assert who_in(certificate) == who


def certificates(data: bytes) -> None:
    """Read a certificate in PEM, and in DER."""
    with suppress(ValueError):
        who_in(data)
    with suppress(ValueError):
        pem = to_pem(data)
        who_in(pem)
        assert ADMISSION.authority is not None
        is_issued_by(pem, ADMISSION.authority.certificate)


def admissions(data: bytes) -> None:
    """Read a registry's decisions from its file of invites."""
    with folder_with(invites__jsonl=data) as folder, suppress(AdmissionError):
        Admission(folder, certifies=False)


def stores(data: bytes) -> None:
    """Read a run's values in etcd, which others may write: the leader, the newest view and its
    number, and decisions."""
    values = [*pieces(data), b"", b"", b""]
    etcd = FakeEtcd()
    names = ["leader", "number", "view", *(f"decided/{n:010}" for n in range(len(values)))]
    etcd.values = {f"planaria/r/{name}": value for name, value in zip(names, values, strict=False)}
    store = Store(etcd.link(), "r", IDENTITY, "a:1", lambda: etcd.now)
    with suppress(StoreError):
        store.leader()
    del etcd.values["planaria/r/leader"]
    with suppress(StoreError, AdmissionError):
        Admission(None, certifies=False, decided=store)
    with suppress(StoreError):
        assert not store.campaign(), "nobody has signed that"


def new_views(data: bytes) -> None:
    """Apply a new view to the one that a node has; only views signed with the run's key are
    genuine."""
    with suppress(DecodeError, ValueError):
        view = view_in(unpacked(NewView.FromString(data)), HELD)
        assert len(view.members) <= len(HELD.members) + len(data)
        assert view in (HELD, LATER) or not is_genuine(view, IDENTITY.public, "r")


def addresses(data: bytes) -> None:
    with suppress(AddressError):
        address = Address.parse(text_of(data))
        assert Address.parse(str(address)) == address
        assert address.is_loopback + address.is_any < 2


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target
    for target in (
        chunks,
        frames,
        factors,
        messages,
        hellos,
        journals,
        ledgers,
        saves,
        run_files,
        plans,
        corpora,
        checkpoints,
        configs,
        templates,
        keys,
        invites,
        enrolments,
        certificates,
        admissions,
        stores,
        new_views,
        addresses,
    )
}
