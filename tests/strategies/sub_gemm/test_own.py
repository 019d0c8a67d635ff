"""What a run learns of its own machine."""

from __future__ import annotations

import math

import pytest

from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.product import Options, Product
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.own import OwnMachine, few_products
from potluck.strategies.sub_gemm.tally import Tally
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, LinkRates

num, rate = 8, 1e6
devices = [
    TileDevice(id=WorkerId(f"d{i}"), down_bytes_per_s=rate, up_bytes_per_s=rate, s_per_flop=1e-12) for i in range(num)
]
plan = cheapest(Product(m=512, n=4096, q=512), devices, options=Options(may_split_inner=False))


def here(down: float = rate) -> list[WorkerInfo]:
    link = LinkRates(down_bytes_per_s=down, up_bytes_per_s=rate, rtt_s=0.0)
    return [WorkerInfo(id=d.id, profile=DeviceProfile(device="cpu", link=link)) for d in devices]


def moved(num_bytes: int) -> Tally:
    tally = Tally()
    tally.down_bytes[WorkerId("d0")] = num_bytes
    return tally


def test_a_link_that_devices_wait_for_together_is_learnt_and_forgotten() -> None:
    assert plan.binds == "down"
    own, sent = OwnMachine(Head()), round(plan.first_down_bytes)
    for product in range(few_products):
        assert own.head.egress_bytes_per_s == math.inf
        own.spread(plan, here(rate if product == 0 else rate / 4), moved(sent), 4 * plan.first_s)
    assert own.head.egress_bytes_per_s == pytest.approx(sent / (4 * plan.first_s))
    assert own.head.ingress_bytes_per_s == math.inf
    bound = cheapest(plan.product, devices, own.head, plan.options)
    assert bound.binds == "egress" and bound.first_down_bytes <= plan.first_down_bytes
    own.spread(plan, here(), moved(sent), plan.first_s)
    assert own.head.egress_bytes_per_s == math.inf


def test_a_product_that_takes_as_long_as_it_should_says_nothing_of_the_link() -> None:
    own = OwnMachine(Head(egress_bytes_per_s=1e9))
    for _ in range(10):
        own.spread(plan, here(), moved(round(plan.first_down_bytes)), 1.2 * plan.first_s)
        own.spread(plan, here(), moved(1), math.nan)
        own.spread(plan, here(), moved(1000), 0.5)
    assert own.head.egress_bytes_per_s == 1e9


def test_checks_have_the_price_that_they_were_seen_to_have() -> None:
    own = OwnMachine(Head())
    own.checked(1e6, 1.0)  # a small tile, on a busy machine
    assert own.head.check_s_per_flop == 0.0
    own.checked(1e9, 0.1)
    own.checked(3e9, 0.1)
    assert own.head.check_s_per_flop == pytest.approx(0.2 / 4e9)
    for _ in range(100):
        own.checked(3e9, 3.0)
    assert own.head.check_s_per_flop == pytest.approx(1e-9, rel=0.01)
    dear = cheapest(plan.product, devices, own.head, plan.options)
    assert dear.head_s == pytest.approx(dear.check_flops * own.head.check_s_per_flop) and dear.head_s > 0


def test_the_heads_own_products_correct_its_speed() -> None:
    own = OwnMachine(Head(s_per_flop=1e-9))
    for _ in range(30):
        own.computed(1e9, 2.0)
    assert own.head.s_per_flop == pytest.approx(2e-9, rel=0.01)
