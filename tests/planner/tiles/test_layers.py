"""Whole layers in rectangles: prices by hand, and when they are worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.bench.worked import published_devices
from potluck.planner.tiles.device import TileDevice
from potluck.planner.tiles.layers import Linear, Mlp, cheapest_linear, cheapest_mlp
from potluck.planner.tiles.product import Options
from potluck.planner.tiles.verify import boxes_of, tiling_fault
from potluck.types.ids import WorkerId

one = (TileDevice(id=WorkerId("d"), down_bytes_per_s=1e6, up_bytes_per_s=1e6, s_per_flop=1e-12),)
full = Options(num_tiles=0, may_split_inner=False)


def test_the_products_of_a_layer() -> None:
    forward, input_gradient, weight_gradient = Linear(num_tokens=6, in_dim=4, out_dim=10).products()
    assert (forward.m, forward.n, forward.q) == (6, 4, 10)
    assert (input_gradient.m, input_gradient.n, input_gradient.q) == (6, 10, 4)
    assert (weight_gradient.m, weight_gradient.n, weight_gradient.q) == (4, 6, 10)
    assert [
        (each.in_dim, each.out_dim) for each in Mlp(num_tokens=6, hidden_dim=4, ff_dim=10, num_matrices=3).linears()
    ] == [(4, 10), (4, 10), (10, 4)]


def test_one_device_that_keeps_everything_by_hand() -> None:
    """X 100 x 200, W 200 x 300, fp32 over 1 MB/s: 320 kB down and 120 kB up forward, 120 kB down and 320 kB up back."""
    plan = cheapest_linear(Linear(num_tokens=100, in_dim=200, out_dim=300), one, options=full)
    assert plan.stay_s == pytest.approx(0.32 + 0.32, rel=1e-3)
    # Apart: 320 down / 120 up, 360 down / 80 up, 200 down / 240 up.
    assert plan.apart_s == pytest.approx(0.32 + 0.36 + 0.24, rel=1e-3)
    assert plan.stay is not None and plan.stay.up_bytes == 120e3 + 80e3 + 240e3
    assert tiling_fault(boxes_of(plan.stay.tiles), (0, 100, 0, 300, 0, 200)) == ""


def test_weights_and_their_gradients_travel_once_a_step() -> None:
    options = replace(full, num_micro_batches=4)
    plan = cheapest_linear(Linear(num_tokens=100, in_dim=200, out_dim=300), one, options=options)
    # Later: 80 kB down, 120 up, forward; 120 down, 80 + 240 / 4 up, back. The first has the weight's 240 kB more.
    assert plan.stay_s == pytest.approx(0.32 + 3 * 0.12 + 4 * 0.14, rel=1e-3)


def test_a_fused_mlp_by_hand() -> None:
    plan = cheapest_mlp(Mlp(num_tokens=100, hidden_dim=200, ff_dim=300), one, options=full)
    # X 80 kB and both matrices 480 kB down, Y 80 kB up; apart 320 and 360 kB down.
    assert plan.fused_s == pytest.approx(0.56, rel=1e-3) and plan.apart_s == pytest.approx(0.68, rel=1e-3)
    assert plan.fused is not None and plan.fused.up_bytes == 80e3 and plan.fused.first_down_bytes == 560e3


def test_fusion_pays_where_the_inner_results_are_wide() -> None:
    devices = published_devices(64, seed=0)
    plan = cheapest_mlp(Mlp(num_tokens=16384, hidden_dim=1024, ff_dim=16384, down_bytes=2, up_bytes=2), devices)
    assert plan.fused is not None and plan.fused_s < 0.6 * plan.apart_s
    assert tiling_fault(boxes_of(plan.fused.tiles), (0, 16384, 0, 16384, 0, 1024)) == ""
    few_tokens = Mlp(num_tokens=256, hidden_dim=4096, ff_dim=4096, down_bytes=2, up_bytes=2)
    slow = tuple(replace(device, up_bytes_per_s=device.up_bytes_per_s / 30) for device in devices)
    plan = cheapest_mlp(few_tokens, slow)  # every device would return whole rows of the result
    assert plan.fused is None and len(plan.products) == 2


def test_staying_pays_on_symmetric_links_and_not_on_slow_uplinks() -> None:
    linear = Linear(num_tokens=4096, in_dim=1024, out_dim=4096, down_bytes=2, up_bytes=2, held_bytes=2)
    asymmetric = published_devices(24, seed=0)
    symmetric = tuple(replace(device, up_bytes_per_s=device.down_bytes_per_s) for device in asymmetric)
    options = Options(num_micro_batches=8)
    assert cheapest_linear(linear, symmetric, options=options).stay is not None
    assert cheapest_linear(linear, asymmetric, options=Options()).stay is None


def test_nobody_to_ask() -> None:
    plan = cheapest_mlp(Mlp(num_tokens=8, hidden_dim=8, ff_dim=8), ())
    assert plan.fused is None and {product.method for product in plan.products} == {"native"}
