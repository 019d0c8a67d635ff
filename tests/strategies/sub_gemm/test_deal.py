"""Who gets an orphan, and lanes: clocks of three stages, memory that tiles share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from potluck.planner.tiles.device import TileDevice
from potluck.planner.tiles.verify import tiling_fault
from potluck.strategies.bag import Piece
from potluck.strategies.sub_gemm.assembly import Assembly, Box
from potluck.strategies.sub_gemm.deal import Candidates, Sizes
from potluck.strategies.sub_gemm.lane import Flight, Lane, Need, Tile
from potluck.strategies.sub_gemm.times import Stages, stages
from potluck.types.ids import WorkerId

sizes = Sizes()
box = Box(0, 640, 0, 512, 0, 256)


def lane(name: str, speed: float = 1.0, free_at: float = 0.0, memory: float = math.inf) -> Lane:
    device = TileDevice(
        id=WorkerId(name), down_bytes_per_s=1e6 * speed, up_bytes_per_s=1e6 * speed, s_per_flop=1e-9 / speed,
        memory_bytes=memory,
    )  # fmt: skip
    return Lane(device, free_at=free_at)


def seconds(on: Lane, part: Box) -> float:
    tile = stages(on.device, part, down_bytes=sizes.down_bytes(part), up_bytes=sizes.up_bytes(part))
    return tile.total_s


def flight_of(on: Lane, need: Need) -> Flight:
    cell = Box(0, 1, 0, 1, 0, 1)
    return Flight(
        tile=Tile(cell, Assembly(cell, [cell], device=torch.device("cpu"))),
        lane=on,
        piece=Piece(task="sub_gemm.tile", operands={}),
        need=need,
        stages=Stages(down_s=0, work_s=0, up_s=0, rtt_s=0),
        began_at=0,
        ends_at=0,
        predicted_s=0,
        due_at=0,
    )


def test_a_small_one_goes_to_whoever_is_first_done_with_it() -> None:
    lanes = [lane("slow", 0.1), lane("busy", 1.0, free_at=9.0), lane("fast", 1.0, free_at=1.0)]
    small = Box(0, 8, 0, 8, 0, 8)
    shares, _ = Candidates(lanes, sizes, 0.5).shares(small, set())
    assert [(each.id, share) for each, share in shares] == [("slow", 1.0)]
    shares, _ = Candidates(lanes, sizes, 0.999).shares(box, set())
    assert shares[0][0].id == "fast"
    (only, share), *rest = Candidates(lanes, sizes, 0.5).shares(small, {lanes[0]})[0]
    assert (only.id, share, rest) == ("fast", 1.0, [])


def test_shares_end_together() -> None:
    lanes = [lane("a", 1.0), lane("b", 1.2), lane("c", 0.9), lane("d", 1.0, free_at=0.3)]
    shares, end = Candidates(lanes, sizes, 0.0).shares(box, set())
    assert len(shares) == 4 and sum(share for _, share in shares) == pytest.approx(1.0)
    parts = box.shares([share for _, share in shares])
    ends = [max(each.free_at, 0.0) + seconds(each, part) for (each, _), part in zip(shares, parts, strict=True)]
    assert ends == pytest.approx([end] * 4, rel=0.01)
    assert end < 0.5 * min(max(each.free_at, 0.0) + seconds(each, box) for each in lanes)


def test_nobody_is_nobody() -> None:
    assert Candidates([], sizes, 0.0).shares(box, set()) == ([], math.inf)
    alone = lane("a")
    assert Candidates([alone], sizes, 0.0).shares(box, {alone}) == ([], math.inf)
    assert Candidates([lane("tiny", memory=11)], sizes, 0.0).shares(box, set()) == ([], math.inf)


def test_one_dealt_to_is_busy_for_the_next() -> None:
    lanes = [lane("a"), lane("b")]
    candidates = Candidates(lanes, sizes, 0.0)
    small = Box(0, 16, 0, 16, 0, 16)
    ((first, _),), end = candidates.shares(small, set())
    first.free_at = end
    candidates.placed(first)
    ((second, _),), _ = candidates.shares(small, set())
    assert {first.id, second.id} == {"a", "b"}


def test_what_does_not_fit_is_halved_and_what_cannot_be_is_refused() -> None:
    whole = Box(0, 4, 0, 6, 0, 10)
    assert sizes.memory_bytes(whole) == 4 * (4 * 10 + 6 * 10 + 4 * 6)
    assert sizes.fit(whole, 1000) == [whole]
    parts = sizes.fit(whole, 300)
    assert all(sizes.memory_bytes(part) <= 300 for part in parts)
    assert sum(part.volume for part in parts) == whole.volume
    assert sizes.fit(whole, 11) == []
    assert sizes.fit(Box(0, 1 << 10, 0, 1 << 10, 0, 1 << 10), 5000) == []  # in a million parts


def test_three_stages_overlap_and_one_tile_does_not() -> None:
    tile = Stages(down_s=1.0, work_s=3.0, up_s=2.0, rtt_s=0.5)
    on = lane("a")
    assert [on.send(tile, 10.0) for _ in range(3)] == [16.5, 19.5, 22.5]
    assert on.send(tile, 30.0) == 36.5


def test_memory_that_tiles_share_counts_once() -> None:
    on = lane("a", memory=100)
    first, second = Need({"x": 40, "w1": 20}, 10), Need({"x": 40, "w2": 20}, 10)
    assert on.has_room(first) and not on.has_room(Need({"x": 91}, 10))
    flights = [flight_of(on, need) for need in (first, second)]
    on.lift(flights[0])
    assert on.bytes_flying == 70 and on.has_room(second) and not on.has_room(Need({"y": 40}, 0))
    on.lift(flights[1])
    assert on.bytes_flying == 100
    on.ground(flights[0])
    assert on.bytes_flying == 70 and on.shards == {"x": 1, "w2": 1}
    on.ground(flights[1])
    assert on.bytes_flying == 0 and not on.shards


@pytest.mark.parametrize(("rows", "cols", "depth", "memory"), [(1024, 1024, 131_072, 8e6), (5120, 640, 16_384, 4e6)])
def test_a_deep_tile_is_cut_across_its_sum_for_a_small_device(rows: int, cols: int, depth: int, memory: float) -> None:
    sizes, whole = Sizes(down=2, up=2, held=2), Box(0, rows, 0, cols, 0, depth)
    parts = sizes.fit(whole, memory)
    assert parts and max(map(sizes.memory_bytes, parts)) <= memory
    assert sum(part.volume for part in parts) == whole.volume
    assert tiling_fault(np.array(parts), tuple(whole)) == ""
    assert min(min(part.shape) for part in parts) >= 32  # not down to single elements
