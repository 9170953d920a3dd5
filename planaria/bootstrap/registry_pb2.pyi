from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAIN: _ClassVar[Order]
    PAUSE: _ClassVar[Order]
    STOP: _ClassVar[Order]
    STOPPED: _ClassVar[Order]

class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SILENT: _ClassVar[Cause]
    CHECKSUM: _ClassVar[Cause]
    SHAPE: _ClassVar[Cause]
    DIVERGENCE: _ClassVar[Cause]
    NONFINITE: _ClassVar[Cause]
    HANG: _ClassVar[Cause]
    NUMBERS: _ClassVar[Cause]
    AUDIT: _ClassVar[Cause]
TRAIN: Order
PAUSE: Order
STOP: Order
STOPPED: Order
SILENT: Cause
CHECKSUM: Cause
SHAPE: Cause
DIVERGENCE: Cause
NONFINITE: Cause
HANG: Cause
NUMBERS: Cause
AUDIT: Cause

class Seat(_message.Message):
    __slots__ = ("stage", "since", "requested")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    stage: int
    since: int
    requested: bool
    def __init__(self, stage: _Optional[int] = ..., since: _Optional[int] = ..., requested: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node", "address", "joined", "speed", "host", "device", "data", "seats", "room", "leaving", "key", "block", "standby", "owner")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    joined: int
    speed: float
    host: str
    device: str
    data: str
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    room: int
    leaving: bool
    key: bytes
    block: str
    standby: bool
    owner: bool
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., joined: _Optional[int] = ..., speed: _Optional[float] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., data: _Optional[str] = ..., seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., room: _Optional[int] = ..., leaving: _Optional[bool] = ..., key: _Optional[bytes] = ..., block: _Optional[str] = ..., standby: _Optional[bool] = ..., owner: _Optional[bool] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("run", "number", "members", "driver", "reason", "committed", "lineage", "relays", "quarantined", "before", "signature", "order", "ordered", "changes", "banned", "awaited")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    driver: str
    reason: str
    committed: int
    lineage: int
    relays: _containers.RepeatedCompositeFieldContainer[Relay]
    quarantined: _containers.RepeatedCompositeFieldContainer[Quarantined]
    before: bytes
    signature: bytes
    order: Order
    ordered: str
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    banned: _containers.RepeatedScalarFieldContainer[str]
    awaited: _containers.RepeatedCompositeFieldContainer[AwaitedSave]
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., driver: _Optional[str] = ..., reason: _Optional[str] = ..., committed: _Optional[int] = ..., lineage: _Optional[int] = ..., relays: _Optional[_Iterable[_Union[Relay, _Mapping]]] = ..., quarantined: _Optional[_Iterable[_Union[Quarantined, _Mapping]]] = ..., before: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., order: _Optional[_Union[Order, str]] = ..., ordered: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., banned: _Optional[_Iterable[str]] = ..., awaited: _Optional[_Iterable[_Union[AwaitedSave, _Mapping]]] = ...) -> None: ...

