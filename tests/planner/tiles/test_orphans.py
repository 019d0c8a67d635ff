"""What lost devices left undone goes to the others, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.bench.worked import published_devices
from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.orphans import replan_orphans
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.verify import boxes_of, memory_fault, tiling_fault

product = Product(m=5120, n=4096, q=20480, kind="weight_gradient", down_bytes=2, up_bytes=2, held_bytes=2)
devices = tuple(replace(device, memory_bytes=64e6) for device in published_devices(64, seed=4))
plan = cheapest(product, devices, options=Options(may_split_inner=False))
split = cheapest(product, devices, options=Options())
whole = (0, product.m, 0, product.q, 0, product.n)


@pytest.mark.parametrize("plan", [plan, split], ids=["plain", "inner split"])
@pytest.mark.parametrize("num_lost", [1, 5, 60])
def test_the_plan_is_whole_again_and_nothing_else_moved(plan: Plan, num_lost: int) -> None:
    lost = {tile.device for tile in plan.tiles[:num_lost]}
    survivors = [device for device in devices if device.id not in lost]
    finished = set(plan.tiles[::3])
    found = replan_orphans(plan, lost, survivors, finished)
    stay = [tile for tile in plan.tiles if tile.device not in lost or tile in finished]
    assert not lost & {tile.device for tile in found}
    assert tiling_fault(boxes_of([*stay, *found]), whole) == ""
    assert 0 < max(tile.finish_s for tile in found) < plan.first_s * (1 if num_lost < 60 else 100)
    again = replace(plan, tiles=found, devices=tuple(survivors))
    assert memory_fault(again, boxes_of(found)) == ""


def test_one_lost_device_is_made_up_for_in_a_fraction_of_the_time() -> None:
    lost = max(plan.loads, key=lambda worker: plan.loads[worker].compute_s)
    found = replan_orphans(plan, {lost}, [device for device in devices if device.id != lost], set())
    assert max(tile.finish_s for tile in found) < 0.35 * plan.first_s
    assert len({tile.device for tile in found}) > 20


def test_who_finished_leaves_nothing_behind() -> None:
    lost = plan.tiles[0].device
    own = {tile for tile in plan.tiles if tile.device == lost}
    assert replan_orphans(plan, {lost}, devices[1:], own) == ()
    assert replan_orphans(plan, set(), devices, set()) == ()


def test_nobody_left_and_nobody_with_the_memory() -> None:
    lost = {plan.tiles[0].device}
    with pytest.raises(ValueError, match="no device; the head must do them"):
        replan_orphans(plan, lost, [], set())
    with pytest.raises(ValueError, match="none of 1 devices has the memory"):
        replan_orphans(plan, lost, [replace(devices[1], memory_bytes=1000.0)], set())


def test_a_newcomer_takes_part() -> None:
    lost = {plan.tiles[0].device}
    (newcomer,) = published_devices(1, seed=9)
    found = replan_orphans(plan, lost, [newcomer], set())
    assert {tile.device for tile in found} == {newcomer.id}
