"""Devices lost in the middle of a step: how long until what they had is there after all.

With tiles, those that they had not brought back are dealt to the survivors, who are sent the factors and compute: the
whole of a lost device's share, as if it was lost just before its first reply, after the survivors' own tiles. Which
product it hits is weighed by how long each takes. In a pipeline, whoever takes the place fetches the stage's weights
and the row repeats its work of the step (`planner/baselines/pipeline.py`). The time to notice is the same in both, and
not counted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from potluck.planner.baselines.pipeline import Pipeline, recovery
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.orphans import replan_orphans
from potluck.planner.tiles.plan import Plan
from potluck.simulator.large.sub_gemm import Step
from potluck.types.ids import WorkerId

num_draws = 5


@dataclass(frozen=True, kw_only=True)
class RecoveryTimes:
    """Seconds after the loss of `num_lost` devices was noticed: means over `num_draws` draws of which."""

    num_lost: int
    tiles_s: float
    worst_tiles_s: float  # of all products and draws
    replan_s: float  # real seconds to plan a product's orphans anew on this machine; not in the two above
    reload_s: float | None  # None where there is no pipeline
    replay_s: float | None

    @property
    def pipeline_s(self) -> float | None:
        return None if self.reload_s is None or self.replay_s is None else self.reload_s + self.replay_s

    @property
    def ratio(self) -> float | None:
        """How many times sooner with tiles, the planning counted; None also where nothing was lost that counts."""
        return self.pipeline_s / (self.tiles_s + self.replan_s) if self.pipeline_s else None


def recovery_times(
    step: Step, devices: Sequence[TileDevice], head: Head, pipeline: Pipeline | None, *, num_lost: int, seed: int
) -> RecoveryTimes:
    """`pipeline` has the same devices. Its reload goes at the median downlink of the survivors."""
    chance = random.Random(f"{seed}/{num_lost}")
    means: list[float] = []
    worst_s, spent_s, num_plans = 0.0, 0.0, 0
    lives: list[tuple[float, float]] = []
    for _ in range(num_draws):
        lost = {device.id for device in chance.sample(list(devices), num_lost)}
        survivors = [device for device in devices if device.id not in lost]
        total = weight = 0.0
        for each in step.plan.planned:
            plan = each.plan
            begun = time.perf_counter()
            seconds = orphans_s(plan, lost, survivors, head)
            spent_s, num_plans = spent_s + time.perf_counter() - begun, num_plans + 1
            total, weight = total + each.seconds * seconds, weight + each.seconds
            worst_s = max(worst_s, seconds)
        means.append(total / weight)
        if pipeline is not None:
            rate = statistics.median(device.down_bytes_per_s for device in survivors)
            found = recovery(pipeline, lost, reload_bytes_per_s=rate)
            lives.append((found.reload_s, found.replay_s))
    return RecoveryTimes(
        num_lost=num_lost,
        tiles_s=statistics.fmean(means),
        worst_tiles_s=worst_s,
        replan_s=spent_s / num_plans,
        reload_s=statistics.fmean(life[0] for life in lives) if lives else None,
        replay_s=statistics.fmean(life[1] for life in lives) if lives else None,
    )


def orphans_s(plan: Plan, lost: Collection[WorkerId], survivors: Sequence[TileDevice], head: Head) -> float:
    """Seconds that survivors take for all tiles of the lost, factors sent anew."""
    tiles = replan_orphans(plan, lost, survivors, ())
    if not tiles:
        return 0.0
    size = plan.product.down_bytes
    sent = sum((t.row1 - t.row0 + t.col1 - t.col0) * (t.k1 - t.k0) * size for t in tiles)
    return max(max(t.finish_s for t in tiles), sent / head.egress_bytes_per_s)
