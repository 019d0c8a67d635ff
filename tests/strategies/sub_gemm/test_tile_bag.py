"""A bag of tiles against devices that are played: every fault there is, alone and all at once."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sub_gemm_played import Played, play, strips, terms, whole_numbers
from torch import Tensor

from potluck.planner.tiles.device import Head
from potluck.strategies.bag import Piece
from potluck.strategies.sub_gemm.assembly import Assembly, Box
from potluck.strategies.sub_gemm.checks import check_tile
from potluck.strategies.sub_gemm.holdings import Holdings
from potluck.strategies.sub_gemm.pieces import Terms
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.types.errors import InvalidUpdate, RoundFailed
from potluck.types.ids import WorkerId

able_head = Head(s_per_flop=1e-9)


def fleet(*flops: float, **each: float) -> list[Played]:
    return [Played(WorkerId(f"d{i}"), flops=f, **each) for i, f in enumerate(flops)]  # pyright: ignore[reportArgumentType]


def bag_of(
    product: Product,
    devices: list[Played],
    on: Terms | None = None,
    *,
    num_in_flight: int = 2,
    num_slabs: int = 1,
    num_each: int = 1,
) -> TileBag:
    placed = strips(product, devices, num_slabs=num_slabs, num_each=num_each)
    return TileBag(product, placed, terms=on or terms(), times=TileTimes(num_in_flight=num_in_flight))


def product_of(product: Product) -> Tensor:
    return product.a.values @ product.b.values


def answer(piece: Piece) -> dict[str, Tensor]:
    return Played(WorkerId("any")).answer(piece, random.Random(0))


def scene(seed: int) -> tuple[list[Played], random.Random]:
    """Devices of 1 : 10 speeds with every fault there is, and an honest one among them that stays."""
    chance = random.Random(seed)
    devices = [
        Played(
            WorkerId(f"d{i}"),
            down=10 ** chance.uniform(3.5, 4.5),
            up=10 ** chance.uniform(3.2, 4.2),
            flops=10 ** chance.uniform(4.5, 5.5),
            memory=int(10 ** chance.uniform(3.6, 6)),
            optimism=chance.choice((1.0, 1.0, 0.3, 3.0, 30.0)),
            jitter=chance.choice((0.0, 0.1, 0.5)),
        )
        for i in range(chance.randrange(2, 8))
    ]
    for d in devices[1:]:
        match chance.randrange(10):
            case 0:
                d.dies_at, d.notice_s = chance.uniform(0, 2), chance.choice((0.0, 1.0, 6.0))
            case 1:
                d.hangs_at = chance.uniform(0, 2)
            case 2:
                d.lies = chance.choice((1.0, 0.3))
            case 3:
                d.fails = chance.choice((1.0, 0.3))
            case 4:
                d.doubles = 0.7
            case 5:
                d.stalls = 0.3
            case 6:
                d.joins_at = chance.uniform(0, 2)
            case 7:
                d.leaves_at = chance.uniform(0, 2)
                d.returns_at = d.leaves_at + chance.uniform(0.1, 3)
            case _:
                pass
    return devices, chance


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_whatever_devices_do_the_product_is_whole(first: int) -> None:
    for seed in range(first, first + 50):
        devices, chance = scene(seed)
        product = whole_numbers(*(chance.randrange(1, 60) for _ in range(3)), seed=seed)
        on = terms(head=Head(s_per_flop=10 ** chance.uniform(-6, -3)) if chance.random() < 0.3 else Head())
        slabs = min(chance.choice((1, 1, 3)), product.shape[1])
        bag = bag_of(
            product,
            devices,
            on,
            num_in_flight=chance.choice((1, 2, 4)),
            num_slabs=slabs,
            num_each=chance.choice((1, 3)),
        )
        play(bag, devices, seed)
        assert torch.equal(bag.result(), product_of(product)), seed


def test_without_an_honest_device_a_product_is_never_partial() -> None:
    num_failed = 0
    for seed in range(60):
        devices, chance = scene(seed)
        match chance.randrange(4):
            case 0:
                devices[0].lies = 1.0
            case 1:
                devices[0].hangs_at = 0.1
            case 2:
                devices[0].fails = 1.0
            case _:
                devices[0].leaves_at = 0.1
        product = whole_numbers(30, 20, 40, seed=seed)
        bag = bag_of(product, devices)
        try:
            play(bag, devices, seed)
        except RoundFailed:
            num_failed += 1
            with pytest.raises(AssertionError, match="missing tiles"):
                bag.result()
        else:
            assert torch.equal(bag.result(), product_of(product)), seed
    assert 0 < num_failed < 60


# The faults of the authors' public runtime


def test_a_timeout_does_not_end_a_product() -> None:
    devices = fleet(1e6, 1e6, hangs_at=0.0)
    bag = bag_of(whole_numbers(32, 32, 32), devices)
    with pytest.raises(RoundFailed, match="has not answered in 3"):
        play(bag, devices)
    assert not bag.is_done


def test_late_and_double_replies_do_not_count() -> None:
    product, devices = whole_numbers(8, 8, 8), fleet(1e6, 1e6)
    bag = bag_of(product, devices)
    here = tuple(d.info for d in devices)
    (first, piece), (second, other) = bag.issue(here, 0.0)
    bag.take(second, piece, answer(piece), 0.1)  # somebody else's
    assert bag.tally.num_ignored == 1
    for at in (0.1, 0.2, 0.3):
        bag.take(first, piece, answer(piece), at)
    bag.take(second, piece, {"c": torch.zeros(8, 4)}, 0.4)  # not even its own
    assert not bag.is_done and bag.tally.num_ignored == 4
    bag.lose(second, other, "it left", 0.5)
    bag.take(second, other, answer(other), 0.6)
    assert not bag.is_done and bag.tally.num_ignored == 5
    ((_, again),) = bag.issue(here, 0.6)
    bag.take(first, again, answer(again), 0.7)
    assert bag.is_done and torch.equal(bag.result(), product_of(product))


def test_a_device_that_hangs_and_keeps_its_connection_is_noticed_by_its_time() -> None:
    product = whole_numbers(64, 64, 64)
    undisturbed = play(bag_of(product, fleet(1e6, 1e6, 1e6)), fleet(1e6, 1e6, 1e6))
    devices = fleet(1e6, 1e6, 1e6)
    devices[1].hangs_at = 0.0
    bag = bag_of(product, devices)
    took_s = play(bag, devices)
    assert bag.tally.num_late == 1
    assert took_s < 3 * undisturbed + 0.3  # a deadline of twice the time, and a half more for two
    assert torch.equal(bag.result(), product_of(product))


@pytest.mark.parametrize("memory", [1 << 9, 5000, 4 * (16 * 64 + 64 * 21 + 16 * 21)])
def test_a_tile_larger_than_the_memory_is_cut_and_one_that_just_fits_goes_alone(memory: int) -> None:
    product, devices = whole_numbers(16, 64, 42), fleet(1e6, 1e6, memory=memory)
    bag = bag_of(product, devices)
    play(bag, devices)  # it asserts that nobody is given more than fits
    assert torch.equal(bag.result(), product_of(product))


def test_a_device_too_small_for_a_single_element_is_left_out() -> None:
    product, devices = whole_numbers(8, 8, 8), fleet(1e6, 1e5)
    devices[0].memory = 8
    bag = bag_of(product, devices)
    play(bag, devices)
    assert set(bag.tally.up_bytes) == {"d1"}


def test_speed_counts_in_who_gets_what() -> None:
    product, devices = whole_numbers(64, 64, 220), fleet(1e6, 1e5, down=1e7, up=1e7)
    even = [Played(d.id) for d in devices]  # a plan that knows nothing of speeds
    bag = TileBag(product, strips(product, even, num_each=10), terms=terms(), times=TileTimes())
    took_s = play(bag, devices)
    assert took_s < 1.3 * 2 * 64 * 64 * 220 / 1.1e6
    assert bag.tally.up_bytes[WorkerId("d0")] > 5 * bag.tally.up_bytes[WorkerId("d1")]


def test_the_time_that_is_told_is_the_time_it_took() -> None:
    product, devices = whole_numbers(32, 32, 32), fleet(1e6, 1e6, jitter=0.5)
    bag = bag_of(product, devices)
    took_s = play(bag, devices, begin=100.0)
    assert bag.began_at == 100.0 and bag.ended_at - bag.began_at == pytest.approx(took_s)
    assert bag.predicted_s != pytest.approx(took_s, rel=0.01)


# Others


def test_the_same_tiling_gives_the_same_bits_whoever_is_first() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 96, generator=generator), torch.randn(96, 50, generator=generator)
    product = Product(Matrix(a, "x"), Matrix(b, "w"), "weight_gradient")
    on = terms(check=partial_check("fp32"))
    results: list[Tensor] = []
    for seed in range(20):
        devices = fleet(1e6, 2e6, 3e6, 1e6, jitter=0.2)
        bag = bag_of(product, devices, on, num_slabs=6, num_in_flight=4)
        play(bag, devices, seed)
        assert bag.tally.num_late == 0
        results.append(bag.result())
    assert all(torch.equal(results[0], other) for other in results)
    assert torch.allclose(results[0], a @ b, atol=1e-4)


def partial_check(wire: str) -> object:
    def check(a: Tensor, b: Tensor, c: Tensor, generator: torch.Generator) -> None:
        check_tile(a, b, c, wire=wire, generator=generator)

    return check


def test_a_liar_is_found_out_and_gets_nothing_more() -> None:
    product, devices = whole_numbers(64, 32, 96), fleet(1e6, 1e6, 1e6)
    devices[2].lies = 1.0
    bag = bag_of(product, devices, terms(check=partial_check("fp32")), num_each=6, num_in_flight=1)
    play(bag, devices)
    assert bag.tally.num_refused == 1 and devices[2].id not in bag.tally.up_bytes
    assert torch.equal(bag.result(), product_of(product))


@pytest.mark.parametrize("reply", [{}, {"d": torch.zeros(4, 4)}, {"c": torch.zeros(4, 4), "d": torch.zeros(1)}])
def test_a_reply_is_one_tensor(reply: dict[str, Tensor]) -> None:
    devices = fleet(1e6)
    bag = bag_of(whole_numbers(4, 4, 4), devices)
    ((worker, piece),) = bag.issue((devices[0].info,), 0.0)
    with pytest.raises(InvalidUpdate, match="must be one tensor, c"):
        bag.take(worker, piece, reply, 0.1)


def test_what_fails_everywhere_ends_the_round_with_its_reason() -> None:
    devices = fleet(1e6, 1e6, 1e6, 1e6, 1e6, fails=1.0)
    bag = TileBag(whole_numbers(8, 8, 8), [(devices[0].id, Box(0, 8, 0, 8, 0, 8))], terms=terms(), times=TileTimes())
    with pytest.raises(RoundFailed, match=r"failed 4 times and 4 are allowed; the last time: d\d ran out of memory"):
        play(bag, devices)


def test_nobody_left_ends_the_round_or_leaves_the_rest_to_the_head() -> None:
    product = whole_numbers(16, 16, 64)
    for head in (Head(), able_head):
        devices = fleet(1e5, 1e5)
        devices[0].leaves_at = devices[1].leaves_at = 0.1
        bag = bag_of(product, devices, terms(head=head), num_each=4, num_in_flight=1)
        if head is able_head:
            assert play(bag, devices) <= 0.1
            assert torch.equal(bag.result(), product_of(product))
            assert bag.tally.num_by_head > 0
        else:
            with pytest.raises(
                RoundFailed,
                match=r"no device is left that can compute [1-8] tiles of forward 16 x 16 x 64 of h.0, 0 are here",
            ):
                play(bag, devices)


def test_the_head_takes_the_tail_where_that_is_quicker() -> None:
    product, devices = whole_numbers(64, 64, 64), fleet(1e6, 1e6)
    devices[1].hangs_at = 0.0
    bag = bag_of(product, devices, terms(head=Head(s_per_flop=4e-7)))
    assert play(bag, devices) < 1.0  # 2 tiles of 0.3 s
    assert torch.equal(bag.result(), product_of(product))
    assert bag.tally.num_by_head == 1 and bag.tally.num_reissued == 0


def test_the_head_takes_the_last_tile_of_a_slow_device_without_waiting_for_it_to_be_late() -> None:
    product, devices = whole_numbers(64, 64, 64), fleet(1e6, 1e5)
    placed = [(devices[0].id, Box(0, 16, 0, 64, 0, 64)), (devices[1].id, Box(16, 64, 0, 64, 0, 64))]
    devices[0].memory = 4 * (16 * 64 + 64 * 64 + 16 * 64)  # so that it can take no copy
    bag = TileBag(product, placed, terms=terms(head=Head(s_per_flop=4.5e-6)), times=TileTimes())
    assert play(bag, devices) < 0.2  # 0.16 s and 4 s; the head takes 1.8 s for the second and 2.4 s for both
    assert torch.equal(bag.result(), product_of(product))
    assert bag.tally.num_by_head == 1 and bag.tally.num_late == 0


def test_the_head_waits_for_a_copy_that_is_sooner_done() -> None:
    product, devices = whole_numbers(64, 64, 64), fleet(1e6, 1e5)
    placed = [(devices[0].id, Box(0, 32, 0, 64, 0, 64)), (devices[1].id, Box(32, 64, 0, 64, 0, 64))]
    bag = TileBag(product, placed, terms=terms(head=Head(s_per_flop=3e-6)), times=TileTimes())
    play(bag, devices)
    assert bag.tally.num_copies == 1 and torch.equal(bag.result(), product_of(product))
    assert bag.tally.num_by_head == 0


def test_a_late_device_is_given_nothing_until_it_answers() -> None:
    product, devices = whole_numbers(64, 64, 96), fleet(1e6, 1e6, 1e6)
    devices[1].hangs_at = 0.0
    bag = bag_of(product, devices, num_each=6, num_in_flight=2)
    play(bag, devices)
    tile_bytes = 4 * (2 * 11 + 32) * 64  # two strips of 32 columns, which they share
    assert bag.tally.down_bytes[devices[1].id] <= tile_bytes
    assert torch.equal(bag.result(), product_of(product))


def test_who_is_gone_holds_nothing_when_it_comes_back() -> None:
    product, devices, holdings = whole_numbers(16, 16, 16), fleet(1e6, 1e6), Holdings()
    bag = TileBag(product, strips(product, devices), terms=terms(), times=TileTimes(), holdings=holdings)
    here = tuple(d.info for d in devices)
    bag.issue(here, 0.0)
    assert holdings.holds(devices[0].id, "x[0:16,0:16]") and holdings.holds(devices[1].id, "x[0:16,0:16]")
    bag.issue(here[1:], 0.1)
    assert not holdings.holds(devices[0].id, "x[0:16,0:16]") and holdings.holds(devices[1].id, "x[0:16,0:16]")


def test_late_devices_are_better_than_nobody() -> None:
    product, devices, times = whole_numbers(16, 16, 16), fleet(1e6, 1e6), TileTimes()
    for d in devices:
        times.fell_silent(d.id, 100.0, 0.0)
    bag = TileBag(product, strips(product, devices), terms=terms(), times=times)
    assert play(bag, devices, begin=1.0) < 1.0
    assert torch.equal(bag.result(), product_of(product))


def test_a_joiner_is_used_at_once() -> None:
    product, slow = whole_numbers(32, 64, 256), fleet(1e5)
    alone_s = play(bag_of(product, slow, num_each=16), fleet(1e5))
    devices = [*fleet(1e5), Played(WorkerId("new"), flops=1e6, joins_at=1.0)]
    bag = bag_of(product, devices[:1], num_each=16)
    took_s = play(bag, devices)
    assert took_s < 1.0 + 0.2 * alone_s
    assert bag.tally.up_bytes[WorkerId("new")] > 4 * 32 * 128
    assert bag.tally.num_reissued <= 2  # it takes what waits; only what is in flight is done twice


def test_near_the_end_the_slowest_tile_has_a_copy_and_the_first_reply_wins() -> None:
    product, devices = whole_numbers(32, 64, 64), fleet(1e6, 1e5)
    placed = [(devices[0].id, Box(0, 16, 0, 64, 0, 64)), (devices[1].id, Box(16, 32, 0, 64, 0, 64))]
    bag = TileBag(product, placed, terms=terms(), times=TileTimes())
    took_s = play(bag, devices)
    assert bag.tally.num_copies == 1 and bag.tally.num_late == 0
    assert took_s < 0.5 * (2 * 16 * 64 * 64 / 1e5)
    assert torch.equal(bag.result(), product_of(product))


def test_a_late_reply_for_a_tile_that_was_cut_anew_counts_if_it_is_first() -> None:
    product, devices = whole_numbers(64, 64, 192), fleet(1e6, 1e6, 1e6)
    bag = bag_of(product, devices)
    here = tuple(d.info for d in devices)
    sent = dict(bag.issue(here, 0.0))
    late = sent.pop(devices[0].id)
    for id, piece in sent.items():
        bag.take(id, piece, answer(piece), 0.6)
    parts = bag.issue(here, bag.look_at())
    assert [id for id, _ in parts] == ["d1", "d2"] and not bag.dropped()
    bag.take(*parts[0], answer(parts[0][1]), 5.0)
    assert not bag.is_done
    bag.take(devices[0].id, late, answer(late), 5.1)
    assert bag.is_done and parts[1][1] in bag.dropped() and not bag.dropped()
    assert torch.equal(bag.result(), product_of(product))


def test_a_late_reply_may_come_while_the_last_part_is_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    product, devices = whole_numbers(64, 64, 192), fleet(1e6, 1e6, 1e6)
    bag = bag_of(product, devices)
    here = tuple(d.info for d in devices)
    sent = dict(bag.issue(here, 0.0))
    late = sent.pop(devices[0].id)
    for id, piece in sent.items():
        bag.take(id, piece, answer(piece), 0.6)
    parts = bag.issue(here, bag.look_at())
    put = Assembly.put

    def put_and_meet_another_thread(assembly: Assembly, box: Box, values: Tensor) -> None:
        put(assembly, box, values)
        if assembly.is_complete and assembly.whole != Box(0, 64, 0, 192, 0, 64):
            bag.take(devices[0].id, late, answer(late), 5.0)

    monkeypatch.setattr(Assembly, "put", put_and_meet_another_thread)
    for part in parts:
        bag.take(*part, answer(part[1]), 5.0)
    assert bag.is_done and torch.equal(bag.result(), product_of(product))


def test_it_is_not_done_before_the_last_tile_is_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    product, devices, put = whole_numbers(8, 8, 8), fleet(1e6), Assembly.put
    bag = bag_of(product, devices)
    were_done: list[bool] = []

    def put_and_look(assembly: Assembly, box: Box, values: Tensor) -> None:
        were_done.append(bag.is_done)
        put(assembly, box, values)

    monkeypatch.setattr(Assembly, "put", put_and_look)
    play(bag, devices)
    assert were_done == [False] and bag.is_done


def test_replies_may_be_taken_in_many_threads() -> None:
    product, devices = whole_numbers(128, 64, 128), fleet(*[1e6] * 8)
    bag = bag_of(product, devices, num_each=8, num_slabs=2, num_in_flight=4)
    here = tuple(d.info for d in devices)
    with ThreadPoolExecutor(4) as pool:
        while not bag.is_done:
            sent = bag.issue(here, 0.0)
            assert sent or not bag.is_done
            list(pool.map(lambda each: bag.take(*each, answer(each[1]), 0.01), [*sent, *sent]))
    assert torch.equal(bag.result(), product_of(product))


def test_nothing_is_asked_of_a_clock_that_has_nothing_to_wait_for() -> None:
    devices = fleet(1e6)
    bag = bag_of(whole_numbers(8, 8, 8), devices)
    assert bag.look_at() == math.inf
    bag.issue((devices[0].info,), 3.0)
    assert 3.0 < bag.look_at() < 4.0
