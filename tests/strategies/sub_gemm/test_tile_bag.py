"""A bag of tiles against devices that are played."""

from __future__ import annotations

import random

import pytest
import torch
from sub_gemm_played import Played, play, strips, terms, whole_numbers

from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.types.ids import WorkerId


def fleet(*flops: float) -> list[Played]:
    return [Played(WorkerId(f"d{i}"), flops=f) for i, f in enumerate(flops)]


def test_it_multiplies() -> None:
    product, devices = whole_numbers(48, 64, 80), fleet(1e8, 5e7, 1e7)
    bag = TileBag(product, strips(product, devices, num_each=2), terms=terms(), times=TileTimes())
    play(bag, devices)
    assert torch.equal(bag.result(), product.a.values @ product.b.values)


def scene(seed: int) -> tuple[list[Played], random.Random]:
    """Devices of 1 : 10 speeds with every fault there is, one honest one among them that stays."""
    chance = random.Random(seed)
    devices = [
        Played(
            WorkerId(f"d{i}"),
            down=10 ** chance.uniform(3.5, 4.5),
            up=10 ** chance.uniform(3.2, 4.2),
            flops=10 ** chance.uniform(4.5, 5.5),
            memory=int(10 ** chance.uniform(3.6, 6)),
            optimism=chance.choice((1.0, 1.0, 0.3, 3.0, 30.0)),
            jitter=chance.choice((0.0, 0.1, 0.5)),
        )
        for i in range(chance.randrange(2, 8))
    ]
    for d in devices[1:]:
        match chance.randrange(10):
            case 0:
                d.dies_at, d.notice_s = chance.uniform(0, 2), chance.choice((0.0, 1.0, 6.0))
            case 1:
                d.hangs_at = chance.uniform(0, 2)
            case 2:
                d.lies = chance.choice((1.0, 0.3))
            case 3:
                d.fails = chance.choice((1.0, 0.3))
            case 4:
                d.doubles = 0.7
            case 5:
                d.stalls = 0.3
            case 6:
                d.joins_at = chance.uniform(0, 2)
            case 7:
                d.leaves_at = chance.uniform(0, 2)
                d.returns_at = d.leaves_at + chance.uniform(0.1, 3)
            case _:
                pass
    return devices, chance


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_whatever_devices_do_the_product_is_whole(first: int) -> None:
    for seed in range(first, first + 50):
        devices, chance = scene(seed)
        product = whole_numbers(*(chance.randrange(1, 60) for _ in range(3)), seed=seed)
        placed = strips(
            product, devices, num_slabs=min(chance.choice((1, 1, 3)), product.shape[1]), num_each=chance.choice((1, 3))
        )
        bag = TileBag(
            product, placed, terms=terms(), times=TileTimes(num_in_flight=chance.choice((1, 2, 4))), secret=seed
        )
        play(bag, devices, seed)
        assert torch.equal(bag.result(), product.a.values @ product.b.values), seed
