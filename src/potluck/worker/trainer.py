"""A replica and its pinned state: which version is in memory, which must be read, what is written after a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from potluck.protocol import pb
from potluck.types.errors import CorruptError
from potluck.types.params import Layout
from potluck.worker.replica import StepInfo, TorchReplica
from potluck.worker.state import RunFolder


class Source(Protocol):
    """Training data for one task, and the position in the worker's own text where there is one."""

    def __iter__(self) -> Iterator[Tensor]: ...

    @property
    def cursor(self) -> dict[str, Any]:
        """The data position after what was read; {} for data that the coordinator dealt."""
        ...

    def seek(self, cursor: dict[str, Any]) -> None: ...


class Trainer:
    def __init__(self, replica: TorchReplica, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._replica, self._folder, self._note = replica, folder, note
        self._in_memory: str | None = None  # the version the replica's inner state is at; None for unknown
        self._cursor: dict[str, Any] = {}
        self.num_steps = 0  # of the running task
        self.num_batches = 0  # that it has read
        self.tokens_per_s = 0.0
        replica.on_step = self._stepped

    @property
    def layout(self) -> Layout:
        return self._replica.layout

    def _stepped(self, info: StepInfo) -> None:
        self.num_steps += 1
        self.tokens_per_s = info.tokens_per_s

    def cancel(self) -> None:
        """From any thread: the running task ends at its next step."""
        self._replica.cancel()

    def prepare(self, lease: pb.Lease, source: Source, *, pinned: bool) -> TorchReplica:
        """The replica at the state the lease starts from, with its data. In the compute thread."""
        self.num_steps = self.num_batches = 0
        if pinned:
            if self._in_memory != lease.base_version:
                self._restore(lease.base_version)
            source.seek(self._cursor)
            self._in_memory = None  # until the task ends well, what is in memory is neither v nor v+1
        self._replica.feed(self._counted(source))
        return self._replica

    def _counted(self, source: Source) -> Iterator[Tensor]:
        for batch in source:
            self.num_batches += 1
            yield batch

    def _restore(self, version: str) -> None:
        self._replica.reset_local_state()
        self._cursor = {}
        if not version:
            return
        if not self._folder.has_version(version):
            self._note(f"the inner optimizer's state {version} is not on this machine; it starts afresh")
            return
        try:
            tensors, scalars = self._folder.load_version(version)
            self._replica.restore_local_state(tensors, scalars)
        except CorruptError as error:
            self._note(f"{error}; the inner optimizer starts afresh")
            self._replica.reset_local_state()
            return
        self._cursor = scalars.get("cursor", {})

    def keep(self, lease: pb.Lease, source: Source) -> None:
        """Write the state after the task beside the one before it. In the compute thread."""
        if not lease.next_version:
            return
        tensors, scalars = self._replica.local_state()
        self._cursor = source.cursor
        self._folder.save_version(lease.next_version, tensors, {**scalars, "cursor": self._cursor})
        self._in_memory = lease.next_version
