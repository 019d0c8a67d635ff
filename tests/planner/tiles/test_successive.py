"""From rectangles to tiles that overlap and fit."""

from __future__ import annotations

import numpy as np

from potluck.planner.tiles.device import Rates
from potluck.planner.tiles.plane import Demand, Plane
from potluck.planner.tiles.successive import successive_tiles

plane = Plane(rows=400, cols=900, down_row=4, down_col=4, up_area=1, flops_area=2, held_row=4, held_col=4, held_area=1)


def demand(memory: float, plane: Plane = plane) -> Demand:
    one = np.ones(2)
    rates = Rates(
        down=one, up=one, s_per_flop=one, fixed_s=one, memory=one * memory, kept=one, num_in_flight=np.full(2, 2)
    )
    return Demand(plane, rates, serial=0.25)


rectangles = np.array([[1, 0, 400, 0, 300], [0, 0, 400, 300, 900]])


def test_the_longer_operand_is_cut_into_as_many_tiles_as_overlap_asks_for() -> None:
    tiles, places = successive_tiles(demand(np.inf), rectangles, 4)
    assert tiles.tolist() == [
        *([1, row, row + 100, 0, 300] for row in (0, 100, 200, 300)),
        *([0, 0, 400, col, col + 150] for col in (300, 450, 600, 750)),
    ]
    assert places.tolist() == [[i, 4] for i in range(4)] * 2


def test_a_small_memory_takes_more_and_smaller_tiles() -> None:
    # 4,000 bytes: a panel of at most 2,000 (400 x 4), and two strips of 1,000, of columns of 4 + 400 bytes: 2 at most.
    tiles, places = successive_tiles(demand(4000.0), rectangles[1:], 4)
    assert len(tiles) == 300 and set((tiles[:, 4] - tiles[:, 3]).tolist()) == {2}
    assert places[-1].tolist() == [299, 300]


def test_without_overlap_or_room_for_it_there_is_one_tile() -> None:
    assert len(successive_tiles(demand(np.inf), rectangles, 0)[0]) == 2
    thin = np.array([[0, 0, 40, 0, 40]])
    assert successive_tiles(demand(np.inf), thin, 4)[0].tolist() == [[0, 0, 40, 0, 40]]


def test_rows_with_results_of_their_own_are_cut_along_rows() -> None:
    from dataclasses import replace

    by_rows = demand(np.inf, replace(plane, strips="rows"))
    assert {tuple(tile[3:]) for tile in successive_tiles(by_rows, rectangles[1:], 4)[0].tolist()} == {(300, 900)}
