"""Tilings are exact whatever the plane, and near their lower bound."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.bench.worked import published_devices, unequal_devices
from potluck.planner.tiles.bound import lower_bound_s, select
from potluck.planner.tiles.choose import product_plane
from potluck.planner.tiles.device import Head, TileDevice, rates_of
from potluck.planner.tiles.plane import Demand, Plane
from potluck.planner.tiles.product import Product
from potluck.planner.tiles.slices import sliced
from potluck.planner.tiles.strips import best_strips
from potluck.planner.tiles.tiling import demand_fits, slowest_s, stripped, tile_plane
from potluck.planner.tiles.verify import tiling_fault
from potluck.types.ids import WorkerId


def fault(tiles: np.ndarray, plane: Plane) -> str:
    boxes = np.concatenate((tiles[:, 1:], np.tile([0, 1], (len(tiles), 1))), axis=1)
    return tiling_fault(boxes, (0, plane.rows, 0, plane.cols, 0, 1))


def demand_of(product: Product, devices: tuple[TileDevice, ...]) -> Demand:
    return Demand(product_plane(product, inner=product.n), rates_of(devices), serial=0.0)


products = [
    Product(m=131072, n=5120, q=20480, down_bytes=2, up_bytes=2),
    Product(m=5120, n=131072, q=20480, down_bytes=2, up_bytes=2),
    Product(m=131072, n=3072, q=768, down_bytes=2, up_bytes=2),
    Product(m=768, n=131072, q=3072, down_bytes=2, up_bytes=2),
]


@pytest.mark.parametrize(("num", "most"), [(8, 1.05), (32, 1.03), (256, 1.02)])
@pytest.mark.parametrize("product", products)
def test_plans_are_near_their_lower_bound(product: Product, num: int, most: float) -> None:
    for devices in (published_devices(num, seed=1), unequal_devices(num, seed=2)):
        demand = demand_of(product, devices)
        found = select(demand, Head(), least_side=64)
        assert found is not None
        demand = demand.take(found.chosen)
        tiles = tile_plane(demand, found.seconds)
        assert tiles is not None and fault(tiles, demand.plane) == ""
        assert len(set(tiles[:, 0].tolist())) == len(tiles)
        assert slowest_s(demand, tiles) <= most * lower_bound_s(product, rates_of(devices))


def test_equal_devices_on_a_square_do_what_strips_can() -> None:
    equal = tuple(
        TileDevice(id=WorkerId(f"d{i}"), down_bytes_per_s=1e6, up_bytes_per_s=1e12, s_per_flop=0.0) for i in range(8)
    )
    product = Product(m=4000, n=100, q=4000)
    demand = demand_of(product, equal)
    bound_s = lower_bound_s(product, rates_of(equal))
    strips = stripped(demand, bound_s)
    assert strips is not None
    # Columns of 3, 3 and 2: widths 4000 (1 - x) / 2 twice and 4000 x, L = w + h equal: 2.14 % above 2 / sqrt(8).
    assert slowest_s(demand, strips) / bound_s == pytest.approx(1.0214, abs=5e-4)


@pytest.mark.parametrize("seed", range(30))
def test_any_small_plane_is_tiled_exactly(seed: int) -> None:
    chance = np.random.default_rng(seed)
    m, n, q = (int(size) for size in np.exp(chance.uniform(0, 6, 3)))
    devices = tuple(
        TileDevice(
            id=WorkerId(f"d{i}"),
            down_bytes_per_s=float(np.exp(chance.uniform(8, 16))),
            up_bytes_per_s=float(np.exp(chance.uniform(8, 16))),
            s_per_flop=float(np.exp(chance.uniform(-25, -18))),
            memory_bytes=float(np.exp(chance.uniform(10, 20))),
        )
        for i in range(int(chance.integers(1, 50)))
    )
    demand = demand_of(Product(m=m, n=n, q=q), devices)
    found = select(demand, Head())
    if found is None:
        assert tile_plane(demand, 1.0) is None
        return
    tiles = tile_plane(demand, found.seconds)
    if tiles is not None:
        assert fault(tiles, demand.plane) == "" and demand_fits(demand, tiles)


def test_slices_use_what_strips_cannot() -> None:
    """On a square, eight devices of which one could do half: strips of the others would be too wide or too narrow."""
    devices = tuple(
        TileDevice(id=WorkerId(f"d{i}"), down_bytes_per_s=down * 1e6, up_bytes_per_s=1e12, s_per_flop=0.0)
        for i, down in enumerate((247, 238, 157, 38, 28, 19, 15, 6))
    )
    demand = demand_of(Product(m=4000, n=1000, q=4000), devices)
    strips, slices = stripped(demand, 0.07), sliced(demand, 0.07)
    assert strips is not None and slices is not None and fault(slices, demand.plane) == ""
    assert slowest_s(demand, slices) < 0.99 * slowest_s(demand, strips)


def test_strips_cover_more_in_more_time() -> None:
    demand = demand_of(products[1], published_devices(64, seed=3))
    order = np.argsort(-demand.rates.down)
    covered = [best_strips(demand, order, seconds)[1] for seconds in (5.0, 10.0, 20.0)]
    assert 0 < covered[0] < covered[1] < covered[2]
