"""A matrix from boxes: exact tilings only, sums in the order of K, nothing twice."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch

from potluck.strategies.sub_gemm.assembly import Assembly, Box

cpu = torch.device("cpu")


def test_equal_areas_do_not_make_a_tiling() -> None:
    boxes = [Box(0, 2, 0, 2, 0, 4), Box(1, 3, 1, 3, 0, 4), Box(0, 1, 2, 3, 0, 4)]  # 3x3 = 2x2 + 2x2 + 1x1
    assert sum(box.volume for box in boxes) == Box(0, 3, 0, 3, 0, 4).volume
    with pytest.raises(ValueError, match="3 boxes do not tile"):
        Assembly(Box(0, 3, 0, 3, 0, 4), boxes, device=cpu)


@pytest.mark.parametrize(
    "boxes",
    [[], [Box(0, 2, 0, 2, 0, 3)], [Box(0, 2, 0, 3, 0, 4)], [Box(0, 2, 0, 2, 0, 4)] * 2, [Box(0, 1, 0, 2, 0, 4)] * 2],
)
def test_gaps_overlaps_and_boxes_from_elsewhere_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(ValueError, match="do not tile"):
        Assembly(Box(0, 2, 0, 2, 0, 4), boxes, device=cpu)


def test_a_box_counts_once() -> None:
    first, second = Box(0, 1, 0, 2, 0, 1), Box(1, 2, 0, 2, 0, 1)
    assembly = Assembly(Box(0, 2, 0, 2, 0, 1), [first, second], device=cpu)
    assembly.put(first, torch.ones(1, 2))
    with pytest.raises(ValueError, match="was there before"):
        assembly.put(first, torch.ones(1, 2))
    assert not assembly.is_complete
    with pytest.raises(AssertionError, match="missing parts"):
        _ = assembly.values
    assembly.put(second, torch.full((1, 2), 2.0))
    assert torch.equal(assembly.values, torch.tensor([[1.0, 1.0], [2.0, 2.0]]))


def test_sums_over_k_are_taken_in_its_order() -> None:
    # In fp32 1e8 + 1 - 1e8 is 0 from the left and 1 if the last two are added first.
    slabs = {Box(0, 1, 0, 1, k, k + 1): value for k, value in enumerate((1e8, 1.0, -1e8, 3.0))}
    for order in permutations(slabs):
        assembly = Assembly(Box(0, 1, 0, 1, 0, 4), slabs, device=cpu)
        for box in order:
            assembly.put(box, torch.tensor([[slabs[box]]]))
        assert assembly.values.item() == 3.0


def test_slabs_tiled_in_different_ways_give_the_same_bits_in_any_order() -> None:
    chance = random.Random(1)
    whole = Box(3, 43, 5, 55, 0, 30)
    boxes: list[Box] = []
    for k0, k1 in ((0, 7), (7, 20), (20, 30)):
        for strip in whole._replace(k0=k0, k1=k1).shares([chance.random() + 0.2 for _ in range(4)]):
            boxes += strip.halves()
    generator = torch.Generator().manual_seed(0)
    values = {box: torch.randn(box.shape, generator=generator) for box in boxes}
    seen: list[torch.Tensor] = []
    for _ in range(20):
        chance.shuffle(boxes)
        assembly = Assembly(whole, boxes, device=cpu)
        for box in boxes:
            assert not assembly.is_complete
            assembly.put(box, values[box])
        seen.append(assembly.values)
    assert all(torch.equal(seen[0], other) for other in seen)
    expected = torch.zeros(whole.shape)
    for box in sorted(boxes, key=lambda box: box.k0):
        expected[box.row0 - 3 : box.row1 - 3, box.col0 - 5 : box.col1 - 5] += values[box]
    assert torch.equal(seen[0], expected)


def test_shares_cut_the_longer_side() -> None:
    box = Box(0, 4, 10, 110, 2, 5)
    assert box.shares([3, 1]) == [Box(0, 4, 10, 85, 2, 5), Box(0, 4, 85, 110, 2, 5)]
    assert box.shares([999, 1], least_side=20) == [Box(0, 4, 10, 90, 2, 5), Box(0, 4, 90, 110, 2, 5)]
    assert Box(0, 1, 0, 1, 0, 5).halves() == [Box(0, 1, 0, 1, 0, 2), Box(0, 1, 0, 1, 2, 5)]
    assert Box(0, 1, 0, 1, 4, 5).halves() == []
