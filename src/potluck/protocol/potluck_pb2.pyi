from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Version(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("version", "token", "request_pem", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: Version
    token: str
    request_pem: bytes
    name: str
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., token: _Optional[str] = ..., request_pem: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate_pem", "authority_pem", "worker_id", "serve_port", "role")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_PEM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVE_PORT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    authority_pem: bytes
    worker_id: str
    serve_port: int
    role: str
    def __init__(self, certificate_pem: _Optional[bytes] = ..., authority_pem: _Optional[bytes] = ..., worker_id: _Optional[str] = ..., serve_port: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request_pem",)
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    request_pem: bytes
    def __init__(self, request_pem: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...

class StrategyFile(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class WelcomeRequest(_message.Message):
    __slots__ = ("version", "profile_json", "strategies", "process", "is_look", "declines")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    IS_LOOK_FIELD_NUMBER: _ClassVar[int]
    DECLINES_FIELD_NUMBER: _ClassVar[int]
    version: Version
    profile_json: str
    strategies: _containers.RepeatedCompositeFieldContainer[StrategyFile]
    process: str
    is_look: bool
    declines: str
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., profile_json: _Optional[str] = ..., strategies: _Optional[_Iterable[_Union[StrategyFile, _Mapping]]] = ..., process: _Optional[str] = ..., is_look: _Optional[bool] = ..., declines: _Optional[str] = ...) -> None: ...

class WelcomeReply(_message.Message):
    __slots__ = ("version", "run_id", "run_json")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_JSON_FIELD_NUMBER: _ClassVar[int]
    version: Version
    run_id: str
    run_json: str
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., run_id: _Optional[str] = ..., run_json: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("key", "attempt", "round", "task", "kind", "arguments_json", "objects", "spans", "base_version", "next_version", "num_inline", "up_codec", "held_out", "num_sequences", "deltas", "sequences_per_step", "cut_short", "part", "keeps")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_INLINE_FIELD_NUMBER: _ClassVar[int]
    UP_CODEC_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    CUT_SHORT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    key: str
    attempt: int
    round: int
    task: str
    kind: str
    arguments_json: str
    objects: _containers.RepeatedScalarFieldContainer[str]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    base_version: str
    next_version: str
    num_inline: int
    up_codec: str
    held_out: bool
    num_sequences: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    sequences_per_step: int
    cut_short: bool
    part: _containers.RepeatedScalarFieldContainer[int]
    keeps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., attempt: _Optional[int] = ..., round: _Optional[int] = ..., task: _Optional[str] = ..., kind: _Optional[str] = ..., arguments_json: _Optional[str] = ..., objects: _Optional[_Iterable[str]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., base_version: _Optional[str] = ..., next_version: _Optional[str] = ..., num_inline: _Optional[int] = ..., up_codec: _Optional[str] = ..., held_out: _Optional[bool] = ..., num_sequences: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., sequences_per_step: _Optional[int] = ..., cut_short: _Optional[bool] = ..., part: _Optional[_Iterable[int]] = ..., keeps: _Optional[_Iterable[str]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("target", "base", "delta")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    target: str
    base: str
    delta: str
    def __init__(self, target: _Optional[str] = ..., base: _Optional[str] = ..., delta: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("shard", "start", "stop", "epoch", "digest")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    shard: str
    start: int
    stop: int
    epoch: int
    digest: str
    def __init__(self, shard: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., epoch: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("key", "attempt", "round", "verdict", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    attempt: int
    round: int
    verdict: str
    reason: str
    def __init__(self, key: _Optional[str] = ..., attempt: _Optional[int] = ..., round: _Optional[int] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Desired(_message.Message):
    __slots__ = ("sequence", "leases", "adopted_version", "verdicts", "phase", "stopping", "stop_reason", "inputs", "round", "held_versions", "heartbeat_s")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    adopted_version: str
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    phase: str
    stopping: bool
    stop_reason: str
    inputs: _containers.RepeatedCompositeFieldContainer[SessionInput]
    round: int
    held_versions: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_s: float
    def __init__(self, sequence: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., adopted_version: _Optional[str] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., phase: _Optional[str] = ..., stopping: _Optional[bool] = ..., stop_reason: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[SessionInput, _Mapping]]] = ..., round: _Optional[int] = ..., held_versions: _Optional[_Iterable[str]] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class SessionInput(_message.Message):
    __slots__ = ("key", "step", "arguments_json", "objects")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    step: int
    arguments_json: str
    objects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., step: _Optional[int] = ..., arguments_json: _Optional[str] = ..., objects: _Optional[_Iterable[str]] = ...) -> None: ...

class TaskResult(_message.Message):
    __slots__ = ("key", "attempt", "round", "scalars_json", "object", "num_inline", "error", "step", "seconds", "not_finite", "lacks_state")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SCALARS_JSON_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    NUM_INLINE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    LACKS_STATE_FIELD_NUMBER: _ClassVar[int]
    key: str
    attempt: int
    round: int
    scalars_json: str
    object: str
    num_inline: int
    error: str
    step: int
    seconds: float
    not_finite: bool
    lacks_state: bool
    def __init__(self, key: _Optional[str] = ..., attempt: _Optional[int] = ..., round: _Optional[int] = ..., scalars_json: _Optional[str] = ..., object: _Optional[str] = ..., num_inline: _Optional[int] = ..., error: _Optional[str] = ..., step: _Optional[int] = ..., seconds: _Optional[float] = ..., not_finite: _Optional[bool] = ..., lacks_state: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("key", "attempt", "step", "tokens_per_s", "activity")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    key: str
    attempt: int
    step: int
    tokens_per_s: float
    activity: str
    def __init__(self, key: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., activity: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("sequence", "results", "progress", "input_acks", "leaving", "profile_json", "note")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    INPUT_ACKS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    results: _containers.RepeatedCompositeFieldContainer[TaskResult]
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    input_acks: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    profile_json: str
    note: str
    def __init__(self, sequence: _Optional[int] = ..., results: _Optional[_Iterable[_Union[TaskResult, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., input_acks: _Optional[_Iterable[str]] = ..., leaving: _Optional[bool] = ..., profile_json: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class GetObject(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class ObjectInfo(_message.Message):
    __slots__ = ("digest", "size", "purpose")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    purpose: str
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ..., purpose: _Optional[str] = ...) -> None: ...

class PutAck(_message.Message):
    __slots__ = ("offset", "done", "window")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    offset: int
    done: bool
    window: int
    def __init__(self, offset: _Optional[int] = ..., done: _Optional[bool] = ..., window: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    def __init__(self, status_json: _Optional[str] = ...) -> None: ...

class AdminRequest(_message.Message):
    __slots__ = ("action", "name", "uses", "hours", "role", "limits", "setting")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    action: str
    name: str
    uses: int
    hours: float
    role: str
    limits: RateLimits
    setting: str
    def __init__(self, action: _Optional[str] = ..., name: _Optional[str] = ..., uses: _Optional[int] = ..., hours: _Optional[float] = ..., role: _Optional[str] = ..., limits: _Optional[_Union[RateLimits, _Mapping]] = ..., setting: _Optional[str] = ...) -> None: ...

class RateLimits(_message.Message):
    __slots__ = ("up", "down", "up_per_worker", "down_per_worker")
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    UP_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    DOWN_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    up: float
    down: float
    up_per_worker: float
    down_per_worker: float
    def __init__(self, up: _Optional[float] = ..., down: _Optional[float] = ..., up_per_worker: _Optional[float] = ..., down_per_worker: _Optional[float] = ...) -> None: ...

class AdminReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...
