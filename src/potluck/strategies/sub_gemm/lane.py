"""One device during one product: what waits for it, what it has, and when that should be back.

A tile passes three stages on a device, its operands down, its work, its result up, and each stage holds one tile at a
time: so tiles that are in flight together overlap.

    down_i = max(now, down_{i-1}) + d      work_i = max(down_i, work_{i-1}) + c      up_i = max(work_i, up_{i-1}) + u
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.planner.tiles.device import TileDevice
from potluck.strategies.bag import Piece
from potluck.strategies.sub_gemm.assembly import Assembly, Box
from potluck.strategies.sub_gemm.times import Stages
from potluck.types.ids import WorkerId


@dataclass(eq=False, slots=True)
class Tile:
    """A box that is to be computed, whole on one device, or anew in parts on several."""

    box: Box
    into: Assembly
    parent: Tile | None = None
    parts: list[Tile] = field(default_factory=list["Tile"])  # into which it was cut
    is_done: bool = False
    is_for_head: bool = False
    flights: dict[Flight, None] = field(default_factory=dict["Flight", None])
    num_queued: int = 0
    num_issued: int = 0
    num_failures: int = 0
    failed_on: set[Lane] = field(default_factory=set["Lane"])
    reason: str = ""  # of the last failure

    @property
    def is_closed(self) -> bool:
        """Nobody needs it any more: it is there, or what it is a part of is."""
        return self.is_done or (self.parent is not None and self.parent.is_closed)

    @property
    def is_leaf(self) -> bool:
        """A device may be given it."""
        return not (self.parts or self.is_for_head or self.is_closed)

    @property
    def num_places(self) -> int:
        """Queues and devices that have it."""
        return self.num_queued + len(self.flights)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a device's memory that a tile takes: operands, by a name that is theirs alone, and the result."""

    shards: Mapping[str, int]
    result_bytes: int


@dataclass(eq=False, slots=True)
class Flight:
    """One tile on its way to one device and back."""

    tile: Tile
    lane: Lane
    piece: Piece
    need: Need
    stages: Stages
    began_at: float
    ends_at: float  # as predicted
    predicted_s: float  # of its own, without what it waits for the tiles before it
    due_at: float
    is_late: bool = False

    def expected_end(self, now: float) -> float:
        """One that is late is taken to need as long again as it is late."""
        return max(self.ends_at, 2 * now - self.ends_at)


@dataclass(eq=False)
class Lane:
    device: TileDevice
    is_here: bool = True
    is_barred: bool = False  # it lied, or failed time and again: nothing more in this product
    queue: deque[tuple[Tile, Stages]] = field(default_factory=deque[tuple["Tile", Stages]])
    promised: set[str] = field(default_factory=set[str])  # shards of what waits or waited, sent or not
    flying: dict[Flight, None] = field(default_factory=dict[Flight, None])  # in the order they were sent
    bytes_flying: int = 0  # of all of `flying`, operands that they share once
    shards: Counter[str] = field(default_factory=Counter[str])  # of them, how many of `flying` read each
    is_late: bool = False  # and has not been heard of since
    num_late: int = 0
    num_failures: int = 0
    free_at: float = 0.0  # predicted, with all that waits
    replied_at: float = 0.0
    _down_at: float = 0.0
    _work_at: float = 0.0
    _up_at: float = 0.0

    @property
    def id(self) -> WorkerId:
        return self.device.id

    @property
    def is_usable(self) -> bool:
        """New work may go to it."""
        return self.is_here and not self.is_barred and not self.is_late

    @property
    def is_idle(self) -> bool:
        return not self.flying and not self.queue

    def has_room(self, need: Need) -> bool:
        """Within its memory and the number of tiles it may hold; one is always allowed if it fits at all."""
        more = need.result_bytes + sum(n for name, n in need.shards.items() if name not in self.shards)
        return self.bytes_flying + more <= self.device.memory_bytes and (
            not self.flying or len(self.flying) < self.device.num_in_flight
        )

    def lift(self, flight: Flight) -> None:
        self.flying[flight] = None
        fresh = sum(n for name, n in flight.need.shards.items() if name not in self.shards)
        self.shards.update(flight.need.shards.keys())
        self.bytes_flying += flight.need.result_bytes + fresh

    def ground(self, flight: Flight) -> None:
        del self.flying[flight]
        self.shards.subtract(flight.need.shards.keys())
        self.shards = +self.shards
        unshared = sum(n for name, n in flight.need.shards.items() if name not in self.shards)
        self.bytes_flying -= flight.need.result_bytes + unshared

    def end_of(self, tile: Stages, now: float) -> float:
        """When a tile that is put at the end of its queue should be back."""
        return max(self.free_at, now) + self._own_s(tile, is_alone=self.free_at <= now)

    def promise(self, tile: Stages, need: Need, now: float) -> None:
        """It was put at the end of its queue."""
        self.promised.update(need.shards)
        self.free_at = self.end_of(tile, now)

    def give_up(self, tile: Stages) -> None:
        """It was taken from its queue."""
        self.free_at -= self._own_s(tile, is_alone=False)

    def _own_s(self, tile: Stages, *, is_alone: bool) -> float:
        return tile.total_s if is_alone or self.device.num_in_flight == 1 else tile.longest_s

    def send(self, tile: Stages, now: float) -> float:
        """When a tile that is sent now should be back."""
        self._down_at = max(now, self._down_at) + tile.down_s
        self._work_at = max(self._down_at, self._work_at) + tile.work_s
        self._up_at = max(self._work_at, self._up_at) + tile.up_s
        return self._up_at + tile.rtt_s

    def replied(self, flight: Flight, now: float) -> float:
        """A reply came; how long its own part of the wait was. What is behind it moves with it."""
        observed_s = now - max(flight.began_at, self.replied_at)
        self.replied_at = now
        shift = now - flight.ends_at
        self._down_at, self._work_at, self._up_at = self._down_at + shift, self._work_at + shift, self._up_at + shift
        self.free_at = max(now, self.free_at + shift)
        if not self.flying:
            self._down_at = self._work_at = self._up_at = now
        return observed_s
