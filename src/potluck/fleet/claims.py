"""What a worker says of its progress in one lease, believed as far as the lease goes.

A lease is given up when nothing moves, so whoever invents movement would hold its round for ever. Steps and bytes count
only where they go up, bytes by a chunk or a fair part of all, and all of them `max_repeats` times at most: a worker
that was started again does once more what it had done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_BYTES
from potluck.storage.objects import ObjectStore
from potluck.types.ids import Digest
from potluck.types.params import Layout

max_repeats = 4
max_turns = 4 * max_repeats
"""From one activity to another."""
most_parts = 64
"""Of the bytes of a lease that has fewer chunks than this: so many parts of them count."""


@dataclass
class Claims:
    """`most_steps` and `most_bytes`: of the whole lease, done once."""

    most_steps: float = math.inf
    most_bytes: float = math.inf
    activity: str = ""
    _mark: int = -1
    _num_turns: int = 0
    _num_steps: int = 0
    _num_bytes: int = 0
    _uncounted_bytes: int = 0

    def is_progress(self, activity: str, mark: int) -> bool:
        """Whether a worker that is at `mark` (a step, or bytes) of an activity now has moved."""
        if activity != self.activity:
            self.activity, self._mark = activity, mark
            self._num_turns += 1
            return self._num_turns <= max_turns
        moved, self._mark = mark - self._mark, mark
        if moved <= 0:
            return False
        if activity == "training":
            self._num_steps += moved
            return self._num_steps <= max_repeats * self.most_steps
        self._num_bytes += moved
        self._uncounted_bytes += moved
        if self._uncounted_bytes < min(CHUNK_BYTES, self.most_bytes / most_parts):
            return False
        self._uncounted_bytes = 0
        return self._num_bytes <= max_repeats * self.most_bytes


def claims_of(lease: pb.Lease, objects: ObjectStore, layout: Layout) -> Claims:
    """As much progress as this lease can have: its sequences, and the bytes of its inputs and its result."""
    num_sequences = lease.num_sequences or sum(span.stop - span.start for span in lease.spans)
    whole = _whole_bytes(layout)
    inputs = (Digest(d) for d in (*lease.objects, *(delta.delta for delta in lease.deltas)))
    num_bytes = sum(objects.size(d) if objects.has(d) else whole for d in inputs)
    return Claims(most_steps=num_sequences or math.inf, most_bytes=num_bytes + whole)


@lru_cache(maxsize=8)
def _whole_bytes(layout: Layout) -> int:
    """The model's, once for all leases."""
    return flat_size("params", layout, codec("fp32"))
