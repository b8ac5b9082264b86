from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Purpose]
    TRAIN: _ClassVar[Purpose]
    EVALUATE: _ClassVar[Purpose]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTHING: _ClassVar[Status]
    ACCEPTED: _ClassVar[Status]
    DUPLICATE: _ClassVar[Status]
    LATER: _ClassVar[Status]
    REFUSED: _ClassVar[Status]
UNKNOWN: Purpose
TRAIN: Purpose
EVALUATE: Purpose
NOTHING: Status
ACCEPTED: Status
DUPLICATE: Status
LATER: Status
REFUSED: Status

class Envelope(_message.Message):
    __slots__ = ("run", "view", "step", "sender", "hello", "commit", "reveal", "share", "partial_sum", "masked", "plain", "digest", "recall", "outcome", "ready", "observation", "actions", "farewell")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REVEAL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_SUM_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    view: bytes
    step: int
    sender: str
    hello: Hello
    commit: Commit
    reveal: Reveal
    share: Share
    partial_sum: PartialSum
    masked: Masked
    plain: Plain
    digest: Digest
    recall: Recall
    outcome: Outcome
    ready: Ready
    observation: Observation
    actions: Actions
    farewell: Farewell
    def __init__(self, run: _Optional[bytes] = ..., view: _Optional[bytes] = ..., step: _Optional[int] = ..., sender: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., reveal: _Optional[_Union[Reveal, _Mapping]] = ..., share: _Optional[_Union[Share, _Mapping]] = ..., partial_sum: _Optional[_Union[PartialSum, _Mapping]] = ..., masked: _Optional[_Union[Masked, _Mapping]] = ..., plain: _Optional[_Union[Plain, _Mapping]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., actions: _Optional[_Union[Actions, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "names", "incarnations", "completed", "version", "protocol", "agreement", "clock", "mask_key", "started")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    names: _containers.RepeatedScalarFieldContainer[str]
    incarnations: _containers.RepeatedScalarFieldContainer[bytes]
    completed: int
    version: str
    protocol: int
    agreement: str
    clock: float
    mask_key: bytes
    started: float
    def __init__(self, incarnation: _Optional[bytes] = ..., names: _Optional[_Iterable[str]] = ..., incarnations: _Optional[_Iterable[bytes]] = ..., completed: _Optional[int] = ..., version: _Optional[str] = ..., protocol: _Optional[int] = ..., agreement: _Optional[str] = ..., clock: _Optional[float] = ..., mask_key: _Optional[bytes] = ..., started: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("commitment", "facts")
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    commitment: bytes
    facts: bytes
    def __init__(self, commitment: _Optional[bytes] = ..., facts: _Optional[bytes] = ...) -> None: ...

class Reveal(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: bytes
    def __init__(self, words: _Optional[bytes] = ...) -> None: ...

class PartialSum(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: bytes
    def __init__(self, words: _Optional[bytes] = ...) -> None: ...

class Masked(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: bytes
    def __init__(self, words: _Optional[bytes] = ...) -> None: ...

class Plain(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: bytes
    def __init__(self, words: _Optional[bytes] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("kind", "words", "names", "nonces")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NONCES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    words: bytes
    names: _containers.RepeatedScalarFieldContainer[str]
    nonces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[str] = ..., words: _Optional[bytes] = ..., names: _Optional[_Iterable[str]] = ..., nonces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("purpose", "number")
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    purpose: Purpose
    number: int
    def __init__(self, purpose: _Optional[_Union[Purpose, str]] = ..., number: _Optional[int] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("t", "observations", "available", "rewards", "flags", "over")
    T_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    t: int
    observations: bytes
    available: bytes
    rewards: bytes
    flags: bytes
    over: bool
    def __init__(self, t: _Optional[int] = ..., observations: _Optional[bytes] = ..., available: _Optional[bytes] = ..., rewards: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., over: _Optional[bool] = ...) -> None: ...

class Actions(_message.Message):
    __slots__ = ("t", "actions")
    T_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    t: int
    actions: bytes
    def __init__(self, t: _Optional[int] = ..., actions: _Optional[bytes] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("status", "reason")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    status: Status
    reason: str
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., reason: _Optional[str] = ...) -> None: ...
