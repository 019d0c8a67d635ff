"""The spooled updates of a round, walked slice by slice by a few threads in memory that does not grow with them.

Every thread has a `Reader`: the updates mapped for it alone and one buffer. What `walk` does with a slice depends on
that slice only and results are taken in order, so bits do not depend on threads. Mapped pages are let go after
`max_mapped_bytes`, and the system is told what will be read next, where it can be told.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from potluck.codecs.bundle import Bundle
from potluck.types.params import Layout

T = TypeVar("T")
P = ParamSpec("P")
Values = npt.NDArray[np.float32]

num_threads = 2
"""Sums are bound by memory traffic, which two cores of most machines exhaust."""
sum_numel = 1 << 17
"""Elements of a running sum worked on at once: 512 KiB, which stays in a core's cache while updates stream past."""
rows_bytes = 16 << 20
"""Of a reader's buffer, which rules that need all updates at once divide among them."""
max_rows_numel = 1 << 20
max_mapped_bytes = 32 << 20
"""Pages of updates that a reader maps before it lets all of them go."""
max_open_updates = 64
"""Mapped at once by all readers, each of which holds a file open; more are mapped anew for each slice."""
read_ahead_bytes = 32 << 20


class Spool:
    """Bundle files that each hold the flat vector `name`; update i counts as `scales[i]` times what its file holds.

    Use in a `with` block.
    """

    def __init__(
        self, paths: Sequence[Path], scales: Sequence[float], *, name: str, layout: Layout, num_readers: int = 0
    ) -> None:
        """As many readers as `walk` has threads, unless it is not `walk` that reads."""
        self.paths, self.scales, self.name, self.layout = paths, scales, name, layout
        self._num_readers = num_readers or num_threads
        self._readers: list[Reader] = []

    def __enter__(self) -> Spool:
        """CorruptError if a file is not a bundle."""
        for _ in range(self._num_readers):
            self._readers.append(Reader(self, like=self._readers[0] if self._readers else None))
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close()
        self._readers.clear()  # so that their buffers go now and not with some later collection of cycles

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def reader(self) -> Reader:
        """For whoever reads by themselves, in one thread."""
        return self._readers[0]

    def rows_numel(self, num_rows: int) -> int:
        """Elements of each of that many rows that a reader's buffer holds."""
        return max(1, min(rows_bytes // (4 * num_rows), max_rows_numel))

    def walk(
        self,
        slice_numel: int,
        work: Callable[[Reader, int, int, Values], T],
        done: Callable[[Values, T], object],
        *,
        fills: bool = True,
    ) -> None:
        """For each slice `done(out, work(reader, start, stop, out))`: `work` in any thread, `done` in order.

        `out` is memory for `work` to fill, fp32 [stop - start], or [0] unless it `fills` it.
        """
        numel = self.layout.numel
        starts = range(0, numel, slice_numel)
        ring = deque(np.empty(min(slice_numel, numel) if fills else 0, np.float32) for _ in range(num_threads + 2))
        readers: SimpleQueue[Reader] = SimpleQueue()
        for reader in self._readers:
            readers.put(reader)

        def at_work(start: int, stop: int, out: Values) -> T:
            reader = readers.get()
            try:
                return work(reader, start, stop, out)
            finally:
                readers.put(reader)

        pending: deque[tuple[Values, Future[T]]] = deque()
        ahead = _ReadAhead(self.paths, numel)
        with _threads(len(starts)) as submit:
            for start in starts:
                if len(pending) == len(ring):
                    out, future = pending.popleft()
                    done(out, future.result())
                ahead.reach(start)
                stop = min(start + slice_numel, numel)
                out = ring[0][: stop - start]
                ring.rotate(-1)
                pending.append((out, submit(at_work, start, stop, out)))
            for out, future in pending:
                done(out, future.result())

    def norms(self) -> list[float]:
        """The L2 norm of each update, in one pass. InvalidUpdate if one is not of the layout or not finite."""

        def norm(path: Path, scale: float) -> float:
            with Bundle.open(path) as bundle:
                return bundle.check_flat(self.name, self.layout) * scale

        with _threads(len(self)) as submit:
            return [f.result() for f in [submit(norm, *pair) for pair in zip(self.paths, self.scales, strict=True)]]


class Reader:
    """What one thread works with."""

    def __init__(self, spool: Spool, *, like: Reader | None) -> None:
        self._spool = spool
        self._bundles: list[Bundle] = []
        self._bytes_per_element: list[float] = []
        self._mapped_bytes = 0.0
        self._buffer = np.empty(0, np.float32)
        for number, path in enumerate(spool.paths):
            twin = like._bundles[number] if like else self._bundles[0] if self._bundles else None
            self._bundles.append(Bundle.open(path, like=twin))
            self._bytes_per_element.append(path.stat().st_size / max(spool.layout.numel, 1))

    def add(self, number: int, start: int, into: Values, weight: float) -> None:
        """`into += weight * scale * update[start : start + len(into)]` in fp32."""
        spool, bundle = self._spool, self._bundles[number]
        factor = float(np.float32(weight * spool.scales[number]))
        bundle.accumulate(spool.name, spool.layout, torch.from_numpy(into), start, factor)
        if number >= max_open_updates // num_threads:
            bundle.close()
            return
        self._mapped_bytes += len(into) * self._bytes_per_element[number]
        if self._mapped_bytes > max_mapped_bytes:
            self.close()

    def rows(self, start: int, stop: int, *, num_before: int = 0) -> Values:
        """A slice of all updates, scaled, fp32 [num_before + updates, stop - start]; the first rows are zeros.

        It is this reader's buffer: the next call overwrites it.
        """
        shape = (num_before + len(self._spool), stop - start)
        if not len(self._buffer):
            # Mapped rather than allocated: a heap of each thread would keep what was freed.
            pages = mmap.mmap(-1, max(rows_bytes, 4 * shape[0]), access=mmap.ACCESS_COPY)
            self._buffer = np.frombuffer(pages, np.float32)
        rows = self._buffer[: shape[0] * shape[1]].reshape(shape)
        rows.fill(0)
        for number in range(len(self._spool)):
            self.add(number, start, rows[num_before + number], 1.0)
        return rows

    def close(self) -> None:
        """Let all pages go; what is read again is mapped again."""
        self._mapped_bytes = 0.0
        for bundle in self._bundles:
            bundle.close()


class _ReadAhead:
    """Tells the system which parts of the files are read next, a window before they are."""

    def __init__(self, paths: Sequence[Path], numel: int) -> None:
        self._paths, self._numel = paths, numel
        self._sizes = [path.stat().st_size for path in paths]
        self._window = max(1, numel * read_ahead_bytes // max(sum(self._sizes), 1))
        self._told = 0

    def reach(self, start: int) -> None:
        """Reading is at element `start` of `numel`, and so at about the same part of each file."""
        if sys.platform != "linux":
            return
        while self._told < min(start + self._window, self._numel):
            for path, size in zip(self._paths, self._sizes, strict=True):
                offset, length = (size * n // self._numel for n in (self._told, self._window))
                file = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(file)
            self._told += self._window


class _Inline(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def _threads(num_jobs: int) -> Iterator[Callable[..., Future[Any]]]:
    """A way to submit jobs, whose threads are gone afterwards; without threads where there is but one job."""
    pool = ThreadPoolExecutor(num_threads, "aggregate") if num_jobs > 1 else _Inline()
    try:
        yield pool.submit
    finally:
        pool.shutdown(cancel_futures=True)
