"""The multiplier of a run, with devices that are played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from sub_gemm_played import Played, check_exactly, play, whole_numbers

from potluck.planner.tiles.device import Head
from potluck.strategies.bag import Bag
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.multiply import SpreadConfig, SpreadMultiplier
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId


@dataclass
class PlayedDesk:
    devices: Sequence[Played]
    at: float = 0.0
    bags: list[Bag] = field(default_factory=list[Bag])

    def workers(self) -> Sequence[WorkerInfo]:
        return tuple(d.info for d in self.devices if d.is_here(self.at))

    def now(self) -> float:
        return self.at

    def spread(self, bag: Bag) -> None:
        for d in self.devices:
            d.flying, d.stages = {}, (0.0, 0.0, 0.0)
        self.bags.append(bag)
        self.at += play(bag, self.devices, len(self.bags), begin=self.at)


def fleet(*flops: float, **each: float) -> list[Played]:
    return [Played(WorkerId(f"d{i}"), flops=f, **each) for i, f in enumerate(flops)]  # pyright: ignore[reportArgumentType]


def multiplier(config: SpreadConfig | None = None, head: Head | None = None, exact: bool = True) -> SpreadMultiplier:
    config = config or SpreadConfig(least_side=8)
    return SpreadMultiplier(config, head=head or Head(), secret="s", check=check_exactly if exact else None)


@pytest.mark.parametrize("kind", ["forward", "input_gradient", "weight_gradient", "attention"])
@pytest.mark.parametrize("flops", [(1e7,), (1e7, 3e7, 1e8)])
def test_products_are_those_of_the_plain_matrices(kind: str, flops: tuple[float, ...]) -> None:
    desk, multiply = PlayedDesk(fleet(*flops)), multiplier()
    multiply.begin_step(desk)
    product = whole_numbers(96, 128, 80)
    product = Product(product.a, Matrix(product.b.values, "w", is_weight="gradient" not in kind), kind, "h.0")  # pyright: ignore[reportArgumentType]
    assert torch.equal(multiply(product), product.a.values @ product.b.values)
    assert multiply.log.metrics()["num_products_offloaded"] == 1


def test_predictions_come_to_be_true() -> None:
    devices = fleet(1e7, 3e7, 1e8, 2e7, optimism=4.0)
    desk, multiply = PlayedDesk(devices), multiplier()
    ratios: list[float] = []
    for step in range(6):
        multiply.begin_step(desk)
        for i, shape in enumerate([(256, 64, 192), (64, 256, 192), (192, 256, 64)]):
            product = whole_numbers(*shape, seed=step)
            product = Product(
                Matrix(product.a.values, f"x{i}"), Matrix(product.b.values, f"w{i}", True), "forward", "h"
            )
            multiply(product)
        ratios.append(multiply.log.metrics()["predicted_over_observed"])
    print(ratios)
    assert ratios[0] < 0.6
    assert abs(ratios[-1] - 1) < 0.1


def test_no_device_and_no_head_ends_the_round() -> None:
    multiply = multiplier()
    multiply.begin_step(PlayedDesk([]))
    with pytest.raises(RoundFailed, match="there is no device"):
        multiply(whole_numbers(4, 4, 4))
