"""What may pass between two hosts, whichever transport carries it: by role, by size, and which errors are told.

Both transports apply these rules, so that a test over the memory transport meets the same refusals as a real network.
"""

from __future__ import annotations

import logging

from potluck.protocol.frames import MAX_FRAME_BYTES
from potluck.transport.connection import OPERATOR_CALLS, STREAMS, WORKER_CALLS, Channel, Peer, Service
from potluck.types.errors import ConnectionLost, NotAdmitted, PotluckError, Refused
from potluck.types.untrusted import printable

BULK_STREAMS = frozenset({"Data", "GetObject", "PutObject"})
MAX_MESSAGE_BYTES = 64 << 20
"""Of a reply or a message of the coordinator on Control. Bulk streams cut what they carry into `MAX_FRAME_BYTES`."""
MAX_REQUEST_BYTES = 4 << 20
"""Of a call or a report: what the coordinator parses from many. Parsed, it may take 40 times as much memory."""
MAX_SENTENCE_BYTES = 4096
"""Of an error, percent-encoded as gRPC sends it; many hosts take no more than 8 KiB of metadata in all."""
loss_grace_s = 30.0
"""How long the service of a lost stream may take to notice at its next send or receive; then it is cancelled."""
close_wait_s = 2.0
"""How long closing a channel waits for the other side to read what was sent and end the stream too."""

_allowed = {"worker": WORKER_CALLS | STREAMS, "operator": OPERATOR_CALLS | {"Renew"}}
_log = logging.getLogger(__name__)


def check_role(peer: Peer, method: str) -> None:
    """Refuse a method that the role in the peer's certificate does not cover."""
    if method not in _allowed.get(peer.role, frozenset[str]()):
        raise NotAdmitted(
            f"{peer.id} has the role {peer.role} and may not use {method}; ask the host of the run for a certificate "
            "with the role that may"
        )


def check_size(method: str, num_bytes: int, *, up: bool) -> None:
    """Refuse a message longer than its kind can be. `up`: from the worker to the coordinator."""
    whole = MAX_REQUEST_BYTES if up else MAX_MESSAGE_BYTES
    limit = MAX_FRAME_BYTES if method in BULK_STREAMS else whole
    if num_bytes > limit:
        raise Refused(f"a message of {num_bytes} bytes on {method} is over the limit of {limit}; send it in parts")


async def answer_call(service: Service, peer: Peer, method: str, request: bytes) -> bytes:
    """The service's reply to a unary call; raises only what the caller may be told."""
    try:
        check_role(peer, method)
        check_size(method, len(request), up=True)
        reply = await service.call(peer, method, request)
        check_size(method, len(reply), up=False)
    except Exception as error:
        raise told(error, method, peer.id) from error
    return reply


async def answer_stream(service: Service, peer: Peer, method: str, channel: Channel) -> Exception | None:
    """Serve a stream to its end: None for good order, else what the caller may be told."""
    try:
        check_role(peer, method)
        await service.open(peer, method, channel)
    except Exception as error:
        return told(error, method, peer.id)
    return None


def told(error: Exception, method: str, who: str) -> Exception:
    """What the other side hears of an error: ours as they are, anything unforeseen only as a fact."""
    if isinstance(error, ConnectionLost):
        return error
    if isinstance(error, PotluckError):
        return type(error)(_cut(printable(str(error), MAX_SENTENCE_BYTES)))
    _log.error("%s of %s failed", method, who, exc_info=error)
    if isinstance(error, OSError):
        return ConnectionLost("the coordinator cannot serve that at the moment")  # its machine's fault: try again
    return Refused(f"internal error in {method}: the log of the coordinator has the details")


def _cut(sentence: str) -> str:
    """As much of the start as fits."""
    num_bytes = 0
    for at, letter in enumerate(sentence):
        num_bytes += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode("utf-8", "replace"))
        if num_bytes > MAX_SENTENCE_BYTES:
            return sentence[:at]
    return sentence
