"""TensorBundle: the one framing of tensors, at rest and on the wire. The head is described in `codecs.header`.

Two uses. `write_tensors`, `pack_tensors`: tensors of any dtype, kept as they are. `write_flat`: a flat fp32 vector,
one entry `name/tensor` for each tensor of its layout, encoded by a codec and written tensor by tensor. Reading maps the
file into memory and decodes slices in place, so a large bundle costs page cache and a few MB.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potluck.codecs.base import Codec, codec
from potluck.codecs.elementwise import Bytes, Shape, Values, noise_key
from potluck.codecs.header import (
    PREFIX,
    RAW,
    Entry,
    Header,
    aligned,
    header_bytes,
    item_bytes,
    make_header,
    read_header,
)
from potluck.codecs.lossless import segment_bytes
from potluck.codecs.policy import CodecPolicy
from potluck.types.disk import full_disk_named, open_over
from potluck.types.errors import CorruptError, InvalidUpdate
from potluck.types.params import Layout, TensorSpec, type_bytes

_torch_types: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in item_bytes}
_type_names: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _torch_types.items()}

Chosen = Codec | CodecPolicy
"""One codec for every tensor, or a choice for each."""
Row = tuple[str, str, Shape, str]
"""Name, dtype, shape and codec of a tensor."""

most_unpacked = 256
"""Bytes that one byte of an encoded tensor may become where no layout says how large the tensor is."""


Pieces = Iterable[npt.NDArray[np.generic]]
"""One buffer of a tensor, in pieces that follow each other."""


# Writing


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write tensors as they are; the bytes of the file. TypeError for a dtype that bundles do not carry."""
    return _write(path, _raw_rows(tensors), ([[_raw_bytes(tensor)]] for tensor in tensors.values()), True)


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytearray:
    """The bundle that `write_tensors` writes, in memory: one copy of each tensor, whatever its strides."""
    header = make_header(_raw_rows(tensors))
    packed = bytearray(header.total_bytes)
    packed[: len(header.data)] = header.data
    for entry, tensor in zip(header.entries, tensors.values(), strict=True):
        if entry.numel:
            _view(packed, len(header.data), entry).copy_(tensor.detach())
    return packed


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A tensor that is nowhere whole: `read(i, j)` gives its rows i to j, [j - i, *shape[1:]] of `dtype`."""

    dtype: torch.dtype
    shape: Shape  # one dimension at least
    read: Callable[[int, int], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> Rows:
        whole = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        return Rows(dtype=tensor.dtype, shape=tuple(whole.shape), read=lambda i, j: whole[i:j])


class Packing:
    """The bundle that `pack_tensors` makes, without a copy of the tensors: slices of it are made when asked for."""

    def __init__(self, tensors: Mapping[str, Rows]) -> None:
        """TypeError for a dtype that bundles do not carry."""
        named = [(name, _type_name(name, rows.dtype), rows.shape, RAW) for name, rows in tensors.items()]
        self._header = make_header(named)
        self._rows = list(tensors.values())

    def __len__(self) -> int:
        return self._header.total_bytes

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    def __getitem__(self, part: slice) -> bytearray:
        """The bytes from `start` to `stop`."""
        start, stop, _ = part.indices(len(self))
        made = bytearray(max(stop - start, 0))
        base = len(self._header.data)
        head = self._header.data[start:stop]
        made[: len(head)] = head
        for entry, rows in zip(self._header.entries, self._rows, strict=True):
            (offset, size), num_rows = entry.buffers[0], rows.shape[0]
            low, high = max(start - base - offset, 0), min(stop - base - offset, size)
            if low >= high:
                continue
            row_bytes = size // num_rows
            first = low // row_bytes
            read = _raw_bytes(rows.read(first, -(-high // row_bytes)))
            skip, at = first * row_bytes, base + offset - start
            np.frombuffer(made, np.uint8)[at + low : at + high] = read[low - skip : high - skip]
        return made


def write_flat(
    path: Path, name: str, vector: Tensor, layout: Layout, codec: Chosen, *, seed: int = 0,
    residual: Tensor | None = None,
) -> int:  # fmt: skip
    """Write a flat vector, fp32 [layout.numel], on any device; the bytes of the file. InvalidUpdate if not finite.

    `residual`, fp32 [layout.numel] on the CPU, receives the vector minus what a reader decodes; it may be the vector
    itself. After InvalidUpdate it holds anything.
    """
    if vector.shape != (layout.numel,):
        raise ValueError(f"{name} has shape {list(vector.shape)} and the layout has {layout.numel} elements")
    return write_flat_slices(
        path, name, lambda start, stop: vector[start:stop], layout, codec, seed=seed, residual=residual
    )


def write_flat_slices(
    path: Path, name: str, read: Callable[[int, int], Tensor], layout: Layout, codec: Chosen, *, seed: int = 0,
    residual: Tensor | None = None,
) -> int:  # fmt: skip
    """`write_flat` of a vector that is nowhere whole: `read(start, stop)` gives elements of one tensor."""
    if residual is not None and (residual.shape != (layout.numel,) or residual.dtype != torch.float32):
        raise ValueError(f"the residual of {name} is not fp32 [{layout.numel}]")
    chosen = [(tensor, _codec_for(codec, tensor)) for tensor in layout]
    arena = _Arena(chosen)

    def encoded() -> Iterator[Iterable[Pieces]]:
        for tensor, its in chosen:

            def values(start: int, stop: int, offset: int = tensor.offset) -> Values:
                return read(offset + start, offset + stop).detach().to("cpu", torch.float32).contiguous().numpy()

            rest = None if residual is None else residual[tensor.offset : tensor.stop].numpy()
            key, out = noise_key(seed, tensor.offset), arena.buffers(its, tensor.shape)
            encode = partial(its.encode_from, values, tensor.shape, seed=key, out=out, residual=rest)
            yield _named(f"{name}/{tensor.name}", encode)

    return _write(path, _rows(name, chosen), encoded(), all(its.is_sized for _, its in chosen))


def _named(what: str, encode: Callable[[], Iterator[Pieces]]) -> Iterator[Pieces]:
    """What it encodes; an InvalidUpdate then says of which tensor."""

    def told(pieces: Pieces) -> Pieces:
        try:
            yield from pieces
        except InvalidUpdate as error:
            raise InvalidUpdate(f"{what} {error}") from error

    try:
        for pieces in encode():
            yield told(pieces)
    except InvalidUpdate as error:
        raise InvalidUpdate(f"{what} {error}") from error


def flat_size(name: str, layout: Layout, codec: Chosen) -> int:
    """The bytes that `write_flat` writes, known from the layout alone; the most of them with a lossless stage."""
    return make_header(_rows(name, [(tensor, _codec_for(codec, tensor)) for tensor in layout])).total_bytes


def _codec_for(codec: Chosen, tensor: TensorSpec) -> Codec:
    return codec.choose(tensor.name, tensor.shape) if isinstance(codec, CodecPolicy) else codec


def _rows(name: str, chosen: Sequence[tuple[TensorSpec, Codec]]) -> list[Row]:
    return [(f"{name}/{t.name}", "float32", t.shape, its.name) for t, its in chosen]


class _Arena:
    """Memory for the buffers of one tensor after the other: its pages are fetched once, for the largest."""

    def __init__(self, chosen: Sequence[tuple[TensorSpec, Codec]]) -> None:
        sizes = [
            sum(map(aligned, its.buffer_sizes(t.shape))) for t, its in chosen if its.is_sized and its.name != "fp32"
        ]
        self._memory = np.empty(max(sizes, default=0), np.uint8)

    def buffers(self, codec: Codec, shape: Shape) -> list[npt.NDArray[np.generic]] | None:
        """Uninitialised buffers of the codec's types; None if it makes its own."""
        if not codec.is_sized or codec.name == "fp32":
            return None
        found: list[npt.NDArray[np.generic]] = []
        start = 0
        for (dtype, _), size in zip(codec.buffer_types(shape), codec.buffer_sizes(shape), strict=True):
            found.append(self._memory[start : start + size].view(dtype))
            start += aligned(size)
        return found


