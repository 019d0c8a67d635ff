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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
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

num_threads = 2
_num_samples = 64  # places in a vector that a distance is estimated from
"""Work on vectors is bound by memory traffic, which two cores of most machines exhaust."""

Values = npt.NDArray[np.float32]
Fill = Callable[[int, Values], None]
"""`fill(start, out)` makes the elements from `start` on, as many as `out` holds."""
Op = Callable[..., Tensor | Sequence[Tensor]]
"""`op(*slices, layout=, offset=, **scalars)` -> new slices, fp32 [n] like the given ones."""


@dataclass(frozen=True)
class Deferred:
    """A vector that is computed when it is read, or written by `make` if it has to last."""

    reading: Callable[[], AbstractContextManager[Fill]]
    make: Callable[[], Params]


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
        self._deferred: dict[Params, Deferred] = {}

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
        params = self._named(name, numel)
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
        return ParamWriter(self, self._named(_safe(name), numel))

    def apply(
        self, op: Op, *handles: Params, name: str, layout: Layout, num_outputs: int = 1, **scalars: Any
    ) -> tuple[Params, ...]:
        """Run `op` over the handles, slice by slice, into new handles `NAME-0`, `NAME-1`, ...

        `op` may change the slices it is given and return them: they are copies, whose memory serves the next ones. It
        is called in several threads at once, each with slices of its own.
        """
        numel = handles[0].numel
        if any(handle.numel != numel for handle in handles):
            raise ValueError(f"{name} is over vectors of {[h.numel for h in handles]} elements; they must be equal")
        named = [self._named(_safe(f"{name}-{i}"), numel) for i in range(num_outputs)]

        def run(number: int) -> None:
            """One fragment of each output."""
            start = number * self.fragment_numel
            with ExitStack() as stack:
                writers = [stack.enter_context(_FragmentWriter(self, params.fragments[number])) for params in named]
                readers = [stack.enter_context(_Reader(self, handle)) for handle in handles]
                stop = start + named[0].fragments[number].numel
                memory = [torch.empty(min(self.slice_numel, stop - start), dtype=torch.float32) for _ in readers]
                for low, high in self._slices(stop, start):
                    slices = [reader.read(low, high, out) for reader, out in zip(readers, memory, strict=True)]
                    result = op(*slices, layout=layout, offset=low, **scalars)
                    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
                    _check_outputs(name, outputs, num_outputs, high - low)
                    for writer, output in zip(writers, outputs, strict=True):
                        writer.write(_flat(output))

        try:
            _in_threads(run, len(named[0].fragments))
        except BaseException:
            remove_files(self.path(fragment) for params in named for fragment in params.fragments)
            raise
        if self.durable:
            fsync_folder(self.root)
        return tuple(named)

    # Deferring

    def defer(self, name: str, numel: int, deferred: Deferred) -> Params:
        """A handle to a vector that is computed each time it is read, until `settle` or `remove_except`.

        `deferred.make` must write it under the same name.
        """
        params = self._named(_safe(name), numel)
        self._deferred[params] = deferred
        return params

    def settle(self, handles: Iterable[Params]) -> None:
        """Write those of the handles that were deferred."""
        for params in handles:
            if (deferred := self._deferred.pop(params, None)) is not None:
                made = deferred.make()
                assert made == params, f"{made} was made of the deferred {params}"

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

    def distance(self, one: Params, other: Params, *, at_most: int) -> float:
        """The L2 norm of the difference, summed in fp64; of more than `at_most` elements from a part, spread evenly."""
        numel, total, num_read = one.numel, 0.0, 0
        every = max(1, math.ceil(numel / max(at_most, 1)))
        size = min(self.slice_numel, max(1, at_most // _num_samples))
        with self.reading(one) as first, self.reading(other) as second:
            for low in range(0, numel, size * every):
                high = min(low + size, numel)
                difference = first(low, high).sub(second(low, high)).numpy()
                total += float(np.square(difference, dtype=np.float64).sum())
                num_read += high - low
        return math.sqrt(total * numel / max(num_read, 1))

    def check(self, params: Params) -> None:
        """CorruptError if a file of the handle is missing or has another size. One that was deferred is settled."""
        self.settle([params])
        for fragment in params.fragments:
            self._checked(fragment)

    # Removing

    def remove_except(self, handles: Iterable[Params]) -> int:
        """Remove every file that none of `handles` names, and forget what was deferred; bytes freed."""
        handles = list(handles)
        self.settle(handles)
        self._deferred.clear()
        keep = {f.name + _suffix for handle in handles for f in handle.fragments}
        return self.spares.retire(path for path in list(self.root.glob(f"*{_suffix}")) if path.name not in keep)

    def path(self, fragment: Fragment) -> Path:
        if not _safe_name.fullmatch(fragment.name):
            raise CorruptError(f"{fragment.name[:100]!r} is not the name of a parameter file in {self.root}")
        return self.root / (fragment.name + _suffix)

    def _checked(self, fragment: Fragment) -> Path:
        path = self.path(fragment)
        size, need = path.stat().st_size if path.is_file() else -1, fragment.in_file * type_bytes
        if size < 0:
            raise CorruptError(f"the parameter file {path} is missing")
        if size != need:
            raise CorruptError(f"the parameter file {path} has {size} bytes and should have {need}")
        return path

    def _slices(self, stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
        for low in range(start, stop, self.slice_numel):
            yield low, min(low + self.slice_numel, stop)

    def _named(self, name: str, numel: int) -> Params:
        starts = range(0, numel, self.fragment_numel)
        sizes = (min(self.fragment_numel, numel - start) for start in starts)
        return Params(tuple(Fragment(f"{name}.{i:04d}", size) for i, size in enumerate(sizes)))


class ParamWriter:
    """A vector in the making. After the `with` block `params` is its handle; an exception leaves nothing behind."""

    def __init__(self, store: ParamStore, params: Params) -> None:
        self._store, self._params = store, params
        self._name = params.fragments[0].name.rpartition(".")[0] if params.fragments else "a vector"
        self._numel, self._written = params.numel, 0
        self._writers: list[_FragmentWriter] = []
        self._is_whole = False

    @property
    def params(self) -> Params:
        assert self._is_whole, "the handle exists after the `with` block"
        return self._params

    def write(self, values: Tensor) -> None:
        """The next elements, fp32 [n]."""
        flat = _flat(values)
        self._advance(len(flat), lambda writer, low, high: writer.write(flat[low:high]))

    def write_zeros(self, numel: int) -> None:
        self._advance(numel, lambda writer, low, high: writer.write_zeros(high - low))

    def __enter__(self) -> ParamWriter:
        return self

    def __exit__(self, type: type[BaseException] | None, *_: object) -> None:
        if type is not None:
            self._drop()
            return
        if self._written != self._numel:
            self._drop()
            raise ValueError(f"{self._name} got {self._written} elements and has {self._numel}")
        for writer in self._writers:
            writer.finish()
        if self._store.durable:
            fsync_folder(self._store.root)
        self._is_whole = True

    def _advance(self, numel: int, put: Callable[[_FragmentWriter, int, int], object]) -> None:
        if self._written + numel > self._numel:
            raise ValueError(f"{self._name} gets {self._written + numel} elements and has {self._numel}")
        done = 0
        while done < numel:
            if not self._writers or not self._writers[-1].room:
                self._writers.append(_FragmentWriter(self._store, self._params.fragments[len(self._writers)]))
            writer = self._writers[-1]
            part = min(writer.room, numel - done)
            put(writer, done, done + part)
            if not writer.room:
                writer.close()
            self._written += part
            done += part

    def _drop(self) -> None:
        for writer in self._writers:
            writer.drop()


class _FragmentWriter:
    """One file of a vector in the making: under another name until it is whole."""

    def __init__(self, store: ParamStore, fragment: Fragment) -> None:
        self._store, self._path = store, store.path(fragment)
        self._scratch = unfinished_name(self._path)
        self._size = fragment.numel * type_bytes
        if not store.spares.take(self._scratch, self._size):
            store.spares.make_room(self._scratch, self._size)
        self._file: BinaryIO | None = open_over(self._scratch)
        self.room = fragment.numel

    def write(self, values: Values) -> None:
        assert self._file is not None
        with full_disk_named(self._store.root, self._size):
            self._file.write(values.data)
        self.room -= len(values)

    def write_zeros(self, numel: int) -> None:
        assert self._file is not None
        self._file.truncate()  # what a spare file held
        self._file.truncate(self._file.seek(numel * type_bytes, 1))
        self.room -= numel

    def close(self) -> None:
        """All of it was written; `finish` may come later."""
        if self._file is None:
            return
        with full_disk_named(self._store.root, self._size):
            self._file.truncate()
            self._file.flush()
            if self._store.durable:
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def finish(self) -> None:
        self.close()
        self._scratch.replace(self._path)

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        remove_files([self._scratch])

    def __enter__(self) -> _FragmentWriter:
        return self

    def __exit__(self, type: type[BaseException] | None, *_: object) -> None:
        if type is None:
            self.finish()
        else:
            self.drop()


class _Reader:
    """Reads slices of a vector, keeping the fragment it last read from open."""

    def __init__(self, store: ParamStore, params: Params) -> None:
        self._stack = ExitStack()
        deferred = store._deferred.get(params)  # pyright: ignore[reportPrivateUsage]
        self._compute = self._stack.enter_context(deferred.reading()) if deferred else None
        self._places: list[tuple[int, Path, int, int]] = []  # start, file, elements, where they begin in the file
        start = 0
        for fragment in () if deferred else params.fragments:
            path = store._checked(fragment)  # pyright: ignore[reportPrivateUsage]
            self._places.append((start, path, fragment.numel, fragment.start))
            start += fragment.numel
        self._file: BufferedReader | None = None
        self._path: Path | None = None

    def read(self, start: int, stop: int, memory: Tensor | None = None) -> Tensor:
        """Elements in the first part of `memory`, or in memory of their own."""
        values = torch.empty(stop - start, dtype=torch.float32) if memory is None else memory[: stop - start]
        out = values.numpy()
        if self._compute is not None:
            self._compute(start, out)
        for first, path, numel, begins in self._places:
            low, high = max(start, first), min(stop, first + numel)
            if low < high:
                self._fill(out[low - start : high - start], path, begins + low - first)
        return values

    def _fill(self, out: Values, path: Path, offset: int) -> None:
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
        self._stack.close()


def _safe(name: str) -> str:
    return _not_in_names.sub("_", name)[:120].lstrip(".") or "_"


def _flat(values: Tensor) -> Values:
    return values.detach().to("cpu", torch.float32).contiguous().reshape(-1).numpy()


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """`work(0)` to `work(count - 1)`; the first that fails ends all."""
    if count < 2:
        for number in range(count):
            work(number)
        return
    with ThreadPoolExecutor(num_threads, "params") as pool:
        running = [pool.submit(work, number) for number in range(count)]
        try:
            for future in running:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _check_outputs(name: str, outputs: Sequence[Tensor], num_outputs: int, numel: int) -> None:
    """The operation may be a user's own, so its mistakes are told as such."""
    shapes = [list(output.shape) for output in outputs]
    if shapes != [[numel]] * num_outputs:
        raise PotluckError(
            f"the operation of {name} returned tensors of shapes {shapes} for slices of {numel} elements; "
            f"it must return {num_outputs} of shape {[numel]}"
        )
