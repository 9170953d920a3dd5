from planaria.bootstrap import registry_pb2 as _registry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Recording(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NO_LEDGER: _ClassVar[Recording]
    LEDGER_WRITTEN: _ClassVar[Recording]
    LEDGER_FAILING: _ClassVar[Recording]
    LEDGER_WRITING: _ClassVar[Recording]
    LEDGER_SPARE: _ClassVar[Recording]
NO_LEDGER: Recording
LEDGER_WRITTEN: Recording
LEDGER_FAILING: Recording
LEDGER_WRITING: Recording
LEDGER_SPARE: Recording

class Ballot(_message.Message):
    __slots__ = ("view", "attempt")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    view: int
    attempt: int
    def __init__(self, view: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("ballot", "query", "status", "sync", "synced", "step", "home", "reduce", "ready", "failed", "stale", "halt", "state_request", "state_manifest", "shard_request", "shard_refusal", "heartbeat", "kept", "boundary_request", "boundary_manifest", "relearn", "cut", "inquiry", "account", "carried", "pin_request", "pinned", "log_request", "log_lines", "check", "compared", "acknowledged", "farewell", "scored", "records", "seat", "sender", "checksum")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    REDUCE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHARD_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SHARD_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    RELEARN_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    INQUIRY_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    PIN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LOG_REQUEST_FIELD_NUMBER: _ClassVar[int]
    LOG_LINES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ballot: Ballot
    query: Query
    status: Status
    sync: Sync
    synced: Synced
    step: Step
    home: Home
    reduce: Reduce
    ready: Ready
    failed: Failed
    stale: Stale
    halt: Halt
    state_request: StateRequest
    state_manifest: StateManifest
    shard_request: ShardRequest
    shard_refusal: ShardRefusal
    heartbeat: Heartbeat
    kept: Kept
    boundary_request: BoundaryRequest
    boundary_manifest: BoundaryManifest
    relearn: Relearn
    cut: Cut
    inquiry: Inquiry
    account: Account
    carried: Carried
    pin_request: PinRequest
    pinned: Pinned
    log_request: LogRequest
    log_lines: LogLines
    check: Check
    compared: Compared
    acknowledged: Acknowledged
    farewell: Farewell
    scored: Scored
    records: Records
    seat: str
    sender: str
    checksum: int
    def __init__(self, ballot: _Optional[_Union[Ballot, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., sync: _Optional[_Union[Sync, _Mapping]] = ..., synced: _Optional[_Union[Synced, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., home: _Optional[_Union[Home, _Mapping]] = ..., reduce: _Optional[_Union[Reduce, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., stale: _Optional[_Union[Stale, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., state_request: _Optional[_Union[StateRequest, _Mapping]] = ..., state_manifest: _Optional[_Union[StateManifest, _Mapping]] = ..., shard_request: _Optional[_Union[ShardRequest, _Mapping]] = ..., shard_refusal: _Optional[_Union[ShardRefusal, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., boundary_request: _Optional[_Union[BoundaryRequest, _Mapping]] = ..., boundary_manifest: _Optional[_Union[BoundaryManifest, _Mapping]] = ..., relearn: _Optional[_Union[Relearn, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., inquiry: _Optional[_Union[Inquiry, _Mapping]] = ..., account: _Optional[_Union[Account, _Mapping]] = ..., carried: _Optional[_Union[Carried, _Mapping]] = ..., pin_request: _Optional[_Union[PinRequest, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ..., log_request: _Optional[_Union[LogRequest, _Mapping]] = ..., log_lines: _Optional[_Union[LogLines, _Mapping]] = ..., check: _Optional[_Union[Check, _Mapping]] = ..., compared: _Optional[_Union[Compared, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., scored: _Optional[_Union[Scored, _Mapping]] = ..., records: _Optional[_Union[Records, _Mapping]] = ..., seat: _Optional[str] = ..., sender: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class Carried(_message.Message):
    __slots__ = ("head", "payload")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    payload: bytes
    def __init__(self, head: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("committed", "ready", "ready_ballot", "last", "boosted_at", "digest", "seconds_per_microbatch", "attempting", "lineage", "holdings", "following", "following_lineage", "heard", "weightless", "origin", "trained", "recording", "hang", "relearning", "viewless")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    READY_BALLOT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BOOSTED_AT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTING_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    WEIGHTLESS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    HANG_FIELD_NUMBER: _ClassVar[int]
    RELEARNING_FIELD_NUMBER: _ClassVar[int]
    VIEWLESS_FIELD_NUMBER: _ClassVar[int]
    committed: int
    ready: int
    ready_ballot: Ballot
    last: Commit
    boosted_at: int
    digest: bytes
    seconds_per_microbatch: float
    attempting: int
    lineage: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    following: int
    following_lineage: int
    heard: int
    weightless: bool
    origin: bool
    trained: bool
    recording: Recording
    hang: str
    relearning: int
    viewless: bool
    def __init__(self, committed: _Optional[int] = ..., ready: _Optional[int] = ..., ready_ballot: _Optional[_Union[Ballot, _Mapping]] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., boosted_at: _Optional[int] = ..., digest: _Optional[bytes] = ..., seconds_per_microbatch: _Optional[float] = ..., attempting: _Optional[int] = ..., lineage: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., following: _Optional[int] = ..., following_lineage: _Optional[int] = ..., heard: _Optional[int] = ..., weightless: _Optional[bool] = ..., origin: _Optional[bool] = ..., trained: _Optional[bool] = ..., recording: _Optional[_Union[Recording, str]] = ..., hang: _Optional[str] = ..., relearning: _Optional[int] = ..., viewless: _Optional[bool] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("kind", "stage", "step", "lineage", "mean_step", "oldest_step", "perturbation", "made", "digest")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    MEAN_STEP_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    PERTURBATION_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    kind: str
    stage: int
    step: int
    lineage: int
    mean_step: float
    oldest_step: int
    perturbation: float
    made: Ballot
    digest: bytes
    def __init__(self, kind: _Optional[str] = ..., stage: _Optional[int] = ..., step: _Optional[int] = ..., lineage: _Optional[int] = ..., mean_step: _Optional[float] = ..., oldest_step: _Optional[int] = ..., perturbation: _Optional[float] = ..., made: _Optional[_Union[Ballot, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("node", "stage")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    node: str
    stage: int
    def __init__(self, node: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("node", "stage", "step", "lineage")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    node: str
    stage: int
    step: int
    lineage: int
    def __init__(self, node: _Optional[str] = ..., stage: _Optional[int] = ..., step: _Optional[int] = ..., lineage: _Optional[int] = ...) -> None: ...

class Sync(_message.Message):
    __slots__ = ("step", "method", "reason", "sources", "last", "lineage", "lost", "neighbours", "follow", "relearning", "giver", "goes_on")
    STEP_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    RELEARNING_FIELD_NUMBER: _ClassVar[int]
    GIVER_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    step: int
    method: str
    reason: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    last: Commit
    lineage: int
    lost: _containers.RepeatedCompositeFieldContainer[Place]
    neighbours: _containers.RepeatedCompositeFieldContainer[Place]
    follow: bool
    relearning: float
    giver: str
    goes_on: bool
    def __init__(self, step: _Optional[int] = ..., method: _Optional[str] = ..., reason: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., lineage: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., neighbours: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., follow: _Optional[bool] = ..., relearning: _Optional[float] = ..., giver: _Optional[str] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class Synced(_message.Message):
    __slots__ = ("step", "method", "sources", "fetched_bytes", "seconds", "digest", "relearned")
    STEP_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RELEARNED_FIELD_NUMBER: _ClassVar[int]
    step: int
    method: str
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    fetched_bytes: int
    seconds: float
    digest: bytes
    relearned: Relearned
    def __init__(self, step: _Optional[int] = ..., method: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., fetched_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., digest: _Optional[bytes] = ..., relearned: _Optional[_Union[Relearned, _Mapping]] = ...) -> None: ...

class Relearned(_message.Message):
    __slots__ = ("residual_before", "residual_after", "passes", "seconds", "fetched_bytes", "pairs", "left_out", "undone", "updates", "left")
    RESIDUAL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_AFTER_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    UNDONE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    residual_before: float
    residual_after: float
    passes: int
    seconds: float
    fetched_bytes: int
    pairs: int
    left_out: int
    undone: bool
    updates: int
    left: int
    def __init__(self, residual_before: _Optional[float] = ..., residual_after: _Optional[float] = ..., passes: _Optional[int] = ..., seconds: _Optional[float] = ..., fetched_bytes: _Optional[int] = ..., pairs: _Optional[int] = ..., left_out: _Optional[int] = ..., undone: _Optional[bool] = ..., updates: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class Microbatch(_message.Message):
    __slots__ = ("id", "source", "order", "places")
    ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    id: int
    source: str
    order: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., source: _Optional[str] = ..., order: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("step", "kind", "plan", "lr_scale", "members", "joining", "since", "non_finite", "entering", "checks", "untold", "members_of", "left", "keeps")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TRAIN: _ClassVar[Begin.Kind]
        EVALUATE: _ClassVar[Begin.Kind]
    TRAIN: Begin.Kind
    EVALUATE: Begin.Kind
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LR_SCALE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    ENTERING_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_OF_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    kind: Begin.Kind
    plan: _containers.RepeatedCompositeFieldContainer[Microbatch]
    lr_scale: _containers.RepeatedScalarFieldContainer[float]
    members: _containers.RepeatedCompositeFieldContainer[Place]
    joining: _containers.RepeatedCompositeFieldContainer[Joiner]
    since: Ballot
    non_finite: bool
    entering: _containers.RepeatedScalarFieldContainer[str]
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    untold: int
    members_of: Ballot
    left: _containers.RepeatedScalarFieldContainer[str]
    keeps: bool
    def __init__(self, step: _Optional[int] = ..., kind: _Optional[_Union[Begin.Kind, str]] = ..., plan: _Optional[_Iterable[_Union[Microbatch, _Mapping]]] = ..., lr_scale: _Optional[_Iterable[float]] = ..., members: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., joining: _Optional[_Iterable[_Union[Joiner, _Mapping]]] = ..., since: _Optional[_Union[Ballot, _Mapping]] = ..., non_finite: _Optional[bool] = ..., entering: _Optional[_Iterable[str]] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ..., untold: _Optional[int] = ..., members_of: _Optional[_Union[Ballot, _Mapping]] = ..., left: _Optional[_Iterable[str]] = ..., keeps: _Optional[bool] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("microbatch", "position", "double")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_FIELD_NUMBER: _ClassVar[int]
    microbatch: int
    position: int
    double: str
    def __init__(self, microbatch: _Optional[int] = ..., position: _Optional[int] = ..., double: _Optional[str] = ...) -> None: ...

class Compared(_message.Message):
    __slots__ = ("microbatch", "position", "backward", "node", "other", "difference")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    microbatch: int
    position: int
    backward: bool
    node: str
    other: str
    difference: float
    def __init__(self, microbatch: _Optional[int] = ..., position: _Optional[int] = ..., backward: _Optional[bool] = ..., node: _Optional[str] = ..., other: _Optional[str] = ..., difference: _Optional[float] = ...) -> None: ...

class Joiner(_message.Message):
    __slots__ = ("node", "stage", "step")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    node: str
    stage: int
    step: int
    def __init__(self, node: _Optional[str] = ..., stage: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "ballot", "skipped", "clip_scale", "lr_scale", "loss", "tokens", "gradient_norm", "microbatches", "seconds", "skips", "lineage", "previous", "records", "signature", "doubted", "relearned", "audited", "suspicions", "usual_norms")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CLIP_SCALE_FIELD_NUMBER: _ClassVar[int]
    LR_SCALE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_FIELD_NUMBER: _ClassVar[int]
    RELEARNED_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    SUSPICIONS_FIELD_NUMBER: _ClassVar[int]
    USUAL_NORMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    ballot: Ballot
    skipped: bool
    clip_scale: _containers.RepeatedScalarFieldContainer[float]
    lr_scale: _containers.RepeatedScalarFieldContainer[float]
    loss: float
    tokens: int
    gradient_norm: float
    microbatches: _containers.RepeatedCompositeFieldContainer[Home]
    seconds: float
    skips: int
    lineage: int
    previous: bytes
    records: bytes
    signature: bytes
    doubted: _containers.RepeatedCompositeFieldContainer[Doubted]
    relearned: _containers.RepeatedScalarFieldContainer[int]
    audited: _containers.RepeatedScalarFieldContainer[int]
    suspicions: _containers.RepeatedCompositeFieldContainer[Suspicion]
    usual_norms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., skipped: _Optional[bool] = ..., clip_scale: _Optional[_Iterable[float]] = ..., lr_scale: _Optional[_Iterable[float]] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ..., gradient_norm: _Optional[float] = ..., microbatches: _Optional[_Iterable[_Union[Home, _Mapping]]] = ..., seconds: _Optional[float] = ..., skips: _Optional[int] = ..., lineage: _Optional[int] = ..., previous: _Optional[bytes] = ..., records: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., doubted: _Optional[_Iterable[_Union[Doubted, _Mapping]]] = ..., relearned: _Optional[_Iterable[int]] = ..., audited: _Optional[_Iterable[int]] = ..., suspicions: _Optional[_Iterable[_Union[Suspicion, _Mapping]]] = ..., usual_norms: _Optional[_Iterable[float]] = ...) -> None: ...

class Doubted(_message.Message):
    __slots__ = ("node", "stage", "since")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    stage: int
    since: int
    def __init__(self, node: _Optional[str] = ..., stage: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("commit", "begin")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    begin: Begin
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ...) -> None: ...

class Home(_message.Message):
    __slots__ = ("microbatch", "loss", "tokens", "samples", "samples_hash")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_HASH_FIELD_NUMBER: _ClassVar[int]
    microbatch: int
    loss: float
    tokens: int
    samples: int
    samples_hash: bytes
    def __init__(self, microbatch: _Optional[int] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ..., samples: _Optional[int] = ..., samples_hash: _Optional[bytes] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("microbatches",)
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    microbatches: _containers.RepeatedCompositeFieldContainer[Home]
    def __init__(self, microbatches: _Optional[_Iterable[_Union[Home, _Mapping]]] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("microbatches",)
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    microbatches: _containers.RepeatedCompositeFieldContainer[Home]
    def __init__(self, microbatches: _Optional[_Iterable[_Union[Home, _Mapping]]] = ...) -> None: ...

class Reduce(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ready(_message.Message):
    __slots__ = ("step", "squared_norm", "finite", "digest", "seconds_per_microbatch", "applied", "recording", "relearned", "relearning")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    RELEARNED_FIELD_NUMBER: _ClassVar[int]
    RELEARNING_FIELD_NUMBER: _ClassVar[int]
    step: int
    squared_norm: float
    finite: bool
    digest: bytes
    seconds_per_microbatch: float
    applied: bytes
    recording: Recording
    relearned: int
    relearning: int
    def __init__(self, step: _Optional[int] = ..., squared_norm: _Optional[float] = ..., finite: _Optional[bool] = ..., digest: _Optional[bytes] = ..., seconds_per_microbatch: _Optional[float] = ..., applied: _Optional[bytes] = ..., recording: _Optional[_Union[Recording, str]] = ..., relearned: _Optional[int] = ..., relearning: _Optional[int] = ...) -> None: ...

class SignedBlocks(_message.Message):
    __slots__ = ("node", "ballot", "phase", "start", "stop", "digests", "own", "signature")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    node: str
    ballot: Ballot
    phase: str
    start: int
    stop: int
    digests: bytes
    own: bytes
    signature: bytes
    def __init__(self, node: _Optional[str] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., phase: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., digests: _Optional[bytes] = ..., own: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class AuditAnswer(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[AuditedBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[AuditedBlock, _Mapping]]] = ...) -> None: ...

class AuditedBlock(_message.Message):
    __slots__ = ("contribution", "sum", "signed")
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    contribution: bytes
    sum: bytes
    signed: _containers.RepeatedCompositeFieldContainer[SignedBlocks]
    def __init__(self, contribution: _Optional[bytes] = ..., sum: _Optional[bytes] = ..., signed: _Optional[_Iterable[_Union[SignedBlocks, _Mapping]]] = ...) -> None: ...

class Suspicion(_message.Message):
    __slots__ = ("node", "test", "score")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TEST_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    node: str
    test: str
    score: float
    def __init__(self, node: _Optional[str] = ..., test: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "accused", "cause")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    accused: _containers.RepeatedScalarFieldContainer[str]
    cause: _registry_pb2.Cause
    def __init__(self, reason: _Optional[str] = ..., accused: _Optional[_Iterable[str]] = ..., cause: _Optional[_Union[_registry_pb2.Cause, str]] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("node", "reason", "cause")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    cause: _registry_pb2.Cause
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ..., cause: _Optional[_Union[_registry_pb2.Cause, str]] = ...) -> None: ...

class Inquiry(_message.Message):
    __slots__ = ("relieve", "replace")
    RELIEVE_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    relieve: bool
    replace: str
    def __init__(self, relieve: _Optional[bool] = ..., replace: _Optional[str] = ...) -> None: ...

class Account(_message.Message):
    __slots__ = ("computed", "computing", "done", "given_up", "hang", "fetched")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    HANG_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    computed: int
    computing: bool
    done: _containers.RepeatedCompositeFieldContainer[Pass]
    given_up: _containers.RepeatedScalarFieldContainer[int]
    hang: str
    fetched: int
    def __init__(self, computed: _Optional[int] = ..., computing: _Optional[bool] = ..., done: _Optional[_Iterable[_Union[Pass, _Mapping]]] = ..., given_up: _Optional[_Iterable[int]] = ..., hang: _Optional[str] = ..., fetched: _Optional[int] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("microbatch", "position", "backward")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    microbatch: int
    position: int
    backward: bool
    def __init__(self, microbatch: _Optional[int] = ..., position: _Optional[int] = ..., backward: _Optional[bool] = ...) -> None: ...

class Stale(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Halt(_message.Message):
    __slots__ = ("finished", "reason", "step", "validation_loss")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    reason: str
    step: int
    validation_loss: float
    def __init__(self, finished: _Optional[bool] = ..., reason: _Optional[str] = ..., step: _Optional[int] = ..., validation_loss: _Optional[float] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("transfer", "step", "optimizer", "kind", "stage")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    optimizer: bool
    kind: str
    stage: int
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., optimizer: _Optional[bool] = ..., kind: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class StateManifest(_message.Message):
    __slots__ = ("transfer", "step", "error", "tensors", "size", "omega", "boosted_at", "last", "optimizer_step", "digest")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMEGA_FIELD_NUMBER: _ClassVar[int]
    BOOSTED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    error: str
    tensors: bytes
    size: int
    omega: float
    boosted_at: int
    last: Commit
    optimizer_step: int
    digest: bytes
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., error: _Optional[str] = ..., tensors: _Optional[bytes] = ..., size: _Optional[int] = ..., omega: _Optional[float] = ..., boosted_at: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., optimizer_step: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ShardRequest(_message.Message):
    __slots__ = ("transfer", "step", "optimizer", "offset", "size", "kind", "stage")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    optimizer: bool
    offset: int
    size: int
    kind: str
    stage: int
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., optimizer: _Optional[bool] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., kind: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class ShardRefusal(_message.Message):
    __slots__ = ("transfer", "offset", "reason")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    offset: int
    reason: str
    def __init__(self, transfer: _Optional[int] = ..., offset: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("transfer", "step", "exported")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    exported: bool
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., exported: _Optional[bool] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("transfer", "step", "committed", "lineage", "kept", "error", "unheard")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    committed: int
    lineage: int
    kept: bool
    error: str
    unheard: bool
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., committed: _Optional[int] = ..., lineage: _Optional[int] = ..., kept: _Optional[bool] = ..., error: _Optional[str] = ..., unheard: _Optional[bool] = ...) -> None: ...

class LogRequest(_message.Message):
    __slots__ = ("lines", "after")
    LINES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    lines: int
    after: int
    def __init__(self, lines: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class LogLines(_message.Message):
    __slots__ = ("lines", "last", "error")
    LINES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    last: int
    error: str
    def __init__(self, lines: _Optional[_Iterable[str]] = ..., last: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("kind", "stage", "step", "error", "transfer", "received")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    stage: int
    step: int
    error: str
    transfer: int
    received: int
    def __init__(self, kind: _Optional[str] = ..., stage: _Optional[int] = ..., step: _Optional[int] = ..., error: _Optional[str] = ..., transfer: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...

class BoundaryRequest(_message.Message):
    __slots__ = ("transfer", "step", "lost", "stage", "offset")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    lost: _containers.RepeatedScalarFieldContainer[int]
    stage: int
    offset: int
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., lost: _Optional[_Iterable[int]] = ..., stage: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class BoundaryManifest(_message.Message):
    __slots__ = ("transfer", "step", "count", "error")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    step: int
    count: int
    error: str
    def __init__(self, transfer: _Optional[int] = ..., step: _Optional[int] = ..., count: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class BoundaryPair(_message.Message):
    __slots__ = ("microbatch", "stages", "input", "output", "step")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    microbatch: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    input: bool
    output: bool
    step: int
    def __init__(self, microbatch: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ..., input: _Optional[bool] = ..., output: _Optional[bool] = ..., step: _Optional[int] = ...) -> None: ...

class Relearn(_message.Message):
    __slots__ = ("round", "work", "pairs", "first", "count", "squared_error", "squared_norm", "result", "time_gone")
    class Work(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ANSWER: _ClassVar[Relearn.Work]
        MEASURE: _ClassVar[Relearn.Work]
        TRAIN: _ClassVar[Relearn.Work]
        KEEP: _ClassVar[Relearn.Work]
        UNDO: _ClassVar[Relearn.Work]
    ANSWER: Relearn.Work
    MEASURE: Relearn.Work
    TRAIN: Relearn.Work
    KEEP: Relearn.Work
    UNDO: Relearn.Work
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SQUARED_ERROR_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TIME_GONE_FIELD_NUMBER: _ClassVar[int]
    round: int
    work: Relearn.Work
    pairs: _containers.RepeatedCompositeFieldContainer[BoundaryPair]
    first: int
    count: int
    squared_error: float
    squared_norm: float
    result: Relearned
    time_gone: float
    def __init__(self, round: _Optional[int] = ..., work: _Optional[_Union[Relearn.Work, str]] = ..., pairs: _Optional[_Iterable[_Union[BoundaryPair, _Mapping]]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., squared_error: _Optional[float] = ..., squared_norm: _Optional[float] = ..., result: _Optional[_Union[Relearned, _Mapping]] = ..., time_gone: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("view", "received", "streams", "sent", "echo", "idle")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    view: int
    received: int
    streams: int
    sent: int
    echo: int
    idle: int
    def __init__(self, view: _Optional[int] = ..., received: _Optional[int] = ..., streams: _Optional[int] = ..., sent: _Optional[int] = ..., echo: _Optional[int] = ..., idle: _Optional[int] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: _containers.RepeatedCompositeFieldContainer[Received]
    def __init__(self, received: _Optional[_Iterable[_Union[Received, _Mapping]]] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("frame", "bytes")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    frame: int
    bytes: int
    def __init__(self, frame: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("frame", "offset", "size", "head", "data", "checksum", "order")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    frame: int
    offset: int
    size: int
    head: bytes
    data: bytes
    checksum: int
    order: int
    def __init__(self, frame: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., head: _Optional[bytes] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., order: _Optional[int] = ...) -> None: ...
