"""Which named shards each device is believed to hold: what it was sent in this step, the oldest given up first.

Only for predictions. The fleet knows what it has sent, and a device says what it has not any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from potluck.types.ids import WorkerId


class Holdings:
    def __init__(self) -> None:
        self._held: dict[WorkerId, OrderedDict[str, int]] = {}
        self._num_bytes: dict[WorkerId, int] = {}

    def holds(self, worker: WorkerId, name: str) -> bool:
        return name in self._held.get(worker, ())

    def sent(self, worker: WorkerId, shards: Mapping[str, int], memory_bytes: float) -> None:
        """Shards, with their bytes, went to a device that has so much memory for them."""
        held = self._held.setdefault(worker, OrderedDict())
        total = self._num_bytes.get(worker, 0)
        for name, num_bytes in shards.items():
            total += num_bytes - held.pop(name, 0)
            held[name] = num_bytes
        while total > memory_bytes and held:
            total -= held.popitem(last=False)[1]
        self._num_bytes[worker] = total

    def forget(self, worker: WorkerId) -> None:
        """It is gone; when it comes back it has nothing."""
        self._held.pop(worker, None)
        self._num_bytes.pop(worker, None)

    def clear(self) -> None:
        """A new step, in which the same names are other values."""
        self._held.clear()
        self._num_bytes.clear()
