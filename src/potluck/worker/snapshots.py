"""Snapshots of the task under way: a worker that is killed goes on from the last one, not from the round's beginning.

    RUN/snapshot-NUMBER    parameters and inner optimizer after k steps of one task, and what those steps returned

One is due once so much time has passed since the last one that it costs `max_share` of it, or when the run's
`snapshot_every_steps` says so. How a task goes on from it: worker/resumable.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.codecs.bundle import Bundle, write_tensors
from potluck.protocol import pb
from potluck.storage.digest import Hasher, digest_bytes
from potluck.storage.files import unfinished_name
from potluck.storage.spares import Spares
from potluck.strategies.replica import Step
from potluck.types.errors import CorruptError

max_share = 0.02
"""Of a task's time, for snapshots that no setting asks for."""
least_interval_s = 5.0
"""Between them: less work than that is not worth a write to the disk."""
_name = "snapshot"
room_factor = 2
"""So many times a snapshot's bytes must be free before it is written: the task's result needs room too."""


@dataclass(frozen=True)
class TakenStep:
    """A step that a task asked for, and what it was told."""

    progress: float
    step: Step


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A task after `steps`. `scalars` are those of the replica's local state."""

    task: str  # what it is of: `task_name`
    steps: tuple[TakenStep, ...]
    num_batches: int  # read by these steps
    seconds: float  # worked on them
    scalars: dict[str, Any]


def task_name(lease: pb.Lease) -> str:
    """A digest of all that a task starts from: its lease, the state before it, its inputs and its data."""
    named = pb.Lease()
    named.CopyFrom(lease)
    named.ClearField("deltas")  # only how inputs travel
    named.ClearField("cut_short")  # which may come at any time
    return digest_bytes(named.SerializeToString(deterministic=True))


class SnapshotFile:
    """The one snapshot that a worker has of a run. All methods block.

    A new one is written beside the one before it, over the bytes of an older one: pages that a file has already cost
    far less than new ones.
    """

    def __init__(self, folder: Path, spares: Spares) -> None:
        self._folder, self._spares = folder, spares

    @property
    def paths(self) -> list[Path]:
        """The newest first; the one before it is there for a moment only."""
        return sorted((p for p in self._folder.glob(f"{_name}-*") if not p.suffix), reverse=True)

    def save(self, snapshot: Snapshot, tensors: dict[str, Tensor]) -> None:
        """Whole or not at all, in the place of the one before. ResourceError if the disk has no room for it."""
        facts = {
            "task": snapshot.task,
            "steps": [[s.progress, s.step.loss, s.step.num_tokens] for s in snapshot.steps],
            "num_batches": snapshot.num_batches,
            "seconds": snapshot.seconds,
            "scalars": snapshot.scalars,
        }
        text = json.dumps({**facts, "digest": _digest(facts, tensors)}).encode()
        whole = {"facts": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}
        size = sum(t.nbytes for t in whole.values())
        before = self.paths
        number = int(before[0].name.rpartition("-")[2]) + 1 if before else 0
        path = self._folder / f"{_name}-{number:08d}"
        scratch = unfinished_name(path)
        held = size if self._spares.take(scratch, size) else 0
        try:
            self._spares.require_free(path, room_factor * size - held)
            write_tensors(scratch, whole)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        self._spares.retire(before)

    def num_steps(self, task: str) -> int:
        """How many steps of this task it holds, unchecked; 0 for none."""
        for path in self.paths:
            try:
                with Bundle.open(path) as bundle:
                    snapshot, _ = _read_facts(bundle)
            except (OSError, CorruptError):
                continue
            return len(snapshot.steps) if snapshot.task == task else 0
        return 0

    def load(self, task: str) -> tuple[Snapshot, dict[str, Tensor]] | None:
        """The snapshot of this task, read whole; None if there is none. CorruptError if it is not as it was written."""
        fault: CorruptError | None = None
        for path in self.paths:
            try:
                return _load(path, task)
            except CorruptError as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return None

    def drop(self) -> None:
        self._spares.retire(self.paths)


def _load(path: Path, task: str) -> tuple[Snapshot, dict[str, Tensor]] | None:
    with Bundle.open(path) as bundle:
        snapshot, facts = _read_facts(bundle)
        if snapshot.task != task:
            return None
        tensors = {name: bundle.tensor(name) for name in bundle.entries if name != "facts"}
    if facts.pop("digest", "") != _digest(facts, tensors):
        raise CorruptError(f"the snapshot {path} is not as it was written")
    return snapshot, tensors


def _digest(facts: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Of all that counts: after a power cut a file may have its name and not its content."""
    hasher = Hasher()
    hasher.update(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        hasher.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def _read_facts(bundle: Bundle) -> tuple[Snapshot, dict[str, Any]]:
    try:
        facts: dict[str, Any] = json.loads(bytes(bundle.tensor("facts").numpy()))
        steps = tuple(TakenStep(float(p), Step(float(loss), int(n))) for p, loss, n in facts["steps"])
        return Snapshot(
            task=str(facts["task"]), steps=steps, num_batches=int(facts["num_batches"]),
            seconds=float(facts["seconds"]), scalars=dict(facts["scalars"]),
        ), facts  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"the snapshot cannot be read: {error}") from error


class Pace:
    """When the next snapshot is due, by the seconds since the last one and what that one cost."""

    def __init__(self, now: Callable[[], float], *, every_steps: int = 0) -> None:
        self._now, self._every_steps = now, every_steps
        self._cost_s = 0.0
        self._at, self._num_steps = now(), 0

    def start(self) -> None:
        """A task begins, or goes on from a snapshot."""
        self._at, self._num_steps = self._now(), 0

    def stepped(self) -> bool:
        """A step was taken: whether a snapshot is due now."""
        self._num_steps += 1
        if self._every_steps and self._num_steps >= self._every_steps:
            return True
        return self._now() - self._at >= max(least_interval_s, self._cost_s / max_share)

    def timed(self, save: Callable[[], None]) -> None:
        """Take the snapshot, and learn what it costs."""
        begun = self._now()
        try:
            save()
        finally:
            self._cost_s = self._now() - begun
            self.start()
