"""Is a plan what it must be: an exact tiling, with every device's tiles in its memory?

Boxes inside [m] x [q] x [n] whose volumes add up to m q n tile it exactly if and only if every corner of a box belongs
to an even number of boxes, the eight corners of the whole apart: the count of boxes over a point is then odd everywhere
inside, so at least 1, and 1 on average. That takes one sort, whatever the shape of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as combinations

import numpy as np

from potluck.planner.tiles.device import Floats, Ints
from potluck.planner.tiles.plan import Plan, Tile


def faults(plan: Plan) -> str:
    """What is wrong with a plan, in a sentence; empty where nothing is."""
    if not plan.tiles:
        return ""
    boxes = boxes_of(plan.tiles)
    whole = (0, plan.product.m, 0, plan.product.q, 0, plan.product.n)
    return tiling_fault(boxes, whole) or memory_fault(plan, boxes)


def verify(plan: Plan) -> None:
    """AssertionError where a plan is not exact or does not fit: the planner's own mistake, never the user's."""
    found = faults(plan)
    assert not found, f"the plan of {plan.product} is wrong: {found}"


def boxes_of(tiles: Sequence[Tile]) -> Ints:
    """[num_tiles, 6]: row0, row1, col0, col1, k0, k1."""
    return np.array([tile[1:7] for tile in tiles], dtype=np.int64).reshape(-1, 6)


def tiling_fault(boxes: Ints, whole: tuple[int, int, int, int, int, int]) -> str:
    """What keeps `boxes` from tiling `whole` exactly."""
    starts, ends = boxes[:, 0::2], boxes[:, 1::2]
    first, last = np.array(whole[0::2]), np.array(whole[1::2])
    if (starts >= ends).any():
        return f"box {boxes[int((starts >= ends).any(axis=1).argmax())].tolist()} is empty"
    if (starts < first).any() or (ends > last).any():
        return f"a box reaches beyond {list(whole)}"
    volume = sum(int(v) for v in (ends - starts).prod(axis=1))
    wanted = int((last - first).prod())
    if volume != wanted:
        return f"its boxes cover {volume} cells and there are {wanted}"
    sides = last - first + 1
    codes = np.concatenate([_codes(np.where(np.array(pick), ends, starts) - first, sides) for pick in _corners])
    values, counts = np.unique(codes, return_counts=True)
    odd = values[counts % 2 == 1]
    outer = [_codes(np.where(np.array(pick), last, first)[np.newaxis] - first, sides)[0] for pick in _corners]
    return "" if np.array_equal(odd, np.sort(np.array(outer))) else "its boxes overlap and leave gaps"


_corners = list(combinations((False, True), repeat=3))


def _codes(points: Ints, sides: Ints) -> Ints:
    """One number for each point. [num_points, 3] -> [num_points]"""
    assert float(sides[0]) * float(sides[1]) * float(sides[2]) < 2**62, "a product of more than 4e18 FLOPs"
    return (points[:, 0] * sides[1] + points[:, 1]) * sides[2] + points[:, 2]


def memory_fault(plan: Plan, boxes: Ints) -> str:
    """Whose memory a plan exceeds. A device holds as many tiles at a time as it says, and what they share once."""
    places = {device.id: i for i, device in enumerate(plan.devices)}
    owners = np.array([places[tile.device] for tile in plan.tiles])
    order = np.argsort(owners, kind="stable")
    boxes, owners = boxes[order], owners[order]
    memory = np.array([device.memory_bytes for device in plan.devices])
    in_flight = np.array([device.num_in_flight for device in plan.devices])
    limits = memory * (1 - plan.options.room_share)
    need = held_bytes(plan, boxes, owners, in_flight)
    over = need > limits[owners] * (1 + 1e-9)
    if over.any():
        worst = int(np.argmax(need / np.maximum(limits[owners], 1.0)))
        device, limit = plan.devices[int(owners[worst])], limits[owners[worst]]
        return f"{device.id} needs {need[worst]:.0f} bytes for {boxes[worst].tolist()} and has {limit:.0f}"
    if not plan.keeps_weights:
        return ""
    kept = kept_bytes(plan)
    over = kept > memory * plan.options.room_share * plan.options.kept_part * (1 + 1e-9)
    if over.any():
        return f"{plan.devices[int(over.argmax())].id} is to keep {kept[over.argmax()]:.0f} bytes of the weight"
    return ""


def kept_bytes(plan: Plan) -> Floats:
    """Of B, as it is sent, that each device keeps. [num_devices]"""
    places = {device.id: i for i, device in enumerate(plan.devices)}
    kept = np.zeros(len(plan.devices))
    if plan.keeps_weights:
        for device, col0, col1, k0, k1 in {(t.device, t.col0, t.col1, t.k0, t.k1) for t in plan.tiles}:
            kept[places[device]] += (col1 - col0) * (k1 - k0) * plan.product.down_bytes
    return kept


def held_bytes(plan: Plan, boxes: Ints, owners: Ints, in_flight: Ints) -> np.ndarray:
    """Bytes that the tiles from each one on take together, as many of its device as are in flight. [num_tiles]

    A tile that shares an operand with the one before holds it once.
    """
    rows, cols, inner = ((boxes[:, i + 1] - boxes[:, i]).astype(np.float64) for i in (0, 2, 4))
    spans = boxes.reshape(-1, 3, 2)
    follows = owners[1:] == owners[:-1]
    same = (spans[1:] == spans[:-1]).all(axis=2) & follows[:, np.newaxis]  # rows, cols, inner
    shares_left, shares_right = same[:, 0] & same[:, 2], same[:, 1] & same[:, 2]
    left, right, result = rows * inner, inner * cols, rows * cols
    fresh = result.copy()  # what a tile adds to those before it
    fresh[1:] += np.where(shares_left, 0.0, left[1:]) + np.where(shares_right, 0.0, right[1:])
    need = left + right + result
    for ahead in range(1, min(int(in_flight.max()), len(boxes))):
        belongs = (owners[ahead:] == owners[:-ahead]) & (in_flight[owners[ahead:]] > ahead)
        need[:-ahead] += np.where(belongs, fresh[ahead:], 0.0)
    return plan.product.held_bytes * need
