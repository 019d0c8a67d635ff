"""The post of a running session: results out, inputs in, across the compute thread and the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from potluck.protocol import pb
from potluck.strategies.replica import TaskCancelled
from potluck.types.ids import Digest, LeaseId
from potluck.types.vector import Vector


def lease_id(lease: pb.Lease | pb.TaskResult) -> LeaseId:
    return (lease.round, lease.attempt, lease.key)


def session_of(id: LeaseId) -> LeaseId:
    """The lease that a result belongs to: an emission of a session is named `key@step`."""
    round, attempt, key = id
    return (round, attempt, key.partition("@")[0])


class Post:
    """A `Mailbox` for the task's thread; the event loop puts inputs in and takes emissions out."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._inputs: dict[int, Mapping[str, Any]] = {}
        self._objects: dict[int, tuple[Digest, ...]] = {}  # that inputs are read from, slice by slice
        self._arrived = threading.Condition()
        self._cancelled = False
        self.emissions: dict[int, tuple[Mapping[str, float | int | str], Mapping[str, Vector]]] = {}

    def emit(self, step: int, scalars: Mapping[str, float | int | str], tensors: Mapping[str, Vector | Tensor]) -> None:
        # The session goes on and changes its model before this is sent.
        copies = {name: Vector.of(Vector.of(vector).tensor()) for name, vector in tensors.items()}
        self.emissions[step] = (scalars, copies)
        self._changed()

    def take(self, step: int) -> Mapping[str, Any]:
        with self._arrived:
            while step not in self._inputs:
                if self._cancelled:
                    raise TaskCancelled
                self._arrived.wait()
            self._objects = {s: objects for s, objects in self._objects.items() if s >= step}
            return self._inputs[step]

    def has_input(self, step: int) -> bool:
        return step in self._inputs

    def objects(self) -> list[Digest]:
        """To be kept: those of the input that was taken last, and of all that wait."""
        with self._arrived:
            return [digest for objects in self._objects.values() for digest in objects]

    def put_input(self, step: int, value: Mapping[str, Any], objects: tuple[Digest, ...] = ()) -> None:
        with self._arrived:
            self._inputs[step], self._objects[step] = value, objects
            self._arrived.notify_all()

    def cancel(self) -> None:
        with self._arrived:
            self._cancelled = True
            self._arrived.notify_all()
