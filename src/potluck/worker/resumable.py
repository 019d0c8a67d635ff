"""A replica that can go on in the middle of a task.

A running function cannot be written to a disk, but it can be run again. As long as a task has done nothing but load
parameters and take steps, it is run from its top, is told again what its first k steps returned, and at step k the
replica takes the state of the snapshot (worker/snapshots.py): from there on all is as if it had never stopped, bit for
bit. The strategy knows nothing of it. A task that asks for anything else before step k gets that too, since its steps
up to there are then taken after all; and no snapshot is taken of it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from potluck.strategies.replica import Kept, Loss, Mailbox, Step, TaskCancelled
from potluck.types.errors import CorruptError, ResourceError
from potluck.types.params import Layout
from potluck.types.vector import Vector
from potluck.worker.replica import TorchReplica
from potluck.worker.snapshots import Pace, Snapshot, SnapshotFile, TakenStep


class TaskSuspended(TaskCancelled):
    """The task stops between two steps and is to go on later; raised inside it."""


class ResumableReplica:
    """A `Replica` for one pinned task that snapshots are taken of, and that may begin with one.

    It stops at the first snapshot after `stop_after` steps, 0 for never.
    """

    def __init__(
        self,
        replica: TorchReplica,
        *,
        task: str,
        file: SnapshotFile,
        pace: Pace,
        seconds: Callable[[], float],
        batches: Iterator[Tensor],
        num_batches: Callable[[], int],
        note: Callable[[str], None],
        found: tuple[Snapshot, dict[str, Tensor]] | None = None,
        stop_after: int = 0,
    ) -> None:
        """`seconds`: worked on the task since this object began, which reads from `batches`."""
        self._replica, self._task, self._file, self._pace, self._note = replica, task, file, pace, note
        self._seconds, self._batches, self._num_batches, self._found = seconds, batches, num_batches, found
        self._stop_after = stop_after
        self._suspending = threading.Event()
        self._theta: Vector | Tensor | None = None
        self._steps: list[TakenStep] = []
        self._has_no_room = False
        self.is_plain = True  # nothing but one `load` and then steps
        self.seconds_before = found[0].seconds if found else 0.0
        pace.start()

    def suspend(self) -> None:
        """From any thread: the task stops after the step it is at, with a snapshot."""
        self._suspending.set()

    def settle(self) -> None:
        """The task has ended: have the replica in the state it ended with, even if it took fewer steps than before."""
        self._catch_up()

    # What the task calls

    @property
    def layout(self) -> Layout:
        return self._replica.layout

    @property
    def weights(self) -> Tensor:
        return self._otherwise().weights

    def first(self) -> Vector:
        return self._replica.first()

    @property
    def mailbox(self) -> Mailbox:
        return self._otherwise().mailbox

    @property
    def kept(self) -> Kept:
        return self._at_first().kept

    @property
    def is_cut_short(self) -> bool:
        """Not before all that the snapshot holds was told: those steps are done, and their result is at hand."""
        return self._found is None and self._replica.is_cut_short

    @property
    def epsilon(self) -> float | None:
        return self._replica.epsilon

    def load(self, theta: Vector | Tensor) -> None:
        if self._theta is None and self.is_plain:
            self._theta = theta
            if self._found is None:
                self._replica.load(theta)
            else:
                self._replica.begins_from(theta)
            return
        self._otherwise().load(theta)

    def steer(
        self, *, anchor: Vector | None = None, pull: float = 0.0, shift: Vector | None = None,
        pressed: Sequence[tuple[int, int]] = (), press: float = 0.0,
    ) -> None:  # fmt: skip
        self._at_first().steer(anchor=anchor, pull=pull, shift=shift, pressed=pressed, press=press)

    def train_only(self, part: Sequence[int]) -> None:
        self._at_first().train_only(part)

    def use_rank(self, rank: int) -> None:
        self._at_first().use_rank(rank)

    def prefer(self, *, beta: float) -> None:
        self._at_first().prefer(beta=beta)

    def forget_moments(self) -> None:
        self._at_first().forget_moments()

    def train_step(self, *, progress: float) -> Step:
        if self._theta is None or not self.is_plain:  # it goes on from parameters that no snapshot tells of
            return self._otherwise().train_step(progress=progress)
        if self._found is not None:
            again = self._found[0].steps[len(self._steps)]
            if again.progress == progress:
                self._steps.append(again)
                if len(self._steps) == len(self._found[0].steps):
                    self._take_over(*self._found)
                return again.step
            self._catch_up()
        step = self._replica.train_step(progress=progress)
        self._steps.append(TakenStep(progress, step))
        self._after_step()
        return step

    def params(self) -> Vector:
        return self._otherwise().params()

    def batches(self) -> Iterator[Tensor]:
        return self._otherwise().batches()

    def gradient(self, *, num_sequences: int) -> tuple[Tensor, Loss]:
        return self._otherwise().gradient(num_sequences=num_sequences)

    def evaluate(self, tokens: Tensor) -> Loss:
        return self._otherwise().evaluate(tokens)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the device's own replica has."""
        return getattr(self._otherwise(), name)

    # How

    def _at_first(self) -> TorchReplica:
        """For what is done again as it was before the first step; afterwards the task is not told again what it did."""
        return self._replica if not self._steps else self._otherwise()

    def _otherwise(self) -> TorchReplica:
        """The replica as it is now, for what is not among the calls that are told again."""
        self._catch_up()
        if self._suspending.is_set():
            if self.is_plain and self._steps:
                self._save()
            raise TaskSuspended
        self.is_plain = False
        return self._replica

    def _catch_up(self) -> None:
        """Take the steps that were only told so far."""
        if self._found is None:
            return
        self._found, self.seconds_before = None, 0.0
        if self._theta is not None:
            self._replica.load(self._theta)
        for taken in self._steps:
            self._replica.train_step(progress=taken.progress)

    def _take_over(self, snapshot: Snapshot, tensors: dict[str, Tensor]) -> None:
        try:
            self._replica.restore_whole_state(tensors, snapshot.scalars)
        except CorruptError as error:
            self._note(f"{error}; the task starts again")
            self._catch_up()
            return
        self._found = None
        for _ in range(snapshot.num_batches):
            next(self._batches)
        self._pace.start()

    def _after_step(self) -> None:
        is_suspended = self._suspending.is_set()
        is_saved = (self._pace.stepped() or is_suspended) and self._save()
        if is_suspended or (is_saved and self._stop_after and len(self._steps) >= self._stop_after):
            raise TaskSuspended

    def _save(self) -> bool:
        def save() -> None:
            tensors, scalars = self._replica.whole_state()
            snapshot = Snapshot(
                task=self._task, steps=tuple(self._steps), num_batches=self._num_batches(),
                seconds=self.seconds_before + self._seconds(), scalars=scalars,
            )  # fmt: skip
            self._file.save(snapshot, tensors)

        try:
            self._pace.timed(save)
        except (ResourceError, OSError) as error:
            if not self._has_no_room:
                self._note(f"no snapshot of the task was taken: {error}")
            self._has_no_room = True
            return False
        return True
