"""The wire protocol: messages (potluck.proto), its version, and the framing of raw bytes."""

from typing import Any, TypeVar

from potluck.protocol import potluck_pb2 as pb
from potluck.types.errors import Refused, VersionMismatch

M = TypeVar("M")

MAJOR, MINOR = 1, 0
FLOATING = (1 << 40) - 1
"""The round of leases for work that may outlive rounds: `next`, `gather` and sessions."""
AHEAD = FLOATING - 1
"""The round of leases for work that is begun before the rounds that collect it: `enqueue`."""


def version() -> pb.Version:
    return pb.Version(major=MAJOR, minor=MINOR)


def check_version(theirs: pb.Version, *, who: str) -> None:
    """Refuse another major version. `who` is the other side, as the subject of the sentence."""
    if theirs.major != MAJOR:
        raise VersionMismatch(
            f"{who} speaks protocol {theirs.major}.{theirs.minor} and this side {MAJOR}.{MINOR}; "
            "install the same major version of potluck on both machines"
        )


def upload_purpose(round: int, attempt: int, key: str) -> str:
    """What an upload is for, as `ObjectInfo.purpose` names it: the lease whose result it is."""
    return f"{key}#{attempt}@{round}"


def parse(kind: type[M], data: bytes) -> M:
    """A message from the network; Refused where it is not one."""
    message_type: Any = kind
    try:
        return message_type.FromString(data)
    except Exception as error:  # protobuf runtimes differ in what they raise
        raise Refused(f"a {kind.__name__} cannot be read") from error
