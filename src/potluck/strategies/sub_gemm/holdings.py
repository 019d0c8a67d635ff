"""Which named shards each device is believed to hold, and how much of its memory is for those that stay.

Shards of weights that a plan keeps stay for the whole step, and a device gives them up last. Others pass: of them it
has what it was sent in this step, the oldest given up first.

Only for predictions. The fleet knows what it has sent, and a device says what it has not any more.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping

from potluck.strategies.bag import Operand
from potluck.types.ids import WorkerId


class Holdings:
    def __init__(self) -> None:
        self._passing: defaultdict[WorkerId, OrderedDict[str, int]] = defaultdict(OrderedDict)
        self._passing_bytes: defaultdict[WorkerId, int] = defaultdict(int)
        self._staying: defaultdict[WorkerId, set[str]] = defaultdict(set)
        self._reserved: dict[WorkerId, float] = {}

    def reserve(self, num_bytes: Mapping[WorkerId, float]) -> None:
        """For shards that stay, from now on."""
        self._reserved = dict(num_bytes)

    def reserved_bytes(self, worker: WorkerId) -> float:
        """Of its memory, which are not for tiles."""
        return self._reserved.get(worker, 0.0)

    def holds(self, worker: WorkerId, name: str) -> bool:
        return name in self._passing.get(worker, ()) or name in self._staying.get(worker, ())

    def sent(self, worker: WorkerId, shards: Mapping[str, int], memory_bytes: float) -> None:
        """Shards, with their bytes, went to a device that has so much memory for those that pass."""
        passing, total = self._passing[worker], self._passing_bytes[worker]
        for name, num_bytes in shards.items():
            if Operand.stays(name):
                self._staying[worker].add(name)
            else:
                total += num_bytes - passing.pop(name, 0)
                passing[name] = num_bytes
        while total > memory_bytes and passing:
            total -= passing.popitem(last=False)[1]
        self._passing_bytes[worker] = total

    def forget(self, worker: WorkerId) -> None:
        """It is gone; when it comes back it has nothing."""
        for each in (self._passing, self._passing_bytes, self._staying):
            each.pop(worker, None)

    def clear(self) -> None:
        """A new step, in which the same names are other values."""
        for each in (self._passing, self._passing_bytes, self._staying):
            each.clear()
