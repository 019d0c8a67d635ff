"""Errors across the wire: a gRPC status carries the sentence, one metadata entry the name of the class.

Only an answer with that entry comes from a Potluck host. Any other status is the network's: a lost link, unless it
says plainly that one side does not accept the other.
"""

from __future__ import annotations

import grpc

from potluck.transport.rules import MAX_SENTENCE_BYTES
from potluck.types.errors import ConnectionLost, CorruptError, NotAdmitted, PotluckError, Refused
from potluck.types.untrusted import printable

ERROR_KEY = "potluck-error"
_untrusted = ("CERTIFICATE_VERIFY_FAILED", "BAD_SIGNATURE", "Hostname Verification Check failed")
"""What a failed handshake says where the server's certificate is not by our authority, or not for its name."""

_causes = {
    "Connection refused": "nothing listens there, it was refused",
    "DNS resolution failed": "its name is not known",
    "Domain name not found": "its name is not known",
    "No route to host": "the network has no way to it",
    "Network is unreachable": "the network has no way to it",
    "Connection reset": "the connection was reset",
    "Broken pipe": "the connection was reset",
    "Connection timed out": "it does not answer",
    "handshake timed out": "it does not answer",
}
"""What gRPC says among much else, and what it means."""

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]


def to_status(error: Exception) -> Status:
    """What to end a call with."""
    if isinstance(error, ConnectionLost):
        return grpc.StatusCode.UNAVAILABLE, str(error), ()
    if isinstance(error, NotAdmitted):
        code = grpc.StatusCode.UNAUTHENTICATED
    elif isinstance(error, CorruptError):
        code = grpc.StatusCode.DATA_LOSS
    else:
        code = grpc.StatusCode.FAILED_PRECONDITION
    return code, str(error), ((ERROR_KEY, type(error).__name__),)


def from_status(error: grpc.aio.AioRpcError, address: str) -> Exception:
    """What a call to `address` that ended badly means."""
    code, sentence = error.code(), printable(error.details() or "", MAX_SENTENCE_BYTES)
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return _classes().get(str(value), Refused)(sentence)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Refused(f"the coordinator at {address} refused a message or call as too much: {sentence}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Refused(f"what answers at {address} does not know this call; check that it is a Potluck coordinator")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return NotAdmitted(f"{address} refused this machine: {sentence}")
    if any(sign in sentence for sign in _untrusted):
        return NotAdmitted(
            f"what answers at {address} does not hold a valid certificate of the authority this machine joined; "
            "join again with a new join line"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ConnectionLost(f"the coordinator at {address} did not answer in time")
    if "Socket closed" in sentence and "failed to connect" in sentence:
        # With TLS 1.3 this is all a client sees when the server does not accept its certificate.
        return ConnectionLost(
            f"{address} closes the connection before it is set up; "
            "if this goes on, the certificate of this machine may have expired, or another service has the port"
        )
    known = next((meaning for sign, meaning in _causes.items() if sign in sentence), "")
    return ConnectionLost(f"no connection to {address}: {known or sentence.strip()[:300] or code.name}")


def _classes() -> dict[str, type[PotluckError]]:
    found: dict[str, type[PotluckError]] = {}
    waiting: list[type[PotluckError]] = [PotluckError]
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = cls
        waiting.extend(cls.__subclasses__())
    return found
