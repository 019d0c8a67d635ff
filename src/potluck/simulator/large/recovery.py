"""Devices lost in the middle of a step: how long until what they had is there after all.

With tiles, those that they had not brought back are dealt to the survivors as a run deals them (`deal.py`), who are
sent the factors and compute: the whole of a lost device's share, as if it was lost just before its first reply, after
the survivors' own tiles. Which product it hits is weighed by how long each takes; the milliseconds in which tiles are
dealt are not in it (`potluck bench tiles`). In a pipeline, whoever takes the place fetches the stage's weights
and the row repeats its work of the step (`planner/baselines/pipeline.py`). The time to notice is the same in both, and
not counted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from potluck.planner.baselines.pipeline import Pipeline, recovery
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Product as PlannedProduct
from potluck.simulator.large.sub_gemm import Step
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.deal import Candidates, Sizes, cut
from potluck.strategies.sub_gemm.lane import Lane
from potluck.strategies.sub_gemm.pieces import Pieces, Terms
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId

num_draws = 5


@dataclass(frozen=True, kw_only=True)
class RecoveryTimes:
    """Seconds after the loss of `num_lost` devices was noticed: means over `num_draws` draws of which."""

    num_lost: int
    tiles_s: float
    worst_tiles_s: float  # of all products and draws
    reload_s: float | None  # None where there is no pipeline
    replay_s: float | None

    @property
    def pipeline_s(self) -> float | None:
        return None if self.reload_s is None or self.replay_s is None else self.reload_s + self.replay_s

    @property
    def ratio(self) -> float | None:
        """How many times sooner with tiles; None also where nothing was lost that counts."""
        return self.pipeline_s / self.tiles_s if self.pipeline_s and self.tiles_s else None


def recovery_times(
    step: Step, devices: Sequence[TileDevice], head: Head, pipeline: Pipeline | None, *, num_lost: int, seed: int
) -> RecoveryTimes:
    """`pipeline` has the same devices. Its reload goes at the median downlink of the survivors."""
    chance = random.Random(f"{seed}/{num_lost}")
    means: list[float] = []
    worst_s = 0.0
    lives: list[tuple[float, float]] = []
    for _ in range(num_draws):
        lost = {device.id for device in chance.sample(list(devices), num_lost)}
        survivors = [device for device in devices if device.id not in lost]
        total = weight = 0.0
        for each in step.plan.planned:
            seconds = orphans_s(each.plan, lost, survivors, head)
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
        reload_s=statistics.fmean(life[0] for life in lives) if lives else None,
        replay_s=statistics.fmean(life[1] for life in lives) if lives else None,
    )


def orphans_s(plan: Plan, lost: Collection[WorkerId], survivors: Sequence[TileDevice], head: Head) -> float:
    """Seconds that survivors take for all tiles of the lost, factors sent anew."""
    dealt = deal_again(plan, lost, survivors)
    size = plan.product.down_bytes
    sent = sum(sum(box.shape) * box.depth * size for _, box in dealt)
    return max([sent / head.egress_bytes_per_s, *(lane.free_at for lane, _ in dealt)])


def deal_again(plan: Plan, lost: Collection[WorkerId], survivors: Sequence[TileDevice]) -> list[tuple[Lane, Box]]:
    """The tiles of the lost as `TileBag` deals them to survivors that have nothing else to do: lanes know when they are
    done. RoundFailed where nobody has the memory.
    """
    product = plan.product
    sizes = Sizes(down=product.down_bytes, up=product.up_bytes, held=product.held_bytes)
    pieces = Pieces(_shapes(product), Terms(wire="", sizes=sizes, check=_no_values, received=_no_values), 1.0)
    candidates = Candidates([Lane(device) for device in survivors], sizes, 0.0)
    dealt: list[tuple[Lane, Box]] = []
    for orphan in (Box(*tile[1:7]) for tile in plan.tiles if tile.device in lost):
        shares, _ = candidates.shares(orphan, set())
        parts = (
            [(lane, sizes.fit(part, lane.device.memory_bytes)) for lane, part in cut(orphan, shares)] if shares else []
        )
        if not parts or not all(boxes for _, boxes in parts):
            raise RoundFailed(f"a tile of {orphan.shape[0]} x {orphan.depth} x {orphan.shape[1]} fits no device")
        for lane, boxes in parts:
            for box in boxes:
                own = pieces.stages(lane.device, box, lane.promised.__contains__)
                lane.promise(own, pieces.need(box), 0.0)
                dealt.append((lane, box))
            candidates.placed(lane)
    return dealt


def _no_values(*_: object) -> Any:
    raise AssertionError("nothing is sent, and nothing comes back")


def _shapes(planned: PlannedProduct) -> Product:
    """Without values."""
    a, b = torch.empty(planned.m, planned.n, device="meta"), torch.empty(planned.n, planned.q, device="meta")
    return Product(Matrix(a, "a"), Matrix(b, "b", is_weight=planned.has_weight), planned.kind)
