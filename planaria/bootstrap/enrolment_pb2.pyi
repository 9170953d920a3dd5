from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Invitation(_message.Message):
    __slots__ = ("run", "registries", "enrolments", "authority", "secret", "role", "stage")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REGISTRIES_FIELD_NUMBER: _ClassVar[int]
    ENROLMENTS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    run: str
    registries: _containers.RepeatedScalarFieldContainer[str]
    enrolments: _containers.RepeatedScalarFieldContainer[str]
    authority: bytes
    secret: bytes
    role: str
    stage: int
    def __init__(self, run: _Optional[str] = ..., registries: _Optional[_Iterable[str]] = ..., enrolments: _Optional[_Iterable[str]] = ..., authority: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., role: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("secret", "public_key", "request", "signature")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    public_key: bytes
    request: bytes
    signature: bytes
    def __init__(self, secret: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., request: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("role", "uses", "seconds", "stage")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    role: str
    uses: int
    seconds: float
    stage: int
    def __init__(self, role: _Optional[str] = ..., uses: _Optional[int] = ..., seconds: _Optional[float] = ..., stage: _Optional[int] = ...) -> None: ...

class Invited(_message.Message):
    __slots__ = ("id", "secret")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    id: str
    secret: bytes
    def __init__(self, id: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class ListInvitesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Invites(_message.Message):
    __slots__ = ("invites",)
    INVITES_FIELD_NUMBER: _ClassVar[int]
    invites: _containers.RepeatedCompositeFieldContainer[InviteState]
    def __init__(self, invites: _Optional[_Iterable[_Union[InviteState, _Mapping]]] = ...) -> None: ...

class InviteState(_message.Message):
    __slots__ = ("id", "role", "uses", "used", "ends", "stage", "revoked")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    uses: int
    used: int
    ends: float
    stage: int
    revoked: bool
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., uses: _Optional[int] = ..., used: _Optional[int] = ..., ends: _Optional[float] = ..., stage: _Optional[int] = ..., revoked: _Optional[bool] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListEnrolledRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnrolledReply(_message.Message):
    __slots__ = ("enrolled", "banned")
    ENROLLED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    enrolled: _containers.RepeatedCompositeFieldContainer[Enrolled]
    banned: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, enrolled: _Optional[_Iterable[_Union[Enrolled, _Mapping]]] = ..., banned: _Optional[_Iterable[str]] = ...) -> None: ...

class Enrolled(_message.Message):
    __slots__ = ("instance", "role", "invite", "stage")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    role: str
    invite: str
    stage: int
    def __init__(self, instance: _Optional[str] = ..., role: _Optional[str] = ..., invite: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class BanRequest(_message.Message):
    __slots__ = ("who",)
    WHO_FIELD_NUMBER: _ClassVar[int]
    who: str
    def __init__(self, who: _Optional[str] = ...) -> None: ...

class AllowRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    def __init__(self, instance: _Optional[str] = ...) -> None: ...

class CommandRequest(_message.Message):
    __slots__ = ("word", "why", "settings", "step")
    WORD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    word: str
    why: str
    settings: _containers.RepeatedScalarFieldContainer[str]
    step: int
    def __init__(self, word: _Optional[str] = ..., why: _Optional[str] = ..., settings: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("what",)
    WHAT_FIELD_NUMBER: _ClassVar[int]
    what: str
    def __init__(self, what: _Optional[str] = ...) -> None: ...
