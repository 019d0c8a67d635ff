"""A replica and its pinned state: which version is in memory, which must be read, what is written after a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from potluck.protocol import pb
from potluck.types.errors import CorruptError
from potluck.types.params import Layout
from potluck.worker.canaries import CanaryWatch
from potluck.worker.replica import StepInfo, TorchReplica
from potluck.worker.resumable import ResumableReplica
from potluck.worker.snapshots import Pace, Snapshot, task_name
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
    """`snapshot_every_steps` is the run's setting; `now` is the clock that steps are timed by."""

    def __init__(
        self, replica: TorchReplica, folder: RunFolder, note: Callable[[str], None], *,
        now: Callable[[], float] = time.perf_counter, snapshot_every_steps: int = 0, batch_size: int = 1,
        canaries: CanaryWatch | None = None,
    ) -> None:  # fmt: skip
        self._canaries, self._batch_size = canaries, batch_size
        self._replica, self._folder, self._note, self._now = replica, folder, note, now
        self._pace = Pace(now, every_steps=snapshot_every_steps)
        self._task = ""  # the last pinned one
        self._resumable: ResumableReplica | None = None  # the running task's, where it can be gone on with
        self._in_memory: str | None = None  # the version the replica's inner state is at; None for unknown
        self._cursor: dict[str, Any] = {}
        self.num_steps = 0  # of the running task
        self.num_batches = 0  # that it has read
        self.tokens_per_s = 0.0
        replica.on_step = self._stepped

    @property
    def layout(self) -> Layout:
        return self._replica.layout

    @property
    def adapter_rank(self) -> int:
        return self._replica.adapter_rank

    @property
    def num_unused(self) -> int:
        """Sequences that the running task has read and not used."""
        return self._replica.num_left_over

    def _stepped(self, info: StepInfo) -> None:
        self.num_steps += 1
        self.tokens_per_s = info.tokens_per_s

    def cancel(self) -> None:
        """From any thread: the running task ends at its next step."""
        self._replica.cancel()

    def suspend(self) -> None:
        """From any thread: the running task ends at its next step, with a snapshot if it can be gone on with."""
        resumable = self._resumable
        if resumable is not None and resumable.is_plain:
            resumable.suspend()
        else:
            self._replica.cancel()

    def prepare(
        self, lease: pb.Lease, source: Source, *, pinned: bool, begun_at: float | None = None, stop_after: int = 0,
        is_cut_short: Callable[[], bool] = lambda: False,
    ) -> TorchReplica | ResumableReplica:  # fmt: skip
        """The replica at the state the lease starts from, with its data. In the compute thread.

        A pinned task goes on from its snapshot if there is one, and stops at the first one after `stop_after` steps
        (TaskSuspended). `begun_at` is when work on it began, if not now. `is_cut_short`: as of `TorchReplica.feed`.
        """
        self.num_steps = self.num_batches = 0
        self._resumable = None
        batches = self._counted(source)
        self._replica.feed(batches, is_cut_short)
        self._replica.on_evaluating = self._watching(lease)
        if not pinned:
            return self._replica
        if self._replica.private is not None:
            self._replica.private.require_ledger(lease.base_version)
        is_whole = self._in_memory == lease.base_version or self._restore(lease.base_version)
        source.seek(self._cursor)
        self._in_memory = None  # until the task ends well, what is in memory is neither v nor v+1
        if lease.kind != "pinned":
            return self._replica
        name, begun_at = task_name(lease), self._now() if begun_at is None else begun_at
        found = self._snapshot(name) if is_whole else None
        self._task = name
        self._resumable = ResumableReplica(
            self._replica, task=name, file=self._folder.snapshot, pace=self._pace,
            seconds=lambda: self._now() - begun_at, batches=batches, num_batches=lambda: self.num_batches,
            note=self._note, found=found, stop_after=stop_after,
        )  # fmt: skip
        return self._resumable

    def _watching(self, lease: pb.Lease) -> Callable[[], None]:
        """What is to be done with each model that the task evaluates: where it validates, look for the canaries."""
        if self._canaries is None or not lease.held_out:
            return lambda: None

        def losses(rows: Tensor) -> list[float]:
            self.num_batches += 1  # it is at work
            return self._replica.sequence_losses(rows)

        return self._canaries.watching(lease.round, losses, batch_size=self._batch_size)

    def _snapshot(self, task: str) -> tuple[Snapshot, dict[str, Tensor]] | None:
        try:
            found = self._folder.snapshot.load(task)
        except (CorruptError, OSError) as error:
            self._note(f"{error}; the task starts again")
            return None
        if found is not None:
            self.num_steps = len(found[0].steps)
            if task != self._task:  # another process began it
                self._note(f"going on after step {self.num_steps} of the task that was under way")
        return found

    @property
    def seconds_before(self) -> float:
        """Worked on the running task before it was gone on with."""
        return self._resumable.seconds_before if self._resumable is not None else 0.0

    def _counted(self, source: Source) -> Iterator[Tensor]:
        for batch in source:
            self.num_batches += 1
            yield batch

    def _restore(self, version: str) -> bool:
        """Have that version in memory, or a fresh state; whether it is that version."""
        self._replica.reset_local_state()
        self._cursor = {}
        if not version:
            return True
        if not self._folder.has_version(version):
            self._note(f"the inner optimizer's state {version} is not on this machine; it starts afresh")
            return False
        try:
            tensors, scalars = self._folder.load_version(version)
            self._replica.restore_local_state(tensors, scalars)
        except CorruptError as error:
            self._note(f"{error}; the inner optimizer starts afresh")
            self._replica.reset_local_state()
            return False
        self._cursor = scalars.get("cursor", {})
        return True

    def keep(self, lease: pb.Lease, source: Source) -> None:
        """Write the state after the task beside the one before it. In the compute thread."""
        if self._resumable is not None:
            self._resumable.settle()
        if not lease.next_version:
            return
        if self._replica.private is not None:
            self._replica.private.ledger.add_state(lease.next_version, after=lease.base_version)
        tensors, scalars = self._replica.local_state()
        self._cursor = source.cursor
        self._folder.save_version(lease.next_version, tensors, {**scalars, "cursor": self._cursor})
        self._in_memory = lease.next_version
        if self._replica.private is not None:
            self._note(self._replica.private.sentence())

    def forget(self, version: str) -> None:
        """Nothing goes on from that state any more. In the compute thread."""
        if self._in_memory == version:
            self._in_memory = None
        self._folder.drop_version(version)
