"""TensorBundle: the one framing of tensors, at rest and on the wire. The head is described in `codecs.header`.

Two uses. `write_tensors`, `pack_tensors`: tensors of any dtype, kept as they are. `write_flat`: a flat fp32 vector,
one entry `name/tensor` for each tensor of its layout, encoded by a codec and written tensor by tensor. Reading maps the
file into memory and decodes slices in place, so a large bundle costs page cache and a few MB.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potluck.codecs.base import Codec, codec
from potluck.codecs.elementwise import Bytes, Values, slice_numel, spans
from potluck.codecs.header import (
    PREFIX,
    RAW,
    Entry,
    Header,
    header_bytes,
    item_bytes,
    make_header,
    read_header,
)
from potluck.types.disk import full_disk_named
from potluck.types.errors import CorruptError, InvalidUpdate
from potluck.types.params import Layout, TensorSpec

_torch_types: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in item_bytes}
_type_names: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _torch_types.items()}


# Writing


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write tensors as they are; the bytes of the file. TypeError for a dtype that bundles do not carry."""
    header = _raw_header(tensors)
    return _write(path, header, (_raw_bytes(tensor) for tensor in tensors.values()))


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bundle that `write_tensors` writes, as bytes."""
    header = _raw_header(tensors)
    packed = bytearray(header.total_bytes)
    packed[: len(header.data)] = header.data
    for entry, tensor in zip(header.entries, tensors.values(), strict=True):
        offset, size = entry.buffers[0]
        start = len(header.data) + offset
        packed[start : start + size] = _raw_bytes(tensor).data
    return bytes(packed)


def write_flat(path: Path, name: str, vector: Tensor, layout: Layout, codec: Codec) -> int:
    """Write a flat vector, fp32 [layout.numel], on any device; the bytes of the file. InvalidUpdate if not finite."""
    if vector.shape != (layout.numel,):
        raise ValueError(f"{name} has shape {list(vector.shape)} and the layout has {layout.numel} elements")
    return write_flat_slices(path, name, lambda start, stop: vector[start:stop], layout, codec)


def write_flat_slices(path: Path, name: str, read: Callable[[int, int], Tensor], layout: Layout, codec: Codec) -> int:
    """`write_flat` of a vector that is nowhere whole: `read(start, stop)` gives one tensor's elements at a time."""

    def encoded() -> Iterator[npt.NDArray[np.generic]]:
        for tensor in layout:
            values = read(tensor.offset, tensor.stop).detach().to("cpu", torch.float32).contiguous().numpy()
            try:
                yield from codec.encode(values, tensor.shape)
            except InvalidUpdate as error:
                raise InvalidUpdate(f"{name}/{tensor.name} {error}") from error

    return _write(path, _flat_header(name, layout, codec), encoded())


def flat_size(name: str, layout: Layout, codec: Codec) -> int:
    """The bytes that `write_flat` writes: known from the layout alone."""
    return _flat_header(name, layout, codec).total_bytes


def _flat_header(name: str, layout: Layout, codec: Codec) -> Header:
    return make_header((f"{name}/{t.name}", "float32", t.shape, codec.name) for t in layout)


def _raw_header(tensors: Mapping[str, Tensor]) -> Header:
    for name, tensor in tensors.items():
        if tensor.dtype not in _type_names:
            raise TypeError(f"tensor {name} is {tensor.dtype}; bundles carry {', '.join(item_bytes)}")
    return make_header((name, _type_names[t.dtype], tuple(t.shape), RAW) for name, t in tensors.items())


def _raw_bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()


def _write(path: Path, header: Header, buffers: Iterable[npt.NDArray[np.generic]]) -> int:
    """Write the header, then each buffer at its place. What was written of a failed bundle is removed."""
    try:
        with full_disk_named(path, header.total_bytes), path.open("wb") as file:
            file.write(header.data)
            _write_buffers(file, header, buffers)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return header.total_bytes


def _write_buffers(file: BinaryIO, header: Header, buffers: Iterable[npt.NDArray[np.generic]]) -> None:
    stop = 0
    places = (place for entry in header.entries for place in entry.buffers)
    for (offset, size), buffer in zip(places, buffers, strict=True):
        assert buffer.nbytes == size, f"a codec gave {buffer.nbytes} bytes where it said {size}"
        file.write(bytes(offset - stop))
        file.write(buffer.reshape(-1).view(np.uint8).data)
        stop = offset + size


# Reading


def unpack_tensors(data: bytes | bytearray | memoryview) -> dict[str, Tensor]:
    """The tensors of a packed bundle, each with memory of its own. CorruptError on anything else."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    what = "a packed bundle"
    start = header_bytes(bytes(view[: PREFIX.size]), len(view), what)
    header = read_header(bytes(view[:start]), len(view), what)
    found = np.frombuffer(view, np.uint8)
    return {entry.name: _decoded(entry, _buffers_of(entry, found, start)) for entry in header.entries}


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

    def read_all(self) -> dict[str, Tensor]:
        """Every tensor, each with memory of its own; encoded ones as fp32."""
        return {name: _decoded(entry, self._buffers(entry)) for name, entry in self.entries.items()}

    def decode_flat(self, name: str, layout: Layout) -> Tensor:
        """The flat vector `name`, fp32 [layout.numel]. CorruptError if it does not have that layout."""
        self.check_layout(name, layout)
        vector = torch.empty(layout.numel, dtype=torch.float32)
        out: Values = vector.numpy()
        for tensor in layout:
            entry = self.entries[f"{name}/{tensor.name}"]
            _decode(entry, self._buffers(entry), out[tensor.offset : tensor.stop])
        return vector

    def check_flat(self, name: str, layout: Layout) -> float:
        """The L2 norm of the flat vector `name`, summed in fp64. InvalidUpdate if not of this layout or not finite."""
        if problem := self._mismatch(name, layout):
            raise InvalidUpdate(problem)
        scratch = np.empty(slice_numel, np.float32)
        total = 0.0
        for tensor in layout:
            entry = self.entries[f"{name}/{tensor.name}"]
            buffers, decode = self._buffers(entry), _codec_of(entry).decode
            for low, high in spans(entry.numel):
                part = scratch[: high - low]
                decode(buffers, entry.shape, low, part)
                square = float(np.square(part, dtype=np.float64).sum())
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
            first = low - tensor.offset
            for begin, end in spans(high - low):
                part = out[low - start + begin : low - start + end]
                _codec_of(entry).decode(self._buffers(entry), entry.shape, first + begin, part)
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


def _decode(entry: Entry, buffers: list[Bytes], out: Values) -> None:
    """Slice by slice, so that what a codec needs besides stays small and in the cache."""
    decode = _codec_of(entry).decode
    for low, high in spans(len(out)):
        decode(buffers, entry.shape, low, out[low:high])


def _decoded(entry: Entry, buffers: list[Bytes]) -> Tensor:
    if not entry.numel:
        return torch.empty(entry.shape, dtype=_torch_types[entry.dtype])
    if entry.codec == RAW:
        whole = torch.from_numpy(buffers[0].copy())
        return whole.view(_torch_types[entry.dtype]).reshape(entry.shape)
    out = torch.empty(entry.numel, dtype=torch.float32)
    _decode(entry, buffers, out.numpy())
    return out.reshape(entry.shape)