class AwaitedSave(_message.Message):
    __slots__ = ("stage", "step", "node", "key", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    step: int
    node: str
    key: bytes
    seconds: float
    def __init__(self, stage: _Optional[int] = ..., step: _Optional[int] = ..., node: _Optional[str] = ..., key: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("number", "settings", "pending", "step", "undone")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNDONE_FIELD_NUMBER: _ClassVar[int]
    number: int
    settings: _containers.RepeatedScalarFieldContainer[str]
    pending: bool
    step: int
    undone: int
    def __init__(self, number: _Optional[int] = ..., settings: _Optional[_Iterable[str]] = ..., pending: _Optional[bool] = ..., step: _Optional[int] = ..., undone: _Optional[int] = ...) -> None: ...

class NewView(_message.Message):
    __slots__ = ("whole", "difference", "packed")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    whole: View
    difference: Difference
    packed: bytes
    def __init__(self, whole: _Optional[_Union[View, _Mapping]] = ..., difference: _Optional[_Union[Difference, _Mapping]] = ..., packed: _Optional[bytes] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("former", "view", "members", "relays", "quarantined", "banned", "changes", "awaited")
    FORMER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    former: int
    view: View
    members: _containers.RepeatedCompositeFieldContainer[Splice]
    relays: _containers.RepeatedCompositeFieldContainer[Splice]
    quarantined: _containers.RepeatedCompositeFieldContainer[Splice]
    banned: _containers.RepeatedCompositeFieldContainer[Splice]
    changes: _containers.RepeatedCompositeFieldContainer[Splice]
    awaited: _containers.RepeatedCompositeFieldContainer[Splice]
    def __init__(self, former: _Optional[int] = ..., view: _Optional[_Union[View, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Splice, _Mapping]]] = ..., relays: _Optional[_Iterable[_Union[Splice, _Mapping]]] = ..., quarantined: _Optional[_Iterable[_Union[Splice, _Mapping]]] = ..., banned: _Optional[_Iterable[_Union[Splice, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[Splice, _Mapping]]] = ..., awaited: _Optional[_Iterable[_Union[Splice, _Mapping]]] = ...) -> None: ...

class Splice(_message.Message):
    __slots__ = ("gone", "kept", "added")
    GONE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    gone: int
    kept: int
    added: int
    def __init__(self, gone: _Optional[int] = ..., kept: _Optional[int] = ..., added: _Optional[int] = ...) -> None: ...

class Relay(_message.Message):
    __slots__ = ("a", "b", "via")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    a: str
    b: str
    via: str
    def __init__(self, a: _Optional[str] = ..., b: _Optional[str] = ..., via: _Optional[str] = ...) -> None: ...

class Quarantined(_message.Message):
    __slots__ = ("instance", "node", "cause", "why", "times", "divergences", "seconds")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    node: str
    cause: Cause
    why: str
    times: int
    divergences: int
    seconds: float
    def __init__(self, instance: _Optional[str] = ..., node: _Optional[str] = ..., cause: _Optional[_Union[Cause, str]] = ..., why: _Optional[str] = ..., times: _Optional[int] = ..., divergences: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "node", "address", "stage", "data", "speed", "host", "device", "question", "answered", "room", "standby", "saves", "run", "key", "signature")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    address: str
    stage: int
    data: str
    speed: float
    host: str
    device: str
    question: int
    answered: _containers.RepeatedScalarFieldContainer[str]
    room: int
    standby: bool
    saves: _containers.RepeatedScalarFieldContainer[int]
    run: str
    key: bytes
    signature: bytes
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., stage: _Optional[int] = ..., data: _Optional[str] = ..., speed: _Optional[float] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., question: _Optional[int] = ..., answered: _Optional[_Iterable[str]] = ..., room: _Optional[int] = ..., standby: _Optional[bool] = ..., saves: _Optional[_Iterable[int]] = ..., run: _Optional[str] = ..., key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("run", "run_file", "view", "reason", "question", "unheard", "dial_seconds", "lease", "quarantine", "key", "packed")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_FILE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    DIAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    run: str
    run_file: str
    view: View
    reason: str
    question: int
    unheard: _containers.RepeatedCompositeFieldContainer[Member]
    dial_seconds: float
    lease: float
    quarantine: float
    key: bytes
    packed: bytes
    def __init__(self, run: _Optional[str] = ..., run_file: _Optional[str] = ..., view: _Optional[_Union[View, _Mapping]] = ..., reason: _Optional[str] = ..., question: _Optional[int] = ..., unheard: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., dial_seconds: _Optional[float] = ..., lease: _Optional[float] = ..., quarantine: _Optional[float] = ..., key: _Optional[bytes] = ..., packed: _Optional[bytes] = ...) -> None: ...

class SeatReport(_message.Message):
    __slots__ = ("stage", "committed", "lineage", "phase", "loss", "microbatches", "tokens_per_second", "message", "stopped", "finished", "in_flight", "saved", "saves", "seconds", "unsent")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNSENT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    committed: int
    lineage: int
    phase: str
    loss: float
    microbatches: int
    tokens_per_second: float
    message: str
    stopped: bool
    finished: bool
    in_flight: int
    saved: int
    saves: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    unsent: str
    def __init__(self, stage: _Optional[int] = ..., committed: _Optional[int] = ..., lineage: _Optional[int] = ..., phase: _Optional[str] = ..., loss: _Optional[float] = ..., microbatches: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., message: _Optional[str] = ..., stopped: _Optional[bool] = ..., finished: _Optional[bool] = ..., in_flight: _Optional[int] = ..., saved: _Optional[int] = ..., saves: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., unsent: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("seats", "bytes_in", "bytes_out", "leaving", "memory", "measured", "links", "complaints", "unlisted", "trouble", "stalled_seconds", "samples", "rebuilds", "seen")
    SEATS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    UNLISTED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REBUILDS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    seats: _containers.RepeatedCompositeFieldContainer[SeatReport]
    bytes_in: int
    bytes_out: int
    leaving: bool
    memory: int
    measured: int
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    complaints: _containers.RepeatedCompositeFieldContainer[Complaint]
    unlisted: int
    trouble: str
    stalled_seconds: float
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    rebuilds: _containers.RepeatedCompositeFieldContainer[Rebuild]
    seen: _containers.RepeatedCompositeFieldContainer[LinkReport]
    def __init__(self, seats: _Optional[_Iterable[_Union[SeatReport, _Mapping]]] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., leaving: _Optional[bool] = ..., memory: _Optional[int] = ..., measured: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., complaints: _Optional[_Iterable[_Union[Complaint, _Mapping]]] = ..., unlisted: _Optional[int] = ..., trouble: _Optional[str] = ..., stalled_seconds: _Optional[float] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., rebuilds: _Optional[_Iterable[_Union[Rebuild, _Mapping]]] = ..., seen: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ...) -> None: ...

class Rebuild(_message.Message):
    __slots__ = ("stage", "step", "method", "exact")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    step: int
    method: str
    exact: bool
    def __init__(self, stage: _Optional[int] = ..., step: _Optional[int] = ..., method: _Optional[str] = ..., exact: _Optional[bool] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("step", "prompt", "text")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    step: int
    prompt: str
    text: str
    def __init__(self, step: _Optional[int] = ..., prompt: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Complaint(_message.Message):
    __slots__ = ("peer", "relayed")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    relayed: bool
    def __init__(self, peer: _Optional[str] = ..., relayed: _Optional[bool] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("peer", "rtt_ms", "mbps")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    MBPS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    rtt_ms: float
    mbps: float
    def __init__(self, peer: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., mbps: _Optional[float] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("node", "report", "probe", "happened", "run", "member", "view", "shown", "signature")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    HAPPENED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    node: str
    report: Report
    probe: int
    happened: _containers.RepeatedScalarFieldContainer[str]
    run: str
    member: Member
    view: View
    shown: int
    signature: bytes
    def __init__(self, node: _Optional[str] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., probe: _Optional[int] = ..., happened: _Optional[_Iterable[str]] = ..., run: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., shown: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("probe", "evicted", "view", "measure")
    PROBE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    probe: int
    evicted: str
    view: int
    measure: int
    def __init__(self, probe: _Optional[int] = ..., evicted: _Optional[str] = ..., view: _Optional[int] = ..., measure: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run", "node", "known")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: str
    known: bytes
    def __init__(self, run: _Optional[str] = ..., node: _Optional[str] = ..., known: _Optional[bytes] = ...) -> None: ...

class Suspicion(_message.Message):
    __slots__ = ("accuser", "accused", "why", "cause", "signature")
    ACCUSER_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    accuser: str
    accused: str
    why: str
    cause: Cause
    signature: bytes
    def __init__(self, accuser: _Optional[str] = ..., accused: _Optional[str] = ..., why: _Optional[str] = ..., cause: _Optional[_Union[Cause, str]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Heard(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node", "why", "signature")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    node: str
    why: str
    signature: bytes
    def __init__(self, node: _Optional[str] = ..., why: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: int
    def __init__(self, view: _Optional[int] = ...) -> None: ...

class MeasureRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MeasureReply(_message.Message):
    __slots__ = ("number", "nodes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    number: int
    nodes: int
    def __init__(self, number: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class MemberDescription(_message.Message):
    __slots__ = ("member", "report", "since_renewal", "suspected", "reached_by", "why", "instance")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SINCE_RENEWAL_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    REACHED_BY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    member: Member
    report: Report
    since_renewal: float
    suspected: bool
    reached_by: str
    why: _containers.RepeatedScalarFieldContainer[str]
    instance: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., since_renewal: _Optional[float] = ..., suspected: _Optional[bool] = ..., reached_by: _Optional[str] = ..., why: _Optional[_Iterable[str]] = ..., instance: _Optional[str] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("run", "run_file", "view", "members", "decisions", "uptime", "protocol", "cuts", "quarantined", "evictions", "trouble", "rebuilds", "page", "shortened", "unlisted")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_FILE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    REBUILDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_FIELD_NUMBER: _ClassVar[int]
    UNLISTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    run_file: str
    view: View
    members: _containers.RepeatedCompositeFieldContainer[MemberDescription]
    decisions: _containers.RepeatedScalarFieldContainer[str]
    uptime: float
    protocol: int
    cuts: _containers.RepeatedCompositeFieldContainer[Cut]
    quarantined: _containers.RepeatedCompositeFieldContainer[Quarantined]
    evictions: _containers.RepeatedCompositeFieldContainer[Eviction]
    trouble: str
    rebuilds: _containers.RepeatedCompositeFieldContainer[Rebuild]
    page: str
    shortened: int
    unlisted: int
    def __init__(self, run: _Optional[str] = ..., run_file: _Optional[str] = ..., view: _Optional[_Union[View, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberDescription, _Mapping]]] = ..., decisions: _Optional[_Iterable[str]] = ..., uptime: _Optional[float] = ..., protocol: _Optional[int] = ..., cuts: _Optional[_Iterable[_Union[Cut, _Mapping]]] = ..., quarantined: _Optional[_Iterable[_Union[Quarantined, _Mapping]]] = ..., evictions: _Optional[_Iterable[_Union[Eviction, _Mapping]]] = ..., trouble: _Optional[str] = ..., rebuilds: _Optional[_Iterable[_Union[Rebuild, _Mapping]]] = ..., page: _Optional[str] = ..., shortened: _Optional[int] = ..., unlisted: _Optional[int] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("a", "b", "seconds", "via", "carried", "state")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    a: str
    b: str
    seconds: float
    via: str
    carried: bool
    state: str
    def __init__(self, a: _Optional[str] = ..., b: _Optional[str] = ..., seconds: _Optional[float] = ..., via: _Optional[str] = ..., carried: _Optional[bool] = ..., state: _Optional[str] = ...) -> None: ...

class Eviction(_message.Message):
    __slots__ = ("member", "reason", "seconds")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    reason: str
    seconds: float
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ShowRequest(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: bool
    def __init__(self, figures: _Optional[bool] = ...) -> None: ...

class Shown(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("name", "port", "load", "wanted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    port: int
    load: bytes
    wanted: int
    def __init__(self, name: _Optional[str] = ..., port: _Optional[int] = ..., load: _Optional[bytes] = ..., wanted: _Optional[int] = ...) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("time", "host", "there", "load")
    TIME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    time: float
    host: str
    there: bool
    load: bytes
    def __init__(self, time: _Optional[float] = ..., host: _Optional[str] = ..., there: _Optional[bool] = ..., load: _Optional[bytes] = ...) -> None: ...
