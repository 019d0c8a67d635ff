"""Raw frames on the bulk streams: a fixed header, then bytes. No protobuf, since it copies twice.

Chunk of an object (GetObject, PutObject):   offset u64 | length u32 | xxh3 u64 | bytes
Inline tensor (Data):                        head length u32 | head (JSON, utf-8) | part of a TensorBundle

Little-endian; xxh3 is the 64-bit hash of the bytes. `length` is theirs too, so a frame that was cut is seen at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from xxhash import xxh3_64_intdigest

from potluck.types.errors import CorruptError

CHUNK_BYTES = 1 << 20
_CHUNK = struct.Struct("<QIQ")
_HEAD = struct.Struct("<I")
MAX_FRAME_BYTES = 2 * CHUNK_BYTES + 65536
MAX_HEAD_BYTES = 65536
CHUNK_HEADER_BYTES = _CHUNK.size


def pack_chunk(offset: int, data: bytes | memoryview) -> bytes:
    return b"".join((_CHUNK.pack(offset, len(data), xxh3_64_intdigest(data)), data))


def read_chunk(offset: int, num_bytes: int, read_into: Callable[[memoryview], int | None]) -> bytes:
    """The frame of `num_bytes` that `read_into` puts in place, never copied; shorter where it finds fewer."""
    buffer = BytesIO()
    buffer.seek(_CHUNK.size + num_bytes - 1)
    buffer.write(b"\0")
    length = 0
    with buffer.getbuffer() as frame, frame[_CHUNK.size :] as data:
        while length < num_bytes:
            with data[length:] as rest:
                if not (num_read := read_into(rest)):
                    break
            length += num_read
        with data[:length] as found:
            _CHUNK.pack_into(frame, 0, offset, length, xxh3_64_intdigest(found))
    buffer.truncate(_CHUNK.size + length)
    return buffer.getvalue()  # the buffer itself: it is handed over, since nobody else holds it


def unpack_chunk(frame: bytes) -> tuple[int, memoryview]:
    """`(offset, bytes)`; CorruptError if the frame was cut or a bit flipped."""
    if len(frame) < _CHUNK.size:
        raise CorruptError(f"a chunk frame has {len(frame)} bytes, fewer than its header")
    offset, length, checksum = _CHUNK.unpack_from(frame)
    data = memoryview(frame)[_CHUNK.size :]
    if not length:
        raise CorruptError(f"a chunk at offset {offset} is empty")
    if len(data) != length or length > CHUNK_BYTES * 2:
        raise CorruptError(f"a chunk at offset {offset} says {length} bytes and has {len(data)}")
    if xxh3_64_intdigest(data) != checksum:
        raise CorruptError(f"the chunk at offset {offset} does not match its checksum")
    return offset, data


def pack_data(head: Mapping[str, Any], data: bytes | memoryview) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(text)), text, data))


def unpack_data(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    """`(head, bytes)` of an inline-tensor frame; CorruptError if it cannot be read."""
    if len(frame) < _HEAD.size:
        raise CorruptError("a data frame is shorter than its header")
    (length,) = _HEAD.unpack_from(frame)
    if length > MAX_HEAD_BYTES or _HEAD.size + length > len(frame):
        raise CorruptError(f"a data frame claims a head of {length} bytes")
    try:
        head = json.loads(frame[_HEAD.size : _HEAD.size + length])
    except (ValueError, RecursionError) as error:
        raise CorruptError("the head of a data frame is not JSON") from error
    if not isinstance(head, dict):
        raise CorruptError("the head of a data frame is not an object")
    return head, memoryview(frame)[_HEAD.size + length :]
