"""The unfinished tiles of lost devices, dealt to the survivors. Nothing else of the plan moves.

Each orphaned rectangle is cut among survivors of its own: strong ones first, as many as its share of the work and tiles
of a sensible side allow. Speed counts more than the last per cent here, since everybody waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from potluck.planner.tiles.choose import product_plane
from potluck.planner.tiles.device import Ints, Rates, TileDevice, rates_of
from potluck.planner.tiles.plan import Plan, Tile
from potluck.planner.tiles.plane import Demand
from potluck.planner.tiles.pricing import Part, tiles_of
from potluck.planner.tiles.strips import quick_rectangles
from potluck.planner.tiles.verify import tiling_fault
from potluck.types.ids import WorkerId

_most_helpers = 96
"""Survivors that share one orphan."""


def replan_orphans(
    plan: Plan, lost: Collection[WorkerId], survivors: Sequence[TileDevice], finished: Collection[Tile]
) -> tuple[Tile, ...]:
    """Tiles that replace those of the `lost` that are not `finished`, in the order of handing out.

    `finish_s` counts from now on. ValueError where no survivor has the memory for an orphan.
    """
    orphans = _merged([tile for tile in plan.tiles if tile.device in lost and tile not in finished])
    if not orphans:
        return ()
    if not survivors:
        raise ValueError(f"{len(orphans)} tiles of lost devices are left and no device; the head must do them")
    rates = rates_of(survivors, num_tiles=plan.options.num_tiles)
    replaced: list[Tile] = []
    busy_s = np.zeros(len(survivors))
    helpers_of = _helpers(plan, orphans, rates)
    most_served = int(np.bincount(np.concatenate(helpers_of)).max())
    rates = replace(rates, memory=rates.memory / np.minimum(rates.num_in_flight, most_served))
    for orphan, helpers in zip(orphans, helpers_of, strict=True):
        part = _part(plan, orphan, helpers, rates)
        if part is None:
            size = "x".join(str(orphan[i + 1] - orphan[i]) for i in (0, 2, 4))
            raise ValueError(f"a tile of {size} is left and none of {len(survivors)} devices has the memory for it")
        tiles = tiles_of([part], survivors, plan.options.num_tiles)
        places = {survivors[i].id: i for i in helpers}
        moved = [
            tile._replace(
                row0=tile.row0 + orphan[0], row1=tile.row1 + orphan[0],
                col0=tile.col0 + orphan[2], col1=tile.col1 + orphan[2],
                finish_s=tile.finish_s + float(busy_s[places[tile.device]]),
            ) for tile in tiles
        ]  # fmt: skip
        found = tiling_fault(np.array([tile[1:7] for tile in moved]), orphan)
        assert not found, f"the orphan {orphan} was cut wrong: {found}"
        for tile in moved:
            busy_s[places[tile.device]] = max(busy_s[places[tile.device]], tile.finish_s)
        replaced += moved
    return tuple(replaced)


Box = tuple[int, int, int, int, int, int]
"""row0, row1, col0, col1, k0, k1."""


def _merged(tiles: Sequence[Tile]) -> list[Box]:
    """Boxes of the tiles, those of one device as one where they are a whole box together; the largest first."""
    by_device: dict[WorkerId, list[Box]] = {}
    for tile in tiles:
        by_device.setdefault(tile.device, []).append(tile[1:7])
    found: list[Box] = []
    for boxes in by_device.values():
        sides = list(zip(*boxes, strict=True))
        hull = (min(sides[0]), max(sides[1]), min(sides[2]), max(sides[3]), min(sides[4]), max(sides[5]))
        found += [hull] if _volume(hull) == sum(map(_volume, boxes)) else boxes
    return sorted(found, key=lambda box: (-_volume(box), box))


def _volume(box: Box) -> int:
    return (box[1] - box[0]) * (box[3] - box[2]) * (box[5] - box[4])


def _helpers(plan: Plan, orphans: Sequence[Box], rates: Rates) -> list[Ints]:
    """Survivors for each orphan: about as many as its share of the work, strong and weak ones as they come."""
    volumes = np.array([float(_volume(box)) for box in orphans])
    areas = np.array([float((box[1] - box[0]) * (box[3] - box[2])) for box in orphans])
    useful = np.minimum(areas / plan.options.least_side**2, _most_helpers)
    counts = np.maximum(np.minimum(len(rates) * volumes / volumes.sum(), useful), 1.0).astype(np.int64)
    side = np.sqrt(np.array([areas.sum() / counts.sum()]))
    demand = Demand(product_plane(plan.product, inner=orphans[0][5] - orphans[0][4]), rates, serial=1.0)
    order = np.argsort(demand.seconds(side, side), kind="stable")
    turns = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    owners = np.repeat(np.arange(len(orphans)), counts)[np.argsort(turns, kind="stable")]
    devices = order[np.arange(len(owners)) % len(order)]
    return [np.unique(devices[owners == number]) for number in range(len(orphans))]


def _part(plan: Plan, orphan: Box, helpers: Ints, rates: Rates) -> Part | None:
    """The orphan cut among its helpers, its own corner at 0."""
    product = replace(plan.product, m=orphan[1] - orphan[0], q=orphan[3] - orphan[2])
    plane = product_plane(product, inner=orphan[5] - orphan[4])
    serial = 1.0 / plan.options.num_tiles if plan.options.num_tiles else 0.0
    demand = Demand(plane, rates.take(helpers), serial=serial)
    rectangles = quick_rectangles(demand)
    if rectangles is None:
        return None
    return Part(demand=demand, members=helpers, rectangles=rectangles, k0=orphan[4], k1=orphan[5])
