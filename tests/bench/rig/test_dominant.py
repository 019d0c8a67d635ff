"""A bound for a few unequal devices, by hand."""

from __future__ import annotations

import math

import pytest

from potluck.bench.rig.dominant import dominant_bound_s
from potluck.planner.tiles.bound import lower_bound_s
from potluck.planner.tiles.device import TileDevice, rates_of
from potluck.planner.tiles.product import Product
from potluck.types.ids import WorkerId


def device(number: int, down: float) -> TileDevice:
    return TileDevice(id=WorkerId(f"d{number}"), down_bytes_per_s=down, up_bytes_per_s=1e12, s_per_flop=0.0)


def test_a_dominant_device_leaves_little_room() -> None:
    product = Product(m=1000, n=10, q=1000, down_bytes=1, up_bytes=1)
    rates = rates_of([device(0, 90.0), device(1, 60.0)])
    # Squares: (90 T / 20)^2 + (60 T / 20)^2 = 1000^2.
    assert lower_bound_s(product, rates) == pytest.approx(1000 / math.sqrt(4.5**2 + 3**2))
    # Side by side, which is all two can do: (1000 + w) / 90 = (1000 + 1000 - w) / 60, w = 800, and 10 bytes each.
    assert dominant_bound_s(product, rates) == pytest.approx(200.0, rel=0.01)
    assert dominant_bound_s(product, rates) <= 200.0


def test_equal_devices_have_no_dominant_one() -> None:
    square = Product(m=100, n=10, q=100, down_bytes=1, up_bytes=1)
    rates = rates_of([device(i, 1.0) for i in range(16)])
    assert dominant_bound_s(square, rates) == lower_bound_s(square, rates)
