"""The head of a TensorBundle: what is in it and where. Read with suspicion, since it comes from the network.

    magic "POTLUCK\\x01" | header length u32 | header (JSON, padded with spaces) | buffers, each 64-byte aligned

The header is `{"tensors": [[name, dtype, shape, codec, [[offset, bytes], ...]], ...]}`, little-endian all over, with
offsets from the end of the header. Buffers follow each other in the order of the header, with zeros between them, and
the last one ends the file: so no two overlap and nothing hides between them. The codec is "raw" for a tensor that is
kept as it is, in its dtype; any other is a name of `codecs.base` and its tensor is fp32. Nothing in the header depends
on values, so the size of a bundle is known before its content; but for codecs with a lossless stage, whose buffers are
at most as large as their shape says.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.codecs.base import codec
from potluck.codecs.elementwise import Shape
from potluck.types.errors import CorruptError, RecipeError

MAGIC = b"POTLUCK\x01"
PREFIX = struct.Struct("<8sI")
ALIGNMENT = 64
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 1 << 16
MAX_BUFFERS = 16
MAX_NAME_LENGTH = 512
MAX_DIMS = 16
MAX_NUMEL = 1 << 48

RAW = "raw"
item_bytes = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4,
}  # fmt: skip
"""The dtypes that bundles carry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bundle. Buffers are `(offset, bytes)`, offsets from the end of the header."""

    name: str
    dtype: str
    shape: Shape
    codec: str
    buffers: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The entries of a bundle, the bytes before its buffers, and how long all of it is."""

    entries: tuple[Entry, ...]
    data: bytes
    total_bytes: int


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def sizes_of(dtype: str, shape: Shape, codec_name: str) -> tuple[int, ...]:
    """Bytes of each buffer of a tensor. RecipeError for an unknown codec."""
    if codec_name == RAW:
        return (math.prod(shape) * item_bytes[dtype],)
    return codec(codec_name).buffer_sizes(shape)


def make_header(
    tensors: Iterable[tuple[str, str, Shape, str]],
    *,
    sizes: Sequence[Sequence[int]] | None = None,
    least_bytes: int = 0,
) -> Header:
    """The header of a bundle of `(name, dtype, shape, codec)`, `least_bytes` long or longer.

    `sizes` are those of each tensor's buffers; without them they are what the codecs say, which is the most.
    """
    entries: list[Entry] = []
    stop = 0
    for number, (name, dtype, shape, codec_name) in enumerate(tensors):
        buffers: list[tuple[int, int]] = []
        for size in sizes_of(dtype, shape, codec_name) if sizes is None else sizes[number]:
            buffers.append((aligned(stop), size))
            stop = aligned(stop) + size
        entries.append(Entry(name, dtype, shape, codec_name, tuple(buffers)))
    rows = [[e.name, e.dtype, e.shape, e.codec, e.buffers] for e in entries]
    text = json.dumps({"tensors": rows}, separators=(",", ":")).encode()
    text = text.ljust(max(aligned(PREFIX.size + len(text)), least_bytes) - PREFIX.size)
    if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise ValueError(
            f"a bundle of {len(entries)} tensors needs a header of {len(text)} bytes; "
            f"{MAX_TENSORS} tensors and {MAX_HEADER_BYTES} bytes are the most"
        )
    data = PREFIX.pack(MAGIC, len(text)) + text
    return Header(tuple(entries), data, len(data) + stop)


def header_bytes(prefix: bytes, total_bytes: int, what: str) -> int:
    """Bytes of magic, length and header together, from the first `PREFIX.size` bytes of a bundle."""
    if len(prefix) < PREFIX.size:
        raise CorruptError(f"{what} has {len(prefix)} bytes and a tensor bundle has at least {PREFIX.size}")
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CorruptError(f"{what} does not start like a tensor bundle of this version")
    if length > MAX_HEADER_BYTES or PREFIX.size + length > total_bytes or (PREFIX.size + length) % ALIGNMENT:
        raise CorruptError(f"{what} claims a header of {length} bytes in {total_bytes}, at most {MAX_HEADER_BYTES}")
    return PREFIX.size + length


def read_header(data: bytes, total_bytes: int, what: str) -> Header:
    """Check and read the `header_bytes` first bytes of a bundle of `total_bytes`. CorruptError."""
    entries: list[Entry] = []
    names: set[str] = set()
    stop = 0
    for row in _rows(data[PREFIX.size :], what):
        entry = _entry(row, what)
        if entry.name in names:
            raise CorruptError(f"{what} holds {entry.name} twice")
        names.add(entry.name)
        for offset, size in entry.buffers:
            if offset != aligned(stop):
                raise CorruptError(f"{what} keeps a buffer of {entry.name} at {offset} where {aligned(stop)} is next")
            stop = offset + size
        entries.append(entry)
    if len(data) + stop != total_bytes:
        raise CorruptError(f"{what} has {total_bytes} bytes and its header describes {len(data) + stop}")
    return Header(tuple(entries), data, total_bytes)


def _rows(text: bytes, what: str) -> Sequence[Any]:
    """The rows of the header. The counts bound what parsing it can cost."""
    if text.count(b"[") > MAX_TENSORS * 5 or text.count(b"{") > MAX_TENSORS:
        raise CorruptError(f"{what} has a header of more than {MAX_TENSORS} tensors")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} has a header that is not JSON") from error
    match value:
        case {"tensors": list(rows)} if len(value) == 1 and len(rows) <= MAX_TENSORS:
            return rows
        case _:
            raise CorruptError(f"{what} has a header that is not a list of at most {MAX_TENSORS} tensors")


def _entry(row: Any, what: str) -> Entry:
    match row:
        case [str(name), str(dtype), list(shape), str(codec_name), list(buffers)] if 0 < len(name) <= MAX_NAME_LENGTH:
            pass
        case _:
            raise CorruptError(f"{what} has a tensor without name, dtype, shape, codec and buffers")
    if not name.isprintable():
        raise CorruptError(f"{what} has a tensor whose name cannot be printed")
    if dtype not in item_bytes or (codec_name != RAW and dtype != "float32"):
        raise CorruptError(f"{what} holds {name} as {dtype[:32]!r} and {codec_name[:64]!r}, which are not read")
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n <= MAX_NUMEL for n in shape):
        raise CorruptError(f"{what} holds {name} with a shape of {len(shape)} dimensions that is none")
    if math.prod(max(n, 1) for n in shape) > MAX_NUMEL:
        raise CorruptError(f"{what} holds {name} with the shape {shape} and {MAX_NUMEL} elements are the most")
    try:
        sizes = sizes_of(dtype, tuple(shape), codec_name)
    except RecipeError as error:
        raise CorruptError(f"{what} holds {name} in a codec that is not known here: {error}") from error
    placed: list[tuple[int, int]] = []
    for buffer in buffers[: MAX_BUFFERS + 1]:
        match buffer:
            case [offset, size] if type(offset) is int and type(size) is int:
                placed.append((offset, size))
            case _:
                raise CorruptError(f"{what} has a buffer of {name} without offset and size")
    found = tuple(size for _, size in placed)
    if found != sizes and (codec_name == RAW or codec(codec_name).is_sized or not _are_within(found, sizes)):
        raise CorruptError(f"{what} has buffers of {list(found)} bytes for {name}, which takes {list(sizes)}")
    return Entry(name, dtype, tuple(shape), codec_name, tuple(placed))


def _are_within(found: Sequence[int], most: Sequence[int]) -> bool:
    return len(found) == len(most) and all(0 <= size <= limit for size, limit in zip(found, most, strict=True))
