"""What rectangles cost, by hand, and that heights are the inverse of seconds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from potluck.planner.tiles.device import Rates
from potluck.planner.tiles.plane import Demand, Plane

plane = Plane(
    rows=1000, cols=1000, down_row=10, down_col=20, up_area=2, flops_area=100, held_row=10, held_col=10, held_area=1
)


def rates(
    num: int = 1, *, down: float = 100.0, up: float = 50.0, s_per_flop: float = 1e-3, memory: float = math.inf
) -> Rates:
    each = [np.full(num, value) for value in (down, up, s_per_flop, 0.5, memory)]
    return Rates(
        down=each[0],
        up=each[1],
        s_per_flop=each[2],
        fixed_s=each[3],
        memory=each[4],
        kept=each[4],
        num_in_flight=np.full(num, 2),
    )


def test_seconds_of_a_rectangle_by_hand() -> None:
    # 3 rows, 4 columns: 110 bytes down, 24 up, 1,200 FLOPs.
    one = np.array([3.0]), np.array([4.0])
    assert [float(x[0]) for x in Demand(plane, rates(), serial=0.0).parts_s(*one)] == pytest.approx([1.1, 1.2, 0.48])
    assert Demand(plane, rates(), serial=0.0).seconds(*one)[0] == pytest.approx(0.5 + 1.2)
    assert Demand(plane, rates(), serial=1.0).seconds(*one)[0] == pytest.approx(0.5 + 2.78)
    assert Demand(plane, rates(), serial=0.25).seconds(*one)[0] == pytest.approx(0.5 + 1.2 + 0.25 * 1.58)


@pytest.mark.parametrize("serial", [0.0, 0.25, 1.0])
def test_the_highest_rectangle_takes_all_the_time(serial: float) -> None:
    chance = np.random.default_rng(1)
    fleet = Rates(
        down=np.exp(chance.uniform(3, 7, 50)), up=np.exp(chance.uniform(3, 7, 50)),
        s_per_flop=np.exp(chance.uniform(-9, -5, 50)), fixed_s=chance.uniform(0, 1, 50),
        memory=np.full(50, np.inf), kept=np.full(50, np.inf), num_in_flight=np.full(50, 2),
    )  # fmt: skip
    whole = Plane(
        rows=1000, cols=1000, down_row=3, down_col=5, down_area=0.1, up_row=1, up_col=2, up_area=0.5, flops_area=7
    )
    for demand in (Demand(whole, fleet, serial=serial), Demand(whole, fleet, serial=serial).transposed()):
        widths = np.full(50, 20.0)
        heights = demand.heights(20.0, 30.0)
        inside = (heights > 0) & (heights < 1000)
        assert inside.sum() > 20
        assert demand.seconds(heights, widths)[inside] == pytest.approx(30.0)


def test_a_small_memory_holds_one_panel_and_strips_of_the_other() -> None:
    # Half of 400 bytes for the panel: 20 rows or 20 columns of 10. A quarter for each of 2 strips with its result.
    demand = Demand(plane, rates(memory=400.0, down=1e9, up=1e9, s_per_flop=1e-12), serial=0.0)
    assert demand.heights(20.0, 10.0)[0] == 1000.0  # the columns are the panel, rows of 10 + 20 bytes are streamed
    assert demand.heights(21.0, 10.0)[0] == 20.0  # now rows are
    assert demand.fits(np.array([20.0]), np.array([1000.0])) and demand.fits(np.array([1000.0]), np.array([20.0]))
    assert not demand.fits(np.array([21.0]), np.array([21.0]))


def test_bytes_that_are_bounded_keep_rectangles_near_squares() -> None:
    free = Demand(plane, rates(down=1e9, up=1.0), serial=0.0)
    bound = Demand(plane, rates(down=1e9, up=1.0), serial=0.0, most_down_bytes=np.array([1000.0]))
    assert free.heights(5.0, 1000.5)[0] == pytest.approx(100.0)  # 1,000 bytes up, 2 a cell
    assert bound.heights(5.0, 1000.5)[0] == pytest.approx((1000 - 5 * 20) / 10)
    assert bound.transposed().take(np.array([0])).heights(90.0, 1000.5)[0] == pytest.approx(5.0)
