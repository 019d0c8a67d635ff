"""When plans are made anew: other devices, other speeds, and what planning costs."""

from __future__ import annotations

from dataclasses import replace

import torch

from potluck.planner.tiles.device import Head
from potluck.planner.tiles.product import Options
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.plans import Plans
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, LinkRates


def worker(name: str, up_bytes_per_s: float) -> WorkerInfo:
    link = LinkRates(up_bytes_per_s=up_bytes_per_s, down_bytes_per_s=4e6, rtt_s=0.02)
    return WorkerInfo(id=WorkerId(name), profile=DeviceProfile(device="cpu", link=link))


def test_for_other_speeds_plans_are_made_again_where_that_cost_little() -> None:
    plans = Plans(Options(), wire="fp32", times=TileTimes())
    times = iter([0.0, 1.0, 10.0, 21.0, 22.0, 30.0, 31.0])

    def step(*here: WorkerInfo) -> float:
        plans.begin_step(here, Head(), lambda: next(times))
        return plans.fleet[WorkerId("anna")].up_bytes_per_s

    slow, quick = worker("anna", 1e6), worker("anna", 2e6)
    assert step(slow) == 1e6  # from 0 to 1 s: a second
    assert step(quick) == 1e6  # at 10 s that was more than a twentieth of the time since
    assert step(quick) == 2e6  # at 21 s it was not
    assert step(quick, replace(slow, id=WorkerId("ben"))) == 2e6 and len(plans.fleet) == 2  # another device, at 30 s


def test_who_comes_back_with_less_memory_is_planned_for_anew_at_once() -> None:
    """Else its tiles would be given what it has now less what it was to keep of what it had: nothing."""
    plans = Plans(Options(), wire="fp32", times=TileTimes())
    seconds = iter([0.0, 1.0, 2.0, 3.0, 4.0])

    def with_memory(megabytes: int) -> WorkerInfo:
        known = worker("anna", 1e6)
        return replace(known, profile=replace(known.profile, free_memory_bytes=megabytes * 1_000_000))

    def product() -> Product:
        return Product(Matrix(torch.zeros(64, 64), "a"), Matrix(torch.zeros(64, 64), "w", is_weight=True), "forward")

    def planned_bytes() -> float:
        return plans.fleet[WorkerId("anna")].memory_bytes

    plans.begin_step([with_memory(100)], Head(), lambda: next(seconds))
    assert planned_bytes() == 85e6
    plans.of(product(), [with_memory(95)], Head())
    assert planned_bytes() == 85e6  # what is free differs a little each time
    plans.of(product(), [with_memory(10)], Head())
    assert planned_bytes() == 8.5e6  # in the middle of a step
    plans.begin_step([with_memory(5)], Head(), lambda: next(seconds))
    assert planned_bytes() == 4.25e6  # at 2 s, though making plans took half of the time
