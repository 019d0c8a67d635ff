"""The memory that an owner gives for pieces: what is in use of it, and shards, which give way to everything else.

Everything is counted before it is made: `take` says whether there is room, and drops as many shards for it as it must,
the one used longest ago first, those that are said to stay after all others. Shards that a piece at work reads are
pinned: their memory would not become free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from torch import Tensor

from potluck.strategies.bag import Operand

Parts = Mapping[str, Tensor]


class Room:
    """May be used by several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.shard_bytes = 0  # of those that are not pinned
        self._passing: OrderedDict[str, Parts] = OrderedDict()
        self._staying: OrderedDict[str, Parts] = OrderedDict()  # `Operand.stays`
        self._pinned: dict[str, Parts] = {}
        self._lock = Lock()

    @property
    def free_bytes(self) -> int:
        """Beside what is taken; shards would give way."""
        return self.limit_bytes - self.taken_bytes

    def take(self, num_bytes: int, *, beside: int = 0) -> bool:
        """Whether they fit, and leave room for what else will be needed; they count from now on if they do."""
        with self._lock:
            if self.taken_bytes + num_bytes + beside > self.limit_bytes:
                return False
            self.taken_bytes += num_bytes
            self._shrink()
            return True

    def give(self, num_bytes: int) -> None:
        with self._lock:
            self.taken_bytes -= num_bytes

    def _shrink(self) -> None:
        while (shards := self._passing or self._staying) and self.shard_bytes + self.taken_bytes > self.limit_bytes:
            self.shard_bytes -= nbytes(shards.popitem(last=False)[1])

    def _shards(self, name: str) -> OrderedDict[str, Parts]:
        """Among which one of that name is."""
        return self._staying if Operand.stays(name) else self._passing

    # Shards

    def pin(self, names: Iterable[str]) -> Mapping[str, Parts]:
        """Those of them that are kept: they count as taken until `unpin`."""
        with self._lock:
            for name in names:
                if (parts := self._shards(name).pop(name, None)) is not None:
                    self._pinned[name] = parts
                    self.shard_bytes -= nbytes(parts)
                    self.taken_bytes += nbytes(parts)
            return dict(self._pinned)

    def unpin(self) -> None:
        """All of them; they are the ones that were used last."""
        with self._lock:
            for name, parts in self._pinned.items():
                self._shards(name)[name] = parts
                self.shard_bytes += nbytes(parts)
                self.taken_bytes -= nbytes(parts)
            self._pinned.clear()
            self._shrink()

    def keep(self, name: str, parts: Parts, copied: Callable[[Parts], Parts]) -> bool:
        """Keep a copy, made once there is room for it, in the place of other shards; whether there is.

        One that does not stay takes the place of none that does.
        """
        num_bytes = nbytes(parts)
        with self._lock:
            firm = self.taken_bytes + (0 if Operand.stays(name) else sum(map(nbytes, self._staying.values())))
            if name in self._pinned or firm + num_bytes > self.limit_bytes:
                return False
            self.shard_bytes += num_bytes - nbytes(self._shards(name).pop(name, {}))
            self._shrink()
        copy = copied(parts)
        with self._lock:
            self._shards(name)[name] = copy
            self._shrink()  # more may have been taken meanwhile
        return True

    def clear(self) -> None:
        """Drop all shards."""
        with self._lock:
            self._passing.clear()
            self._staying.clear()
            self.shard_bytes = 0


def nbytes(parts: Parts) -> int:
    return sum(x.nbytes for x in parts.values())
