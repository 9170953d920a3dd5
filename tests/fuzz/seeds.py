"""Valid or nearly valid inputs, from which the fuzzer begins. The writers of each format make them,
so that they follow its changes. Inputs that have found bugs are beside this, in `found/TARGET`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

import torch
from drawn_messages import BODIES, Drawing
from xxhash import xxh3_64_intdigest

from planaria.bootstrap.admission import Admission
from planaria.bootstrap.authority import Request, Role, to_der
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import encode as encode_invite
from planaria.bootstrap.registry_pb2 import Member, NewView, Seat, View
from planaria.bootstrap.views import difference
from planaria.node.model.config import to_config
from planaria.node.model.layout import model_weights
from planaria.node.report.ledger import Line, _joint_hash
from planaria.node.run_file import RunFile, dumps
from planaria.node.state.save_file import Contents
from planaria.node.state.saves import Saves
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chunk_flow import ChunkOutbox
from planaria.node.wire.frame_format import Descriptor, Frame, pack_chunk
from planaria.node.wire.lowrank import cuts
from planaria.node.wire.session import Hello
from planaria.node.wire.tensors import encode, encode_low_rank
from tests.fuzz.targets import (
    ADMISSION,
    HELD,
    IDENTITY,
    LATER,
    MATRICES,
    SECRET,
    SMALL,
    folder_with,
)

FOUND = Path(__file__).parent / "found"


def seeds(target: str) -> list[bytes]:
    """Return valid inputs of a target, and those that have found bugs."""
    right: list[bytes] = globals()[f"_{target}"]()
    return [*right, *(path.read_bytes() for path in sorted((FOUND / target).glob("*")))]


def _joined(pieces: list[bytes]) -> bytes:
    return b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces)


def _a_frame() -> Frame:
    descriptors, payload = encode([torch.arange(6.0).reshape(2, 3)], "int8")
    return Frame("activation", (3, 1), {"microbatch": 2}, descriptors, payload, "n/1", "m/0")


def _chunks() -> list[bytes]:
    outbox = ChunkOutbox(64, 1 << 16)
    outbox.push(_a_frame())
    outbox.push(Frame("state", (3, 1), {"transfer": 1}, [], bytes(150)))
    sent = []
    while (chunk := outbox.next(0.0)) is not None:
        sent.append(chunk)
    return [_joined(sent), _joined([pack_chunk(frame=1, offset=64)])]


def _frames() -> list[bytes]:
    drawing = Drawing(Random(1))
    frames = []
    for frame in (_a_frame(), *(drawing.frame() for _ in range(4))):
        payload = frame.payload if isinstance(frame.payload, tuple) else (frame.payload,)
        frames.append(_joined([frame.head()]) + b"".join(payload))
    empty = Descriptor("float32", (0, 3), "none", xxh3_64_intdigest(b""), 0)
    return [*frames, _joined([Frame("twin", (1, 0), {}, [empty], b"").head()])]


def _factors() -> list[bytes]:
    factors = []
    for start, size, rank in ((0, 3660, 4), (35, 1700, 1)):
        some = cuts(MATRICES, rank, start, size)
        _, payload = encode_low_rank(torch.arange(float(size)).sin(), some, rank)
        where = b"".join(number.to_bytes(2, "little") for number in (start, size))
        factors.append(where + bytes([rank - 1]) + b"".join(payload))
    return factors


def _messages() -> list[bytes]:
    drawing = Drawing(Random(2), ["n"], [1, 2], rarely=0)
    return [drawing.envelope(body).SerializeToString(deterministic=True)[:400] for body in BODIES]


def _hellos() -> list[bytes]:
    hellos = Hello(9, 0, 1, 0, 0), Hello(9, 7, 2, 1, 1, {1: 3})
    return ["\n".join(hello.pack().rpartition(" ")[0] for hello in hellos).encode()]


def _journals() -> list[bytes]:
    view = View(run="r", number=1, members=[Member(node="a", address="h:1", joined=1)])
    return [view.SerializeToString()]


def _ledgers() -> list[bytes]:
    header = {"ledger": 1, "run": "r", "seed": 1, "samples": 20, "batch": 4, "microbatch": 2}
    header |= {"context": 8, "content": "c", "steps": 2}
    microbatches = [(0, 2, "0" * 32), (1, 2, "1" * 32)]
    line = Line(
        step=1,
        view=3,
        attempt=0,
        epoch=0,
        microbatches=microbatches,
        samples=4,
        samples_hash=_joint_hash(microbatches),
        loss=1.5,
        tokens=32,
        gradient_norm=None,
        skipped=False,
        seconds=0.1,
        time=1.0,
    )
    rows = [json.dumps(row).encode() + b"\n" for row in (header, line, {**line, "step": 2})]
    mixed = json.dumps({**header, "samples": 20, "mixture": [[12, 1], [8, 2]]}).encode() + b"\n"
    return [b"".join(rows), rows[0] + rows[1] + rows[1][:40], mixed + rows[1]]


def _saves() -> list[bytes]:
    last = pb.Commit(step=4, ballot=pb.Ballot(view=2, attempt=1))
    state = StageState(
        id=StateId.after(last, 1, 0, 4),
        tensors={"weights": torch.arange(3.0), "first_moment": torch.zeros(3)},
        omega=0.5,
        boosted_at=0,
        last=last,
        optimizer_step=4,
    )
    with folder_with() as folder:
        store = Saves(folder, "r", 1, 2, Contents({"flat": [3]}, {}))
        store.write(state)
        return [path.read_bytes() for path in sorted(store.folder.glob("step-*"))]


def _run_files() -> list[bytes]:
    return [dumps(RunFile()).encode(), b'steps = 3\n[model]\npreset = "tiny"\nstages = 2\n']


def _plans() -> list[bytes]:
    return [json.dumps({"out": "/nowhere", "save_dir": None, "device": "cpu"}).encode()]


def _corpora() -> list[bytes]:
    shard = {"name": "train-0.bin", "tokens": 12, "checksum": "0" * 32}
    split = {"documents": 1, "text_bytes": 40, "shards": [shard]}
    fields = {"format": 1, "vocabulary": 300, "dtype": "uint16", "end_of_document": 0}
    fields |= {"tokenizer": "0" * 32, "splits": {"train": split, "validation": split}}
    masks = {**split, "masks": [shard], "scored": 3}
    masked = {**fields, "format": 2, "splits": {"train": masks, "validation": masks}}
    return [json.dumps(content).encode() for content in (fields, masked)]


def _checkpoints() -> list[bytes]:
    at, header = 0, {}
    for weight in model_weights(SMALL):
        size = 4 * torch.empty(weight.shape, device="meta").numel()
        header[weight.name] = {
            "dtype": "F32",
            "shape": list(weight.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    return [struct.pack("<Q", len(text)) + text + bytes(at)]


def _configs() -> list[bytes]:
    config = to_config(SMALL, "float32", 0)
    stretched = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    stretched |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 2}
    return [
        json.dumps(content).encode()
        for content in (config, {**config, "rope_parameters": stretched, "model_type": "qwen3"})
    ]


def _templates() -> list[bytes]:
    loop = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    refusing = "{{ raise_exception('no') }}"
    functions = "{% macro say(m) %}{{ m | tojson }}{% endmacro %}{% set x = namespace(n=0) %}"
    functions += "{% for m in messages %}{% set x.n = x.n + 1 %}{{ say(m) }}{% endfor %}{{ x.n }}"
    return [text.encode() for text in (loop, marked, refusing, functions)]


def _keys() -> list[bytes]:
    identity = Identity.generate()
    return [identity.to_pem(), identity.public + identity.sign("another purpose", b"")]


def _invites() -> list[bytes]:
    assert ADMISSION.authority is not None
    invitation = Invitation(
        run="r", registries=["host:1"], enrolments=["[::1]:2"], role="node", stage=1, secret=SECRET
    )
    invitation.authority = to_der(ADMISSION.authority.certificate)
    return [encode_invite(invitation).encode(), invitation.SerializeToString(deterministic=True)]


def _enrolments() -> list[bytes]:
    return [Request.of(IDENTITY).request]


def _certificates() -> list[bytes]:
    assert ADMISSION.authority is not None
    pair = ADMISSION.own_pair()
    return [pair.certificate, to_der(pair.certificate), to_der(ADMISSION.authority.certificate)]


def _admissions() -> list[bytes]:
    with folder_with() as made:
        admission = Admission(made / "registry", certifies=False)
        invite, _ = admission.invite(Role.NODE, uses=3, seconds=5.0, stage=2)
        admission.decide(admission.invites.ban("0" * 32))
        admission.decide(admission.invites.allow("0" * 32))
        admission.decide(admission.invites.revoke(invite.id))
        lines = (made / "registry" / "invites.jsonl").read_bytes()
    enrolled = json.dumps({"enrolled": "1" * 32, "invite": invite.id}).encode() + b"\n"
    return [lines + enrolled]


def _stores() -> list[bytes]:
    key = IDENTITY.public.hex()
    leader = json.dumps({"at": "a:1", "key": key, "term": "1"}).encode()
    members = [
        Member(node="a", address="h:1", joined=1, seats=[Seat(stage=0)]),
        Member(node="b", joined=2, seats=[Seat(stage=1, since=2)]),
    ]
    view = View(run="r", number=7, members=members, driver="a", committed=3, banned=["0" * 32])
    decided = json.dumps({"banned": "0" * 32}).encode()
    values = [leader, b"7", view.SerializeToString(), decided]
    return [_joined(values), _joined([b"[" * 9000, b"x", b"", b"{"])]


def _new_views() -> list[bytes]:
    messages = NewView(difference=difference(HELD, LATER)), NewView(whole=LATER)
    return [message.SerializeToString() for message in messages]


def _addresses() -> list[bytes]:
    return [b"host:7400", b"[::1]:7400", b"0.0.0.0:0", b"http://host:1", b"127.0.0.1:65536"]
