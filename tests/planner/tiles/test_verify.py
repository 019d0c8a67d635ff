"""A tiling that is none is found, whatever is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import TileDevice
from potluck.planner.tiles.plan import Plan, Tile
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.verify import faults, tiling_fault, verify
from potluck.types.ids import WorkerId

whole = (0, 3, 0, 3, 0, 1)


def boxes(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array([row if len(row) == 6 else (*row, 0, 1) for row in rows])


def test_equal_areas_are_no_tiling() -> None:
    # 3 x 3 = 2 x 2 + 2 x 2 + 1 x 1, the fault of a planner that only adds areas up
    assert tiling_fault(boxes((0, 2, 0, 2), (1, 3, 1, 3), (0, 1, 2, 3)), whole) == "its boxes overlap and leave gaps"
    assert tiling_fault(boxes((0, 2, 0, 2), (0, 2, 2, 3), (2, 3, 0, 3)), whole) == ""


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ([(0, 3, 0, 2)], "its boxes cover 6 cells and there are 9"),
        ([(0, 3, 0, 3), (0, 3, 0, 0)], r"box \[0, 3, 0, 0, 0, 1\] is empty"),
        ([(0, 4, 0, 3)], r"a box reaches beyond \[0, 3, 0, 3, 0, 1\]"),
        ([(0, 1, 0, 3), (0, 1, 0, 3), (2, 3, 0, 3)], "its boxes overlap and leave gaps"),
    ],
)
def test_gaps_overlaps_and_what_lies_outside(found: list[tuple[int, ...]], fault: str) -> None:
    import re

    assert re.fullmatch(fault, tiling_fault(boxes(*found), whole))


def test_parts_of_the_inner_dimension_are_tiled_each() -> None:
    space = (0, 2, 0, 2, 0, 4)
    assert tiling_fault(boxes((0, 2, 0, 2, 0, 3), (0, 1, 0, 2, 3, 4), (1, 2, 0, 2, 3, 4)), space) == ""
    assert tiling_fault(boxes((0, 2, 0, 2, 0, 3), (0, 1, 0, 2, 3, 4), (0, 1, 0, 2, 3, 4)), space) != ""
    assert tiling_fault(boxes((0, 2, 0, 2, 0, 2), (0, 2, 0, 2, 1, 3)), space) != ""


def small_plan(memory_bytes: float = 1e6) -> Plan:
    devices = [
        TileDevice(
            id=WorkerId(f"d{i}"), down_bytes_per_s=1e6, up_bytes_per_s=1e6, s_per_flop=1e-9, memory_bytes=memory_bytes
        )
        for i in range(4)
    ]
    return cheapest(
        Product(m=400, n=50, q=300), devices, options=Options(may_split_inner=False, may_keep_weights=False)
    )


def test_a_good_plan_has_no_fault_and_a_spoilt_one_does() -> None:
    plan = small_plan()
    assert faults(plan) == ""
    first = plan.tiles[0]
    for spoilt in (plan.tiles[1:], (*plan.tiles, first), (first._replace(row1=first.row1 - 1), *plan.tiles[1:])):
        assert faults(replace(plan, tiles=spoilt)) != ""
        with pytest.raises(AssertionError, match="is wrong"):
            verify(replace(plan, tiles=spoilt))


def test_more_than_a_device_holds_is_found() -> None:
    plan = small_plan()
    poor = tuple(replace(device, memory_bytes=50_000) for device in plan.devices)
    assert "bytes for" in faults(replace(plan, devices=poor))


def test_memory_counts_what_successive_tiles_share_once() -> None:
    plan = small_plan()
    # Two tiles of 10 rows and 20 and 30 columns, both in flight: 10 x 50 + 50 x (20 + 30) + 10 x (20 + 30) elements.
    tiles = tuple(
        Tile(device=plan.devices[0].id, row0=0, row1=10, col0=col0, col1=col1, k0=0, k1=50, finish_s=0.0)
        for col0, col1 in ((0, 20), (20, 50))
    )

    def fault(memory_bytes: float) -> str:
        from potluck.planner.tiles.verify import boxes_of, memory_fault

        changed = replace(plan, tiles=tiles, devices=(replace(plan.devices[0], memory_bytes=memory_bytes),))
        return memory_fault(changed, boxes_of(tiles))

    assert fault(4 * 3500) == "" and "needs 14000 bytes" in fault(4 * 3500 - 1)
