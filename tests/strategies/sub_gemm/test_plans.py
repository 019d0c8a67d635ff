"""When plans are made anew: other devices, other speeds, and what planning costs."""

from __future__ import annotations

from dataclasses import replace

from potluck.planner.tiles.device import Head
from potluck.planner.tiles.product import Options
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.plans import Plans
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
