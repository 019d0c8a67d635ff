"""Which way of doing a product is taken, and what it is said to take."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from potluck.bench.worked import published_devices
from potluck.planner.cost import DeviceCost, OpCost
from potluck.planner.tiles.choose import cheapest, whole_depths
from potluck.planner.tiles.device import Head, TileDevice, tile_device, unknown_link
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.verify import faults
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, LinkRates

plain = Options(may_split_inner=False, may_keep_weights=False)


def equal_devices(num: int, **changed: float) -> tuple[TileDevice, ...]:
    one = TileDevice(id=WorkerId("d0"), down_bytes_per_s=1e7, up_bytes_per_s=1e6, s_per_flop=1e-11)
    return tuple(replace(one, id=WorkerId(f"d{i}"), **changed) for i in range(num))


def test_a_plan_of_equal_devices_by_hand() -> None:
    # Four quarters of 500 x 500: 4 MB down in 0.4 s, 1 MB up in 1 s, 5e8 FLOPs in 5 ms, rtt 10 ms and 4 calls of 1 ms.
    product = Product(m=1000, n=1000, q=1000)
    plan = cheapest(product, equal_devices(4, rtt_s=0.01, s_per_tile=0.001), options=plain)
    assert plan.method == "plain" and faults(plan) == "" and plan.slowest == "devices"
    assert plan.first_s == pytest.approx(0.014 + 1.0 + (0.4 + 0.005) / 4) and plan.later_s == plan.first_s
    assert sorted(tile.finish_s for tile in plan.tiles)[::4] == pytest.approx(
        [0.014 + 1.405 / 4 + place / 4 for place in range(4)]
    )
    assert plan.bindings == {"up": 4} and plan.first_down_bytes == 4 * 4e6 and plan.up_bytes == 4e6
    load = plan.loads[WorkerId("d2")]
    assert (load.down_bytes, load.up_bytes, load.down_s, load.up_s) == pytest.approx((4e6, 1e6, 0.4, 1.0))
    assert plan.lower_bound_s == pytest.approx(0.014 + 1.0) and "3/4" in plan.assumptions
    assert [tile.device for tile in plan.tiles[:4]] != [plan.tiles[0].device] * 4


def test_full_overlap_hides_all_but_the_slowest() -> None:
    plan = cheapest(Product(m=1000, n=1000, q=1000), equal_devices(4), options=replace(plain, num_tiles=0))
    assert plan.first_s == pytest.approx(1.0) and len(plan.tiles) == 4


def test_the_head_alone_where_it_is_quicker_or_nobody_helps() -> None:
    product = Product(m=1000, n=1000, q=1000)
    quick = cheapest(product, equal_devices(4), Head(s_per_flop=1e-10))
    assert quick.method == "native" and quick.tiles == () and quick.first_s == pytest.approx(0.2)
    assert "the head takes 0.2 s" in quick.reason and faults(quick) == ""
    assert cheapest(product, equal_devices(4), Head(s_per_flop=1e-8)).method != "native"
    assert cheapest(product, (), Head(s_per_flop=1e-8)).reason == "there is no device"
    poor = cheapest(product, equal_devices(4, memory_bytes=100.0))
    assert poor.method == "native" and poor.first_s == math.inf and "memory" in poor.reason


@pytest.mark.parametrize("side", [1, 16, 63, 64, 65])
def test_a_product_as_small_as_a_tile_is_one(side: int) -> None:
    plan = cheapest(Product(m=side, n=32, q=side), equal_devices(3), options=plain)
    assert plan.method == "plain" and faults(plan) == "" and len(plan.loads) == 1


def test_parts_of_the_inner_dimension_are_whole_however_unequal_devices_are() -> None:
    devices = (*equal_devices(1, down_bytes_per_s=1e9, up_bytes_per_s=1e9), *equal_devices(9)[1:])
    layer = Product(m=64, n=640, q=64, kind="weight_gradient")
    plan = cheapest(layer, devices, options=Options(least_side=1, num_tiles=0))
    assert faults(plan) == ""
    depths = whole_depths(np.array([1.0, 1.0, 1.0, 600.0]), 600)
    assert depths.tolist() == [1, 1, 1, 597]
    assert whole_depths(np.array([2.4, 3.3, 4.3]), 10).tolist() == [3, 3, 4]


def test_a_weight_gradient_is_split_along_its_tokens() -> None:
    devices = published_devices(64, seed=0)
    product = Product(m=5120, n=131072, q=20480, kind="weight_gradient", down_bytes=2, up_bytes=2, held_bytes=2)
    split, whole = cheapest(product, devices), cheapest(product, devices, options=plain)
    assert split.method == "inner_split" and faults(split) == ""
    assert len({(tile.k0, tile.k1) for tile in split.tiles}) == split.num_inner_parts > 1
    assert split.first_s < 0.6 * whole.first_s
    assert split.up_bytes == pytest.approx(split.num_inner_parts * whole.up_bytes)


def test_kept_weights_take_fewer_bytes_and_no_longer() -> None:
    devices = published_devices(8, seed=0)
    product = Product(m=2048, n=2048, q=8192, kind="input_gradient")
    uncached = cheapest(product, devices, options=replace(plain, num_micro_batches=4))
    kept = cheapest(product, devices, options=Options(num_micro_batches=4, may_split_inner=False))
    assert kept.method == "kept_weights" and faults(kept) == ""
    assert kept.step_s <= uncached.step_s and kept.up_bytes == uncached.up_bytes
    assert kept.first_down_bytes + 3 * kept.later_down_bytes <= 0.7 * 4 * uncached.first_down_bytes
    assert kept.later_s <= kept.first_s
    gradient = cheapest(replace(product, kind="weight_gradient"), devices, options=Options(num_micro_batches=4))
    assert not gradient.keeps_weights


def test_kept_weights_need_memory_for_all_products() -> None:
    devices = equal_devices(8, memory_bytes=16e6, up_bytes_per_s=1e7)
    product = Product(m=512, n=1024, q=4096)
    options = Options(num_micro_batches=8, may_split_inner=False)
    assert cheapest(product, devices, options=options).keeps_weights
    for less in ({"kept_part": 0.01}, {"kept_share": 0.01}, {"kept_part": 0.0}):
        assert not cheapest(product, devices, options=replace(options, **less)).keeps_weights


def test_a_small_memory_takes_small_tiles() -> None:
    product = Product(m=2000, n=1000, q=2000)
    plan = cheapest(product, equal_devices(8, memory_bytes=8e6, num_in_flight=3), options=plain)
    assert plan.method == "plain" and faults(plan) == "" and len(plan.tiles) > 32


def test_where_no_rectangle_of_its_own_fits_a_device_does_several_one_after_the_other() -> None:
    # 2 devices x 2 MB of panel / 20 kB a row: 200 of 1,000 rows at a time.
    plan = cheapest(Product(m=1000, n=5000, q=500), equal_devices(2, memory_bytes=4e6), options=plain)
    assert plan.method == "plain" and faults(plan) == ""
    assert plan.first_s == pytest.approx(max(tile.finish_s for tile in plan.tiles), rel=0.01)
    assert plan.first_s > plan.lower_bound_s
    own = [tile for tile in plan.tiles if tile.device == "d0"]
    assert [tile.finish_s for tile in own] == sorted(tile.finish_s for tile in own)
    sent_bytes = sum(load.down_bytes for load in plan.loads.values())
    assert sent_bytes == pytest.approx(plan.first_down_bytes) and sent_bytes > 4 * 5000 * (1000 + 500)
    long = Product(m=500, n=200_000, q=500)
    assert cheapest(long, equal_devices(4, memory_bytes=4e7), options=Options()).num_inner_parts > 1


def test_a_narrow_coordinator_is_part_of_the_price() -> None:
    product = Product(m=8000, n=2000, q=8000, down_bytes=2, up_bytes=2)
    devices = published_devices(128, seed=1)
    wide = cheapest(product, devices, options=plain)
    narrow = cheapest(product, devices, Head(egress_bytes_per_s=2e8), plain)
    assert narrow.first_down_bytes < 0.8 * wide.first_down_bytes and len(narrow.loads) < len(wide.loads)
    assert narrow.egress_s == pytest.approx(narrow.first_down_bytes / 2e8)
    assert narrow.first_s < wide.first_down_bytes / 2e8


def test_checks_and_sums_of_the_head_are_part_of_the_price() -> None:
    product = Product(m=1000, n=1000, q=1000)
    plan = cheapest(product, equal_devices(4), Head(num_check_vectors=10, check_s_per_flop=1e-9), plain)
    # Four squares of 500: for each vector 2 x 1000 x (500 + 500) + 2 x 500 x 500 FLOPs.
    assert plan.head_s == pytest.approx(10 * 1e-9 * 4 * (2e6 + 5e5)) and plan.slowest == "devices"
    # Dear checks leave one device: its rectangle has the fewest sides.
    dear = cheapest(product, equal_devices(4), Head(num_check_vectors=10, check_s_per_flop=1e-6), plain)
    assert dear.head_s == pytest.approx(10 * 1e-6 * (2 * 2e6 + 2e6)) == dear.first_s and dear.slowest == "head"


def test_what_a_device_reports_becomes_what_is_planned_with() -> None:
    cost = DeviceCost(
        gemm=OpCost(s_per_flop=2e-12, s_per_call=1e-4), attention=OpCost(), elementwise=OpCost(), optimizer=OpCost()
    )
    profile = DeviceProfile(device="cpu", free_memory_bytes=1000, link=LinkRates(up_bytes_per_s=5.0))
    found = tile_device(WorkerId("a"), profile, cost, max_memory_bytes=500.0, num_in_flight=3)
    assert found == TileDevice(
        id=WorkerId("a"), down_bytes_per_s=unknown_link.down_bytes_per_s, up_bytes_per_s=5.0, s_per_flop=2e-12,
        s_per_tile=1e-4, rtt_s=unknown_link.rtt_s, memory_bytes=500.0, num_in_flight=3,
    )  # fmt: skip
    assert tile_device(WorkerId("a"), profile, cost).memory_bytes == 850


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1)])
def test_products_have_sides(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="sides of 1 or more"):
        Product(m=sizes[0], n=sizes[1], q=sizes[2])


def test_elements_have_sizes_and_options_counts() -> None:
    with pytest.raises(ValueError, match="cannot be planned with"):
        Product(m=1, n=1, q=1, down_bytes=0.0)
    with pytest.raises(ValueError, match="1 or more"):
        Options(num_micro_batches=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Options(kept_share=1.0)
