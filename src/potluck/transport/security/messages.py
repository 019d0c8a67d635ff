"""Reading protobuf messages that come from the network before anybody is authenticated."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from potluck.types.errors import NotAdmitted

MAX_MESSAGE_BYTES = 32768

M = TypeVar("M", bound=Message)


def parse_message(kind: type[M], data: bytes) -> M:
    """NotAdmitted if `data` is too large or not such a message."""
    name = kind.__name__
    if len(data) > MAX_MESSAGE_BYTES:
        raise NotAdmitted(f"a message {name} has {len(data)} bytes and the limit is {MAX_MESSAGE_BYTES}")
    message = kind()
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise NotAdmitted(f"a message {name} of {len(data)} bytes cannot be read; update potluck") from error
    return message
