"""The lower bound and the choice of devices, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from potluck.planner.tiles.bound import lower_bound_s, select, shared_times
from potluck.planner.tiles.choose import product_plane
from potluck.planner.tiles.device import Head, TileDevice, rates_of
from potluck.planner.tiles.plane import Demand
from potluck.planner.tiles.product import Product
from potluck.types.ids import WorkerId

square = Product(m=100, n=10, q=100, down_bytes=1, up_bytes=1)


def device(
    number: int = 0, *, down: float = 1e12, up: float = 1e12, s_per_flop: float = 0.0, rtt_s: float = 0.0
) -> TileDevice:
    return TileDevice(
        id=WorkerId(f"d{number}"), down_bytes_per_s=down, up_bytes_per_s=up, s_per_flop=s_per_flop, rtt_s=rtt_s
    )


def test_the_bound_of_download_bound_devices_is_that_of_squares() -> None:
    # Half-perimeter L = T / (n b) = T / 10; four squares of side L / 2 fill 100 x 100 when L = 100.
    assert lower_bound_s(square, rates_of([device(i, down=1.0) for i in range(4)])) == pytest.approx(1000.0)


def test_a_side_is_no_longer_than_the_product() -> None:
    # One device needs all of A and B: (100 + 100) rows and columns of 10 bytes.
    assert lower_bound_s(square, rates_of([device(down=1.0)])) == pytest.approx(2000.0)


def test_the_bounds_of_upload_and_of_work() -> None:
    assert lower_bound_s(square, rates_of([device(i, up=10.0) for i in range(5)])) == pytest.approx(200.0)
    assert lower_bound_s(square, rates_of([device(i, s_per_flop=1e-3) for i in range(4)])) == pytest.approx(50.0)


def test_a_round_trip_comes_on_top() -> None:
    assert lower_bound_s(square, rates_of([device(up=10.0, rtt_s=3.0)])) == pytest.approx(1003.0)


def test_with_fewer_devices_the_strongest_count() -> None:
    rates = rates_of([device(0, up=30.0), device(1, up=10.0), device(2, up=20.0)])
    assert lower_bound_s(square, rates) == pytest.approx(10000 / 60)
    assert lower_bound_s(square, rates, most_devices=2) == pytest.approx(10000 / 50)


def test_a_narrow_coordinator_uses_fewer_devices() -> None:
    demand = Demand(product_plane(square, inner=10), rates_of([device(i, up=1.0) for i in range(100)]), serial=0.0)
    wide = select(demand, Head())
    # 16 of 100 devices: 25 x 25 each in 625 s, and 16 x 50 x 10 bytes leave the coordinator in 8000 / 12.8 s.
    narrow = select(demand, Head(egress_bytes_per_s=12.8))
    assert wide is not None and len(wide.chosen) == 100 and wide.seconds == pytest.approx(100.0, rel=1e-3)
    assert narrow is not None and len(narrow.chosen) == pytest.approx(16, abs=1)
    assert narrow.seconds == pytest.approx(625.0, rel=0.03)


def test_tiles_of_a_sensible_side_leave_devices_idle() -> None:
    demand = Demand(product_plane(square, inner=10), rates_of([device(i, up=1.0) for i in range(100)]), serial=0.0)
    found = select(demand, Head(), least_side=25)
    assert found is not None and len(found.chosen) <= 16


def test_what_no_memory_holds_is_not_selected() -> None:
    small = TileDevice(id=WorkerId("d"), down_bytes_per_s=1, up_bytes_per_s=1, s_per_flop=0, memory_bytes=100)
    demand = Demand(product_plane(square, inner=10), rates_of([small]), serial=0.0)
    assert select(demand, Head()) is None


def test_shared_times_by_hand() -> None:
    head = Head(
        egress_bytes_per_s=10, ingress_bytes_per_s=5, num_check_vectors=3, check_s_per_flop=1e-3, add_s_per_element=0.5
    )
    plane = product_plane(square, inner=10)
    found = shared_times(plane, head, np.array([20.0, 30.0]), np.array([40.0, 10.0]), added_elements=4.0)
    assert (found.down_bytes, found.up_bytes) == (10 * 100, 800 + 300)
    assert (found.egress_s, found.ingress_s) == (100.0, 220.0)
    # For each vector B r, A (B r) and C r: 2 n (rows + cols) + 2 rows cols.
    assert found.head_s == pytest.approx(3 * 1e-3 * (20 * 100 + 2 * 1100) + 2.0)


@pytest.mark.parametrize("wrong", [{"down": 0.0}, {"up": -1.0}, {"s_per_flop": math.inf}, {"rtt_s": math.nan}])
def test_numbers_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cannot be planned with"):
        rates_of([device(0), device(1, **wrong)])