def _raw_rows(tensors: Mapping[str, Tensor]) -> list[Row]:
    return [(name, _type_name(name, t.dtype), tuple(t.shape), RAW) for name, t in tensors.items()]


def _type_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _type_names:
        raise TypeError(f"tensor {name} is {dtype}; bundles carry {', '.join(item_bytes)}")
    return _type_names[dtype]


def _raw_bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()


def _write(path: Path, rows: Sequence[Row], buffers: Iterable[Iterable[Pieces]], sized: bool) -> int:
    """Write the header, then each tensor's buffers at their places. What was written of a failed bundle is removed.

    If sizes are known only afterwards, the header is written again over the one that has the largest.
    """
    header = make_header(rows)
    try:
        with full_disk_named(path, header.total_bytes), open_over(path) as file:
            file.write(header.data)
            sizes = _write_buffers(file, buffers)
            if sized:
                assert sizes == [[size for _, size in e.buffers] for e in header.entries], "a codec gave other sizes"
            else:
                header = make_header(rows, sizes=sizes, least_bytes=len(header.data))
                file.seek(0)
                file.write(header.data)
            file.truncate(header.total_bytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return header.total_bytes


def _write_buffers(file: BinaryIO, tensors: Iterable[Iterable[Pieces]]) -> list[list[int]]:
    """The sizes of the buffers written. Each comes in pieces."""
    stop = 0
    sizes: list[list[int]] = []
    for buffers in tensors:
        sizes.append([])
        for pieces in buffers:
            start = aligned(stop)
            file.write(bytes(start - stop))
            stop = start
            for piece in pieces:
                file.write(piece.reshape(-1).view(np.uint8).data)
                stop += piece.nbytes
            sizes[-1].append(stop - start)
    return sizes


# Reading


def unpack_tensors(data: bytes | bytearray | memoryview, most_bytes: int | None = None) -> dict[str, Tensor]:
    """The tensors of a packed bundle, each with memory of its own, at most `most_bytes` in all. CorruptError on
    anything else."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    what = "a packed bundle"
    start = header_bytes(bytes(view[: PREFIX.size]), len(view), what)
    header = read_header(bytes(view[:start]), len(view), what)
    claimed = sum(entry.numel * item_bytes[entry.dtype] for entry in header.entries)
    if most_bytes is not None and claimed > most_bytes:
        raise CorruptError(f"{what} claims {claimed} bytes of tensors and {most_bytes} are allowed")
    found = np.frombuffer(view, np.uint8)
    return {entry.name: _decoded(entry, _buffers_of(entry, found, start)) for entry in header.entries}


def _view(data: bytearray, start: int, entry: Entry) -> Tensor:
    """A raw tensor of a packed bundle whose buffers begin at `start`."""
    dtype = _torch_types[entry.dtype]
    if not entry.numel:
        return torch.empty(entry.shape, dtype=dtype)
    offset, size = entry.buffers[0]
    found = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start + offset)
    return found.view(dtype).reshape(entry.shape)


def tensors_in(data: bytearray) -> dict[str, Tensor]:
    """The tensors of a packed bundle as views on its memory, which no copy is made of. CorruptError as above, and where
    one of them is encoded."""
    what = "a packed bundle"
    start = header_bytes(bytes(data[: PREFIX.size]), len(data), what)
    header = read_header(bytes(data[:start]), len(data), what)
    if encoded := [entry.name for entry in header.entries if entry.codec != RAW]:
        raise CorruptError(f"{what} has encoded tensors: {', '.join(encoded[:3])}")
    return {entry.name: _view(data, start, entry) for entry in header.entries}


class Bundle:
    """A bundle file, open for reading. Use `Bundle.open`; close it, or use it in a `with` block."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._header = header
        self.entries: Mapping[str, Entry] = {entry.name: entry for entry in header.entries}
        self._map: mmap.mmap | None = None

    @staticmethod
    def open(path: Path, *, like: Bundle | None = None) -> Bundle:
        """Read and check the header. CorruptError if it is not a whole bundle.

        `like` is an open bundle that probably has an equal header, which then is not read and kept a second time.
        """
        with path.open("rb") as file:
            total_bytes = file.seek(0, 2)
            file.seek(0)
            start = header_bytes(prefix := file.read(PREFIX.size), total_bytes, path.name)
            data = prefix + file.read(start - PREFIX.size)
        if like is not None and like._header.data == data and like._header.total_bytes == total_bytes:
            twin = Bundle.__new__(Bundle)
            twin.path, twin._header, twin.entries, twin._map = path, like._header, like.entries, None
            return twin
        return Bundle(path, read_header(data, total_bytes, path.name))

    def close(self) -> None:
        """Unmap the file. Reading again maps it again. Idempotent."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # an exception on its way still sees a view; it goes with that
                mapped.close()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, type: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def tensor(self, name: str) -> Tensor:
        """One tensor. A raw one is mapped from the file, copy on write, and outlives the bundle. KeyError."""
        entry = self.entries[name]
        if entry.codec != RAW or not entry.numel:
            return _decoded(entry, self._buffers(entry))
        offset, size = entry.buffers[0]
        start = len(self._header.data) + offset
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), start - first + size, access=mmap.ACCESS_COPY, offset=first)
        found = np.frombuffer(mapped, np.uint8, count=size, offset=start - first)
        return torch.from_numpy(found).view(_torch_types[entry.dtype]).reshape(entry.shape)

    def read_all(self, *, at_most: int | None = None) -> dict[str, Tensor]:
        """Every tensor, each with memory of its own; encoded ones as fp32. CorruptError if they have more elements than
        that.
        """
        numel = sum(entry.numel for entry in self.entries.values())
        if at_most is not None and numel > at_most:
            raise CorruptError(f"{self.path.name} holds {numel:,} values and {at_most:,} are the most; send fewer")
        return {name: _decoded(entry, self._buffers(entry)) for name, entry in self.entries.items()}

    def decode_flat(self, name: str, layout: Layout) -> Tensor:
        """The flat vector `name`, fp32 [layout.numel]. CorruptError if it does not have that layout."""
        self.check_layout(name, layout)
        vector = torch.empty(layout.numel, dtype=torch.float32)
        out: Values = vector.numpy()
        for tensor in layout:
            entry = self.entries[f"{name}/{tensor.name}"]
            _codec_of(entry).decode(self._buffers(entry), entry.shape, 0, out[tensor.offset : tensor.stop])
        return vector

    def check_flat(self, name: str, layout: Layout) -> float:
        """The L2 norm of the flat vector `name`, summed in fp64. InvalidUpdate if not of this layout or not finite."""
        if problem := self._mismatch(name, layout):
            raise InvalidUpdate(problem)
        total = 0.0
        for tensor in layout:
            entry = self.entries[f"{name}/{tensor.name}"]
            try:
                square = _codec_of(entry).sum_squares(self._buffers(entry), entry.shape)
            except CorruptError as error:
                raise InvalidUpdate(f"{entry.name}: {error}") from error
            if not math.isfinite(square):  # fp32 squares fit fp64, so a value was not finite
                raise InvalidUpdate(f"{entry.name} holds NaN or infinity; start again from the last good model")
            total += square
        return math.sqrt(total)

    def flat_slice(self, name: str, layout: Layout, start: int, stop: int) -> Tensor:
        """Elements of the flat vector `name`, fp32 [stop - start]."""
        vector = torch.empty(stop - start, dtype=torch.float32)
        out: Values = vector.numpy()
        for tensor, low, high in layout.overlapping(start, stop):
            entry = self._entry_of(name, tensor)
            part = out[low - start : high - start]
            _codec_of(entry).decode(self._buffers(entry), entry.shape, low - tensor.offset, part)
        return vector

    def accumulate(self, name: str, layout: Layout, into: Tensor, start: int, weight: float) -> None:
        """`into += weight * vector[start : start + len(into)]` in fp32, `into` being contiguous and on the CPU."""
        out: Values = into.numpy()
        for tensor, low, high in layout.overlapping(start, start + len(out)):
            entry = self._entry_of(name, tensor)
            _codec_of(entry).accumulate(
                self._buffers(entry), entry.shape, low - tensor.offset, out[low - start : high - start], weight
            )

    def _entry_of(self, name: str, tensor: TensorSpec) -> Entry:
        entry = self.entries.get(f"{name}/{tensor.name}")
        if entry is None or entry.shape != tensor.shape:
            raise CorruptError(f"{self.path.name} does not hold {name}/{tensor.name} as {list(tensor.shape)}")
        return entry

    def check_layout(self, name: str, layout: Layout) -> None:
        """CorruptError if the flat vector `name` does not have this layout."""
        if problem := self._mismatch(name, layout):
            raise CorruptError(f"{self.path.name}: {problem}")

    def _mismatch(self, name: str, layout: Layout) -> str:
        """How the entries of `name` differ from the layout, "" if they do not."""
        found = [entry for entry in self.entries.values() if entry.name.startswith(f"{name}/")]
        if len(found) != len(layout.tensors):
            return f"{name} has {len(found)} tensors and the model has {len(layout.tensors)}"
        for entry, tensor in zip(found, layout, strict=True):
            if entry.name != f"{name}/{tensor.name}":
                return f"{name} has {entry.name} where the model has {tensor.name}"
            if entry.shape != tensor.shape or entry.dtype != "float32":
                return f"{entry.name} is {entry.dtype} {list(entry.shape)} and the model's is {list(tensor.shape)}"
        return ""

    def _buffers(self, entry: Entry) -> list[Bytes]:
        """Views of the mapped file: they must be gone before `close`."""
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), self._header.total_bytes, access=mmap.ACCESS_READ)
        return _buffers_of(entry, np.frombuffer(self._map, np.uint8), len(self._header.data))


def _codec_of(entry: Entry) -> Codec:
    return codec("fp32" if entry.codec == RAW else entry.codec)


def _buffers_of(entry: Entry, found: Bytes, start: int) -> list[Bytes]:
    return [found[start + offset : start + offset + size] for offset, size in entry.buffers]


def _decoded(entry: Entry, buffers: list[Bytes]) -> Tensor:
    if not entry.numel:
        return torch.empty(entry.shape, dtype=_torch_types[entry.dtype])
    if entry.codec == RAW:
        whole = torch.from_numpy(buffers[0].copy())
        return whole.view(_torch_types[entry.dtype]).reshape(entry.shape)
    its = _codec_of(entry)
    held = sum(len(b) for b in buffers)
    if type_bytes * entry.numel > most_unpacked * held + segment_bytes:
        raise CorruptError(f"{entry.name} has {held} bytes and claims {entry.numel} elements, which is not believed")
    out = torch.empty(entry.numel, dtype=torch.float32)
    its.decode(buffers, entry.shape, 0, out.numpy())
    return out.reshape(entry.shape)
