"""Handles to flat fp32 vectors as files: what `Params` stands for.

A fragment is a file of little-endian fp32 and nothing else, `FOLDER/NAME.NUMBER.f32`. It is written under another name
and renamed when whole, and never changed afterwards: so a handle that was returned stays true whenever the process
dies. Work goes slice by slice, so a vector costs disk and page cache, not memory. All methods block.

Files that no handle names any more are written over by the next ones. So unless all is synced, nothing in the folder
is believed after the machine was started anew: it is removed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from potluck.storage.files import (
    fsync_folder,
    full_disk_named,
    is_same_boot,
    note_boot,
    remove_files,
    remove_unfinished,
    unfinished_name,
)
from potluck.storage.spares import Spares
from potluck.types.disk import open_over
from potluck.types.errors import CorruptError, PotluckError
from potluck.types.params import Fragment, Layout, Params, type_bytes
from potluck.types.vector import Vector

_suffix = ".f32"
_not_in_names = re.compile(r"[^A-Za-z0-9._-]")
_safe_name = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")

Op = Callable[..., Tensor | Sequence[Tensor]]
"""`op(*slices, layout=, offset=, **scalars)` -> new slices, fp32 [n] like the given ones."""


class ParamStore:
    """Vectors in one folder, cut into fragments of `fragment_numel`, worked on `slice_numel` elements at a time.

    `durable` makes what was written survive a power cut. One process at a time uses a folder.
    """

    def __init__(
        self, root: Path, fragment_numel: int = 1 << 24, *, slice_numel: int = 1 << 18, durable: bool = False
    ) -> None:
        self.root = root
        self.fragment_numel, self.slice_numel, self.durable = fragment_numel, slice_numel, durable
        root.mkdir(parents=True, exist_ok=True)
        remove_unfinished(root)
        if not durable and not is_same_boot(root):
            remove_files(root.glob(f"*{_suffix}"))
        if not durable:
            note_boot(root)
        self.spares = Spares(root)

    # Making

    def create(self, name: str, vector: Vector | Tensor) -> Params:
        """A handle to a vector, fp32 [numel]."""
        given = Vector.of(vector)
        with self.writer(name, given.numel) as writer:
            for start, stop in self._slices(given.numel):
                writer.write(given.read(start, stop))
        return writer.params

    def find(self, name: str, numel: int) -> Params | None:
        """The handle that `create` gave for this name and size, if its files are all here."""
        starts = range(0, numel, self.fragment_numel)
        sizes = (min(self.fragment_numel, numel - start) for start in starts)
        params = Params(tuple(Fragment(f"{name}.{i:04d}", size) for i, size in enumerate(sizes)))
        try:
            self.check(params)
        except CorruptError:
            return None
        return params

    def zeros(self, name: str, numel: int) -> Params:
        """A handle to zeros: files with holes, where the file system has those."""
        with self.writer(name, numel) as writer:
            writer.write_zeros(numel)
        return writer.params

    def writer(self, name: str, numel: int) -> ParamWriter:
        """To make a vector one slice after another: `with store.writer(...) as w: w.write(...)`, then `w.params`."""
        return ParamWriter(self, _not_in_names.sub("_", name)[:120].lstrip(".") or "_", numel)

    def apply(
        self, op: Op, *handles: Params, name: str, layout: Layout, num_outputs: int = 1, **scalars: Any
    ) -> tuple[Params, ...]:
        """Run `op` over the handles, slice by slice, into new handles `NAME-0`, `NAME-1`, ...

        `op` may change the slices it is given and return them: they are copies, whose memory serves the next ones.
        """
        numel = handles[0].numel
        if any(handle.numel != numel for handle in handles):
            raise ValueError(f"{name} is over vectors of {[h.numel for h in handles]} elements; they must be equal")
        with ExitStack() as stack:
            writers = [stack.enter_context(self.writer(f"{name}-{i}", numel)) for i in range(num_outputs)]
            readers = [stack.enter_context(_Reader(self, handle)) for handle in handles]
            memory = [torch.empty(min(self.slice_numel, numel), dtype=torch.float32) for _ in readers]
            for start, stop in self._slices(numel):
                slices = [reader.read(start, stop, out) for reader, out in zip(readers, memory, strict=True)]
                result = op(*slices, layout=layout, offset=start, **scalars)
                outputs = (result,) if isinstance(result, Tensor) else tuple(result)
                _check_outputs(name, outputs, num_outputs, stop - start)
                for writer, output in zip(writers, outputs, strict=True):
                    writer.write(output)
        return tuple(writer.params for writer in writers)

    # Reading

    def read(self, params: Params) -> Tensor:
        """The whole vector, fp32 [numel], in memory of its own. CorruptError if a file is missing or cut short."""
        return self.read_slice(params, 0, params.numel)

    def read_slice(self, params: Params, start: int, stop: int) -> Tensor:
        with _Reader(self, params) as reader:
            return reader.read(start, stop)

    @contextmanager
    def reading(self, params: Params) -> Iterator[Callable[[int, int], Tensor]]:
        """`read(start, stop)` while the block lasts; what it returns is overwritten by the next call."""
        memory: list[Tensor] = [torch.empty(0)]
        with _Reader(self, params) as reader:

            def read(start: int, stop: int) -> Tensor:
                if len(memory[0]) < stop - start:
                    memory[0] = torch.empty(stop - start, dtype=torch.float32)
                return reader.read(start, stop, memory[0])

            yield read

    def slices(self, params: Params) -> Iterator[Tensor]:
        """The vector in pieces of at most `slice_numel` elements, in order."""
        with _Reader(self, params) as reader:
            for start, stop in self._slices(params.numel):
                yield reader.read(start, stop)

    def norm(self, params: Params) -> float:
        """The L2 norm of the whole vector, summed in fp64."""
        total = 0.0
        for part in self.slices(params):
            total += float(np.square(part.numpy(), dtype=np.float64).sum())
        return math.sqrt(total)

    def check(self, params: Params) -> None:
        """CorruptError if a file of the handle is missing or has another size."""
        for fragment in params.fragments:
            self._checked(fragment)

    # Removing

    def remove_except(self, handles: Iterable[Params]) -> int:
        """Remove every file that none of `handles` names; bytes freed."""
        keep = {f.name + _suffix for handle in handles for f in handle.fragments}
        return self.spares.retire(path for path in list(self.root.glob(f"*{_suffix}")) if path.name not in keep)

    def path(self, fragment: Fragment) -> Path:
        if not _safe_name.fullmatch(fragment.name):
            raise CorruptError(f"{fragment.name[:100]!r} is not the name of a parameter file in {self.root}")
        return self.root / (fragment.name + _suffix)

    def _checked(self, fragment: Fragment) -> Path:
        path = self.path(fragment)
        size, need = path.stat().st_size if path.is_file() else -1, fragment.numel * type_bytes
        if size < 0:
            raise CorruptError(f"the parameter file {path} is missing")
        if size != need:
            raise CorruptError(f"the parameter file {path} has {size} bytes and should have {need}")
        return path

    def _slices(self, numel: int) -> Iterator[tuple[int, int]]:
        for start in range(0, numel, self.slice_numel):
            yield start, min(start + self.slice_numel, numel)


class ParamWriter:
    """A vector in the making. After the `with` block `params` is its handle; an exception leaves nothing behind."""

    def __init__(self, store: ParamStore, name: str, numel: int) -> None:
        self._store, self._name, self._numel = store, name, numel
        self._written = 0
        self._file: BinaryIO | None = None
        self._whole: list[tuple[Path, Path]] = []  # unfinished name, final name
        self._fragments: list[Fragment] = []
        self._params: Params | None = None

    @property
    def params(self) -> Params:
        assert self._params is not None, "the handle exists after the `with` block"
        return self._params

    def write(self, values: Tensor) -> None:
        """The next elements, fp32 [n]."""
        flat = values.detach().to("cpu", torch.float32).contiguous().reshape(-1).numpy()
        self._advance(len(flat), lambda file, low, high: file.write(flat[low:high].data))

    def write_zeros(self, numel: int) -> None:
        def skip(file: BinaryIO, low: int, high: int) -> None:
            file.truncate()  # what a spare file held
            file.truncate(file.seek((high - low) * type_bytes, 1))

        self._advance(numel, skip)

    def __enter__(self) -> ParamWriter:
        return self

    def __exit__(self, type: type[BaseException] | None, *_: object) -> None:
        if type is None:
            self._finish()
        else:
            self._drop()

    def _advance(self, numel: int, put: Callable[[BinaryIO, int, int], object]) -> None:
        if self._written + numel > self._numel:
            raise ValueError(f"{self._name} gets {self._written + numel} elements and has {self._numel}")
        done = 0
        with full_disk_named(self._store.root, self._numel * type_bytes):
            while done < numel:
                if self._file is None:
                    self._file = self._open()
                room = self._fragments[-1].numel - (self._written - self._fragment_start)
                part = min(room, numel - done)
                put(self._file, done, done + part)
                self._written += part
                done += part
                if part == room:
                    self._close()

    @property
    def _fragment_start(self) -> int:
        return sum(f.numel for f in self._fragments[:-1])

    def _open(self) -> BinaryIO:
        numel = min(self._store.fragment_numel, self._numel - self._written)
        fragment = Fragment(f"{self._name}.{len(self._fragments):04d}", numel)
        path = self._store.path(fragment)
        self._fragments.append(fragment)
        scratch = unfinished_name(path)
        self._whole.append((scratch, path))
        self._store.spares.take(scratch, numel * type_bytes)
        return open_over(scratch)

    def _close(self) -> None:
        if self._file is not None:
            self._file.truncate()
            self._file.flush()
            if self._store.durable:
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        if self._written != self._numel:
            self._drop()
            raise ValueError(f"{self._name} got {self._written} elements and has {self._numel}")
        for scratch, path in self._whole:
            scratch.replace(path)
        if self._store.durable:
            fsync_folder(self._store.root)
        self._params = Params(tuple(self._fragments))

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        remove_files(scratch for scratch, _ in self._whole)


class _Reader:
    """Reads slices of a vector, keeping the fragment it last read from open."""

    def __init__(self, store: ParamStore, params: Params) -> None:
        self._places: list[tuple[int, Path, int]] = []  # start, file, elements
        start = 0
        for fragment in params.fragments:
            self._places.append((start, store._checked(fragment), fragment.numel))  # pyright: ignore[reportPrivateUsage]
            start += fragment.numel
        self._file: BufferedReader | None = None
        self._path: Path | None = None

    def read(self, start: int, stop: int, memory: Tensor | None = None) -> Tensor:
        """Elements in the first part of `memory`, or in memory of their own."""
        values = torch.empty(stop - start, dtype=torch.float32) if memory is None else memory[: stop - start]
        out = values.numpy()
        for first, path, numel in self._places:
            low, high = max(start, first), min(stop, first + numel)
            if low < high:
                self._fill(out[low - start : high - start], path, low - first)
        return values

    def _fill(self, out: npt.NDArray[np.float32], path: Path, offset: int) -> None:
        if self._file is None or self._path != path:
            self.close()
            self._file, self._path = path.open("rb"), path
        self._file.seek(offset * type_bytes)
        if self._file.readinto(out.data) != out.nbytes:
            raise CorruptError(f"the parameter file {path} became shorter while it was read")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_outputs(name: str, outputs: Sequence[Tensor], num_outputs: int, numel: int) -> None:
    """The operation may be a user's own, so its mistakes are told as such."""
    shapes = [list(output.shape) for output in outputs]
    if shapes != [[numel]] * num_outputs:
        raise PotluckError(
            f"the operation of {name} returned tensors of shapes {shapes} for slices of {numel} elements; "
            f"it must return {num_outputs} of shape {[numel]}"
        )
