"""One memory for the whole step: what is kept fits beside tiles, and what saves most is kept first."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import TileDevice
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.step import Planned, StepPlan, Use, plan_step
from potluck.planner.tiles.verify import faults, held_bytes, kept_bytes
from potluck.types.ids import WorkerId

wide = Product(m=512, n=1024, q=4096, down_bytes=2, up_bytes=2)
square = Product(m=512, n=1024, q=1024, down_bytes=2, up_bytes=2)
gradient = Product(m=1024, n=512, q=4096, kind="weight_gradient", down_bytes=2, up_bytes=2)
uses = {Use(wide, 8): 6, Use(square, 8): 12, Use(gradient, 8): 6}
options = Options(may_split_inner=False)


def fleet(memory_bytes: float, num: int = 12) -> list[TileDevice]:
    return [
        TileDevice(
            id=WorkerId(f"d{i}"), down_bytes_per_s=1e6 * (1 + i % 3), up_bytes_per_s=1e7, s_per_flop=1e-12,
            memory_bytes=memory_bytes,
        )
        for i in range(num)
    ]  # fmt: skip


def test_with_memory_enough_every_weight_is_kept_and_a_step_is_the_sum_of_its_plans() -> None:
    devices = fleet(math.inf)
    step = plan_step(uses, devices, options=options)
    apart = {use: cheapest(use.product, devices, options=replace(options, num_micro_batches=8)) for use in uses}
    assert {each.use: (each.count, each.plan.method) for each in step.planned} == {
        use: (count, apart[use].method) for use, count in uses.items()
    }
    assert step.kept_share == 1.0
    assert step.seconds == pytest.approx(sum(count * apart[use].step_s for use, count in uses.items()))
    assert step.num_bytes == pytest.approx(step.down_bytes + step.up_bytes)
    assert step.flops == 8 * (6 * wide.flops + 12 * square.flops + 6 * gradient.flops)
    assert sum(step.bindings.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("memory_bytes", [60e6, 30e6, 15e6])
def test_what_is_kept_by_all_products_fits_beside_the_tiles_of_any(memory_bytes: float) -> None:
    devices = fleet(memory_bytes)
    step = plan_step(uses, devices, options=options)
    assert {use: sum(e.count for e in step.planned if e.use == use) for use in uses} == uses
    assert 0 < step.kept_share <= 1.0
    kept = step.kept_bytes()
    alone = sum(each.count * kept_bytes(each.plan) for each in step.planned)
    assert kept == pytest.approx(alone) and (kept <= memory_bytes / 2).all() and kept.max() > memory_bytes / 8
    for each in step.planned:
        assert faults(each.plan) == ""
        boxes = np.array([t[1:7] for t in each.plan.tiles])
        order = np.argsort([t.device for t in each.plan.tiles], kind="stable")
        owners = np.array([int(t.device[1:]) for t in each.plan.tiles])[order]
        held = held_bytes(each.plan, boxes[order], owners, np.full(len(devices), 2))
        assert (held + kept[owners] <= memory_bytes * (1 + 1e-9)).all()
    without = plan_step(uses, devices, options=replace(options, may_keep_weights=False))
    assert step.seconds < without.seconds and without.kept_share == 0.0


def test_less_memory_keeps_less_and_takes_longer() -> None:
    steps = [plan_step(uses, fleet(memory), options=options) for memory in (math.inf, 30e6, 15e6, 6e6)]
    shares = [step.kept_share for step in steps]
    seconds = [step.seconds for step in steps]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.5
    assert seconds == sorted(seconds)


def test_with_little_memory_nothing_is_kept_and_all_of_it_is_for_tiles() -> None:
    devices = fleet(1e6)
    step = plan_step(uses, devices, options=options)
    bare = {
        use: cheapest(use.product, devices, options=replace(options, may_keep_weights=False, num_micro_batches=8))
        for use in uses
    }
    assert step == StepPlan(
        planned=tuple(Planned(use, bare[use], count) for use, count in uses.items()), num_devices=len(devices)
    )
    assert (step.kept_bytes() == 0).all()


def test_a_weight_that_is_used_once_is_not_kept() -> None:
    step = plan_step({Use(wide, 1): 2, Use(gradient, 1): 2}, fleet(math.inf), options=options)
    assert step.kept_share == 0.0 and step.kept_bytes().max() == 0.0


def test_nobody_is_nobody() -> None:
    step = plan_step(uses, [], options=options)
    assert {each.plan.method for each in step.planned} == {"native"} and step.num_devices_used == 0
