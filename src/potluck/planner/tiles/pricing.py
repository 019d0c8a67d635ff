"""What rectangles that were laid out take: of each device, of each tile, and of what all share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from potluck.planner.tiles.bound import SharedTimes, shared_times
from potluck.planner.tiles.device import Floats, Head, Ints, TileDevice
from potluck.planner.tiles.plan import Load, Tile
from potluck.planner.tiles.plane import Demand
from potluck.planner.tiles.successive import successive_tiles
from potluck.types.ids import WorkerId


@dataclass(frozen=True, kw_only=True)
class Part:
    """A plane that is tiled for k0 <= k < k1 by devices of its own.

    `members` are places in the fleet; rectangles (place in `members`, row0, row1, col0, col1), [num, 5].
    """

    demand: Demand
    members: Ints
    rectangles: Ints
    k0: int
    k1: int

    @property
    def rows(self) -> Floats:
        return (self.rectangles[:, 2] - self.rectangles[:, 1]).astype(np.float64)

    @property
    def cols(self) -> Floats:
        return (self.rectangles[:, 4] - self.rectangles[:, 3]).astype(np.float64)

    def later(self) -> Part:
        """The same where devices hold their columns of B already."""
        plane = replace(self.demand.plane, down_col=0.0)
        return replace(self, demand=Demand(plane, self.demand.rates, serial=self.demand.serial))


@dataclass(frozen=True, kw_only=True)
class Price:
    """`seconds` of each rectangle, and of the coordinator's link and the head."""

    seconds: Floats
    shared: SharedTimes

    @property
    def most_s(self) -> float:
        return max(float(self.seconds.max()), self.shared.most_s)

    def __add__(self, other: Price) -> Price:
        """One after the other."""
        return Price(
            seconds=self.seconds + other.seconds,
            shared=SharedTimes(*(np.array(astuple(self.shared)) + np.array(astuple(other.shared))).tolist()),
        )


def price(parts: Sequence[Part], head: Head, num_tiles: int, *, added_elements: float = 0.0) -> Price:
    """`num_tiles` as in `Options`; `added_elements` are results that the head adds to others."""
    times: list[Floats] = []
    totals = np.array([0.0, 0.0, 0.0, 0.0, head.add_s_per_element * added_elements, 0.0])
    for part in parts:
        counts = successive_tiles(part.demand, part.rectangles, num_tiles)[1]
        first_s, most_s = _pipeline(part, counts[counts[:, 0] == 0, 1], num_tiles)
        times.append(first_s + most_s)
        totals += astuple(shared_times(part.demand.plane, head, part.rows, part.cols))
    return Price(seconds=np.concatenate(times), shared=SharedTimes(*totals.tolist()))


def _pipeline(part: Part, counts: Ints, num_tiles: int) -> tuple[Floats, Floats]:
    """Of each rectangle: seconds until its slowest resource is busy all the time, and seconds that this is busy for."""
    own = part.demand.take(part.rectangles[:, 0])
    down_s, compute_s, up_s = own.parts_s(part.rows, part.cols)
    most_s = np.maximum(np.maximum(down_s, compute_s), up_s)
    serial = 1.0 / counts if num_tiles else 0.0
    return own.rates.fixed_s + serial * (down_s + compute_s + up_s - most_s), most_s


def tiles_of(
    parts: Sequence[Part], devices: Sequence[TileDevice], num_tiles: int, num_rounds: int = 1
) -> tuple[Tile, ...]:
    """In the order of handing out: the first tile of each device, then the second of each.

    With rounds the members of the parts are turns of the devices: number r, r + 1, ... of one after the other, each
    priced as if it had its share of the device all the time.
    """
    columns: list[tuple[Ints, Floats]] = []
    for part in parts:
        tiles, places = successive_tiles(part.demand, part.rectangles, num_tiles)
        counts = places[places[:, 0] == 0, 1]
        first_s, most_s = _pipeline(part, counts, num_tiles)
        of = np.repeat(np.arange(len(counts)), counts)
        finish_s = first_s[of] + most_s[of] * (places[:, 0] + 1) / places[:, 1]
        inner = np.broadcast_to(np.array([part.k0, part.k1]), (len(tiles), 2))
        columns.append((np.concatenate((part.members[tiles[:, :1]], tiles[:, 1:], inner), axis=1), finish_s))
    turns = np.concatenate([c[0] for c in columns])
    finish_s = np.concatenate([c[1] for c in columns])
    by_turn = np.argsort(turns[:, 0], kind="stable")
    turns, finish_s = turns[by_turn], finish_s[by_turn]
    owners = turns[:, 0] // num_rounds
    if num_rounds > 1:
        finish_s = _in_turn(turns[:, 0], owners, finish_s) / num_rounds
    place = np.arange(len(owners)) - np.searchsorted(owners, owners)
    order = np.argsort(place, kind="stable")
    ids = [devices[i].id for i in owners[order].tolist()]
    return tuple(map(Tile, ids, *turns[order, 1:7].T.tolist(), finish_s[order].tolist()))


def _in_turn(turns: Ints, owners: Ints, finish_s: Floats) -> Floats:
    """When tiles are back if the turns of a device come one after the other. All sorted by turn."""
    is_last = np.append(turns[1:] != turns[:-1], True)
    lasted_s = np.where(is_last, finish_s, 0.0)
    before_s = np.cumsum(lasted_s) - lasted_s
    return finish_s + before_s - before_s[np.searchsorted(owners, owners)]


def loads_of(
    parts: Sequence[Part], devices: Sequence[TileDevice], seconds: Floats, num_rounds: int = 1
) -> dict[WorkerId, Load]:
    """`seconds` are those of `price`, rounds as in `tiles_of`."""
    found: dict[WorkerId, Load] = {}
    at = 0
    for part in parts:
        own = part.demand.take(part.rectangles[:, 0])
        down_s, compute_s, up_s = own.parts_s(part.rows, part.cols)
        plane = part.demand.plane
        down_bytes, up_bytes = plane.down_bytes(part.rows, part.cols), plane.up_bytes(part.rows, part.cols)
        finish_s = seconds[at : at + len(down_s)]
        at += len(down_s)
        columns = (
            np.stack((down_bytes * num_rounds, up_bytes * num_rounds, down_s, up_s, compute_s, finish_s)) / num_rounds
        )
        owners = part.members[part.rectangles[:, 0]] // num_rounds
        for owner, load in zip(owners.tolist(), map(Load, *columns.tolist()), strict=True):
            worker = devices[owner].id
            earlier = found.get(worker)
            found[worker] = load if earlier is None else Load(*(a + b for a, b in zip(earlier, load, strict=True)))
    return found
