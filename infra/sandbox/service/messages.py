"""The payloads of frames, and how errors travel. A payload is parsed strictly at the end that receives
it."""

import json
import struct
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from infra.ports.services import SandboxOwner
from infra.sandbox.calls import Role, UserCall
from infra.sandbox.host_messages import (
    LONGEST_TEXT,
    MOST_REWARDS,
    MOST_SERVERS,
    MOST_TOOLS,
    Address,
    Name,
    ProtocolError,
    Text,
)
from infra.sandbox.service.frames import LARGEST_CALL
from schemas.config import MOST_RUBRICS
from schemas.errors import (
    CallInterrupted,
    CorruptData,
    FailureCategory,
    InvalidConfig,
    Refused,
    TransientError,
    UserCodeError,
)
from schemas.secrets.secret_value import SecretValue
from schemas.specs import (
    DiscoveredRollout,
    Entrypoint,
    PackageEnvironment,
    RolloutKind,
    RolloutRef,
    RubricSpec,
)

LENGTH = struct.Struct(">I")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Id = Annotated[str, Field(max_length=500)]
M = TypeVar("M", bound=BaseModel)


class _Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(_Payload):
    """The first frame of a service. `refused` says why it cannot confine user code, and `is_trusting`
    that it runs user code at level process-trusted."""

    refused: Text | None = None
    is_trusting: bool = False


class CallHead(_Payload):
    """The part of a call that the service reads. The message for the process follows it."""

    rollout: RolloutRef
    run: Id
    secrets: dict[str, str] = Field(default={}, repr=False)
    role: Role
    name: Id
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DiscoverRequest(_Payload):
    """Examine these entry points of a snapshot, or all that it has. `environments` are the packages of
    rollouts."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    entrypoints: tuple[Entrypoint, ...]
    environments: dict[str, PackageEnvironment] = {}


class FoundRollout(_Payload):
    """The result of examining one entry point."""

    entrypoint: Entrypoint
    kind: RolloutKind = "classes"
    workflow: Name | None = None
    grader: Name | None = None
    rewards: Annotated[tuple[Name, ...], Field(max_length=MOST_REWARDS)] = ()
    tools: Annotated[tuple[Name, ...], Field(max_length=MOST_TOOLS)] = ()
    mcp: Annotated[tuple[Name, ...], Field(max_length=MOST_SERVERS)] = ()
    mcp_addresses: Annotated[tuple[Address, ...], Field(max_length=MOST_SERVERS)] = ()
    rubrics: Annotated[tuple[RubricSpec, ...], Field(max_length=MOST_RUBRICS)] = ()
    error: Text | None = None


class SocketRequest(_Payload):
    """Open a socket to the gateway for a run."""

    run: Id
    network: Annotated[tuple[Name, ...], Field(max_length=100)] = ()


class SocketName(_Payload):
    """A socket that the client has opened."""

    socket: Id


class SnapshotRequest(_Payload):
    """Send the snapshot with this hash."""

    sha256: Sha256


class WireError(_Payload):
    """An error. `kind` is its class."""

    kind: Literal["user", "interrupted", "transient", "refused", "invalid", "corrupt", "failed"]
    category: FailureCategory = FailureCategory.INTERNAL
    message: Text


_FOUND: TypeAdapter[tuple[FoundRollout, ...]] = TypeAdapter(tuple[FoundRollout, ...])


def parse(model: type[M], data: bytes) -> M:
    """Parse a payload. Raises ProtocolError."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _protocol_error(error) from None


def encode_call(call: UserCall) -> tuple[bytes, ...]:
    """The payload of a call, in parts. Raises UserCodeError when it is too large."""
    head = {
        "run": call.owner.run,
        "secrets": {name: value.reveal() for name, value in call.owner.secrets.items()},
        "role": call.role,
        "name": call.name,
        "deadline_s": call.deadline_s,
    }
    # The rollout is by far the largest part, and pydantic encodes it ten times as fast as json.
    rest = json.dumps(head)[1:]
    data = f'{{"rollout": {call.rollout.model_dump_json()}, {rest}'.encode()
    if len(data) + len(call.message) + LENGTH.size > LARGEST_CALL:
        raise UserCodeError(
            FailureCategory.VALIDATION,
            f"{call.name} has {len(call.message)} bytes of samples, prompt and metadata; a call may "
            f"have at most {LARGEST_CALL >> 20} MiB",
        )
    return LENGTH.pack(len(data)), data, call.message


def parse_call(payload: bytes) -> UserCall:
    """Parse the payload of a call. Raises ProtocolError."""
    if len(payload) < LENGTH.size:
        raise ProtocolError("it sent a call without a head")
    start = LENGTH.size + LENGTH.unpack_from(payload)[0]
    head = parse(CallHead, payload[LENGTH.size : start])
    message = payload[start:]
    if not message.startswith(b'{"') or not message.endswith(b"}"):
        raise ProtocolError("it sent a call whose message is not a JSON object")
    secrets = {name: SecretValue(value) for name, value in head.secrets.items()}
    owner = SandboxOwner(head.run, secrets)
    return UserCall(head.rollout, owner, head.role, head.name, head.deadline_s, message)


def encode_found(found: tuple[DiscoveredRollout, ...]) -> bytes:
    """The payload of the answer to a DiscoverRequest."""
    return _FOUND.dump_json(
        tuple(FoundRollout.model_validate(f.model_dump(exclude={"environment"})) for f in found)
    )


def parse_found(data: bytes) -> tuple[DiscoveredRollout, ...]:
    """Parse the answer to a DiscoverRequest. Raises ProtocolError."""
    try:
        found = _FOUND.validate_json(data)
        return tuple(DiscoveredRollout.model_validate(one.model_dump()) for one in found)
    except ValidationError as error:
        raise _protocol_error(error) from None


def failure_of(error: Exception) -> WireError:
    """How an error travels. Errors that are not meant for the other end travel by the name of their
    class."""
    text = str(error)[:LONGEST_TEXT]
    match error:
        case UserCodeError(category=category):
            return WireError(kind="user", category=category, message=text)
        case CallInterrupted():
            return WireError(kind="interrupted", message=text)
        case TransientError():
            return WireError(kind="transient", message=text)
        case InvalidConfig():
            return WireError(kind="invalid", message=text)
        case Refused():
            return WireError(kind="refused", message=text)
        case CorruptData():
            return WireError(kind="corrupt", message=text)
        case _:
            return WireError(kind="failed", message=type(error).__name__)


def error_of(failure: WireError) -> Exception:
    """The error that a WireError stands for."""
    match failure.kind:
        case "user":
            return UserCodeError(failure.category, failure.message)
        case "interrupted":
            return CallInterrupted(failure.message)
        case "transient":
            return TransientError(failure.message)
        case "invalid":
            return InvalidConfig(failure.message)
        case "refused":
            return Refused(failure.message)
        case "corrupt":
            return CorruptData(failure.message)
        case "failed":
            return TransientError(f"the sandbox service failed: {failure.message}")


def _protocol_error(error: ValidationError) -> ProtocolError:
    details = error.errors(include_url=False, include_input=False)[0]
    return ProtocolError(f"it sent an unknown message: {details['msg']}")
