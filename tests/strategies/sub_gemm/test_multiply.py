"""The multiplier of a run, with devices that are played."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from sub_gemm_played import Played, check_exactly, play, whole_numbers

from potluck.planner.tiles.device import Head
from potluck.strategies.bag import Bag, Operand
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.multiply import SpreadConfig, SpreadMultiplier
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId


@dataclass
class PlayedDesk:
    devices: Sequence[Played]
    at: float = 0.0
    bags: list[Bag] = field(default_factory=list[Bag])
    blamed: list[str] = field(default_factory=list[str])

    def workers(self) -> Sequence[WorkerInfo]:
        return tuple(d.info for d in self.devices if d.is_here(self.at))

    def wait(self) -> None:
        pass

    def now(self) -> float:
        return self.at

    def blame(self, worker: WorkerId, reason: str) -> None:
        self.blamed.append(reason)

    def new_step(self, multiply: SpreadMultiplier) -> None:
        for d in self.devices:
            d.kept.clear()
        multiply.begin_step(self)

    def spread(self, bag: Bag) -> None:
        for d in self.devices:
            d.flying, d.stages = {}, (0.0, 0.0, 0.0)
        self.bags.append(bag)
        self.at += play(bag, self.devices, len(self.bags), begin=self.at)


def fleet(*flops: float, **each: float) -> list[Played]:
    return [Played(WorkerId(f"d{i}"), flops=f, **each) for i, f in enumerate(flops)]  # pyright: ignore[reportArgumentType]


def multiplier(config: SpreadConfig | None = None, head: Head | None = None, exact: bool = True) -> SpreadMultiplier:
    config = config or SpreadConfig(least_side=8)
    return SpreadMultiplier(config, head=head or Head(), secret="s", check=check_exactly if exact else None)


@pytest.mark.parametrize("kind", ["forward", "input_gradient", "weight_gradient", "attention"])
@pytest.mark.parametrize("flops", [(1e7,), (1e7, 3e7, 1e8)])
def test_products_are_those_of_the_plain_matrices(kind: str, flops: tuple[float, ...]) -> None:
    desk, multiply = PlayedDesk(fleet(*flops)), multiplier()
    multiply.begin_step(desk)
    product = whole_numbers(96, 128, 80)
    product = Product(product.a, Matrix(product.b.values, "w", is_weight="gradient" not in kind), kind, "h.0")  # pyright: ignore[reportArgumentType]
    assert torch.equal(multiply(product), product.a.values @ product.b.values)
    assert multiply.log.metrics()["num_products_offloaded"] == 1


def products(step: int) -> list[Product]:
    shapes = [(256, 64, 192), (64, 256, 192), (192, 256, 64)]
    made = [whole_numbers(*shape, seed=step) for shape in shapes]
    return [
        Product(Matrix(each.a.values, f"x{i}"), Matrix(each.b.values, f"w{i}", is_weight=True), "forward", "h")
        for i, each in enumerate(made)
    ]


@pytest.mark.parametrize("optimism", [1.0, 4.0, 0.25])
def test_predictions_come_to_be_true(optimism: float) -> None:
    desk, multiply = PlayedDesk(fleet(1e7, 3e7, 1e8, 2e7, optimism=optimism)), multiplier()
    ratios: list[float] = []
    for step in range(6):
        desk.new_step(multiply)
        for product in products(step):
            multiply(product)
        ratios.append(multiply.log.metrics()["predicted_over_observed"])
    assert abs(ratios[0] - 1) < 0.01 if optimism == 1 else abs(ratios[0] - 1) > 0.15
    assert abs(ratios[-1] - 1) < 0.1


def test_a_weight_is_sent_once_in_a_step_and_its_plan_made_once() -> None:
    config = SpreadConfig(num_micro_batches=4, least_side=8)
    desk, multiply = PlayedDesk(fleet(1e8, 1e8, 1e8)), multiplier(config)
    weight = whole_numbers(8, 256, 192).b.values
    plans: list[int] = []
    for _ in range(3):
        desk.new_step(multiply)
        sent: list[int] = []
        for micro_batch in range(4):
            before = sum(multiply.log.tally.down_bytes.values())
            x = whole_numbers(48, 256, 8, seed=micro_batch).a.values
            product = Product(Matrix(x, f"{micro_batch}/x"), Matrix(weight, "w", is_weight=True), "forward", "h.0")
            assert torch.equal(multiply(product), x @ weight)
            sent.append(sum(multiply.log.tally.down_bytes.values()) - before)
        assert sent[0] - sent[1] == weight.nbytes  # each device has its own columns
        assert sent[1] == sent[2] == sent[3]
        plans.append(multiply.log.num_plans)
    assert plans == [1, 1, 0]  # when it first came, when it was known what a step asks for, and then no more


def test_a_transposed_weight_has_the_shards_of_the_weight() -> None:
    desk, multiply = PlayedDesk(fleet(1e8)), multiplier(SpreadConfig(num_tiles=1, least_side=8, num_micro_batches=2))
    desk.new_step(multiply)
    weight = whole_numbers(8, 64, 48).b.values
    x, grad = whole_numbers(16, 64, 8).a.values, whole_numbers(16, 48, 8).a.values
    multiply(Product(Matrix(x, "x"), Matrix(weight, "w", is_weight=True), "forward"))
    before = sum(multiply.log.tally.down_bytes.values())
    gradient = multiply(Product(Matrix(grad, "dy"), Matrix(weight.T, "w.T", is_weight=True), "input_gradient"))
    assert torch.equal(gradient, grad @ weight.T)
    assert sum(multiply.log.tally.down_bytes.values()) - before == grad.nbytes


def test_within_a_step_a_lost_device_changes_no_plan_and_at_the_next_it_does() -> None:
    config = SpreadConfig(num_micro_batches=2, least_side=8)
    devices = fleet(1e8, 1e8, 1e8, 1e8, 1e8)
    devices[4].leaves_at = 1e-3
    desk, multiply = PlayedDesk(devices), multiplier(config)
    desk.new_step(multiply)
    for product in (products(0)[0], products(1)[0]):
        assert torch.equal(multiply(product), product.a.values @ product.b.values)
    assert multiply.log.num_plans == 1 and multiply.log.tally.num_reissued > 0
    desk.new_step(multiply)
    multiply(products(2)[0])
    assert multiply.log.num_plans == 1 and multiply.log.tally.num_reissued == 0


def test_a_device_that_hangs_costs_only_a_few_products_until_it_is_lost() -> None:
    devices = fleet(1e8, 1e8, 1e8)
    devices[2].hangs_at = 0.0
    desk, multiply = PlayedDesk(devices), multiplier()
    desk.new_step(multiply)
    for i in range(40):
        product = whole_numbers(64, 64, 96, seed=i)
        multiply(Product(Matrix(product.a.values, f"{i}/x"), Matrix(product.b.values, f"{i}/dy"), "weight_gradient"))
    assert 0 < multiply.log.tally.num_late < 8
    assert desk.at > 1.0


def test_a_small_product_is_the_heads_and_its_speed_is_learnt() -> None:
    desk = PlayedDesk(fleet(1e8))
    multiply = multiplier(head=Head(s_per_flop=1e-9))
    desk.new_step(multiply)
    product = whole_numbers(8, 8, 8)
    assert torch.equal(multiply(product), product.a.values @ product.b.values)
    metrics = multiply.log.metrics()
    assert metrics["num_products_native"] == 1 and metrics["num_products_offloaded"] == 0
    assert metrics["tiles_issued"] == 0


def test_a_fleet_that_fails_and_a_head_that_computes() -> None:
    devices = fleet(1e8, 1e8, lies=1.0)
    desk, multiply = PlayedDesk(devices), multiplier(head=Head(s_per_flop=1e-6))
    desk.new_step(multiply)
    product = products(0)[0]
    assert torch.equal(multiply(product), product.a.values @ product.b.values)
    tally = multiply.log.tally
    assert tally.num_refused == 6 and tally.num_by_head > 0 and not tally.up_bytes


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_the_wires_type_is_what_travels_and_what_is_checked(wire: str) -> None:
    desk, multiply = PlayedDesk(fleet(1e8, 3e7)), multiplier(SpreadConfig(wire=wire, least_side=8), exact=False)
    desk.new_step(multiply)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(96, 64, generator=generator), torch.randn(64, 80, generator=generator)
    c = multiply(Product(Matrix(a, "x"), Matrix(b, "w", is_weight=True), "forward"))
    error = float((c - a @ b).square().mean().sqrt() / (a @ b).square().mean().sqrt())
    assert c.dtype == torch.float32 and error < {"fp32": 1e-6, "bf16": 5e-3, "int8": 2e-2}[wire]
    assert error > {"fp32": -1.0, "bf16": 1e-3, "int8": 1e-3}[wire]
    assert multiply.log.tally.num_refused == 0


def test_no_device_and_no_head_ends_the_round() -> None:
    multiply = multiplier()
    multiply.begin_step(PlayedDesk([]))
    with pytest.raises(RoundFailed, match="there is no device"):
        multiply(whole_numbers(4, 4, 4))


def test_a_product_that_no_plan_fits_is_cut_to_the_memory_of_the_only_device() -> None:
    desk, multiply = PlayedDesk(fleet(1e8, memory=40_000)), multiplier(SpreadConfig(least_side=64))
    multiply.begin_step(desk)
    product = whole_numbers(512, 128, 1024)
    assert torch.equal(multiply(product), product.a.values @ product.b.values)
    assert multiply.log.tally.num_by_head == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_without_kept_weights_each_micro_batch_is_sent_them_again(keeps: bool) -> None:
    config = SpreadConfig(least_side=8, num_micro_batches=2, may_keep_weights=keeps, may_split_inner=False)
    desk, multiply = PlayedDesk(fleet(1e8)), multiplier(config)
    multiply.begin_step(desk)
    made = whole_numbers(32, 64, 128)
    sent: list[int] = []
    for index in range(2):
        multiply(Product(Matrix(made.a.values, f"{index}/x"), made.b, "forward", "h.0"))
        sent.append(sum(multiply.log.tally.down_bytes.values()))
    first, second = sent[0], sent[1] - sent[0]
    assert first - second == (made.b.values.nbytes if keeps else 0)


def test_a_joiner_with_an_unknown_link_gets_tiles_beside_quick_ones() -> None:
    """Whether it is met before the others were measured, or after."""
    for is_first in (True, False):
        devices = fleet(1e8, 1e8, 1e8, down=1e9, up=1e9)
        devices[2].is_measured = False
        desk, multiply = PlayedDesk(devices), multiplier()
        if is_first:
            devices[0].is_measured = devices[1].is_measured = False
        for _ in range(2):
            multiply.begin_step(desk)
            multiply(whole_numbers(256, 64, 192))
            devices[0].is_measured = devices[1].is_measured = True
        assert multiply.log.tally.up_bytes[devices[2].id] > 256 * 192 * 4 / 5


def test_weights_of_a_whole_step_share_the_memory_that_devices_have() -> None:
    config = SpreadConfig(least_side=8, num_micro_batches=3, may_split_inner=False)
    weights = [whole_numbers(8, 64, 128, seed=i).b.values for i in range(8)]
    memory = 3 * weights[0].nbytes
    desk, multiply = PlayedDesk(fleet(1e8, 1e8, memory=memory)), multiplier(config)
    for step in range(3):
        desk.new_step(multiply)
        again: list[set[int]] = []
        for micro_batch in range(config.num_micro_batches):
            sent: set[int] = set()
            for i, weight in enumerate(weights):
                before = sum(multiply.log.tally.down_bytes.values())
                x = Matrix(whole_numbers(16, 64, 8, seed=micro_batch).a.values, f"{micro_batch}/x{i}")
                result = multiply(Product(x, Matrix(weight, f"w{i}", is_weight=True), "forward", f"h.{i}"))
                assert torch.equal(result, x.values @ weight)
                if sum(multiply.log.tally.down_bytes.values()) - before >= weight.nbytes:
                    sent.add(i)
            again.append(sent)
        for device in desk.devices:
            kept = {name: bytes_of(name) for name in device.kept if Operand.stays(name)}
            assert memory / 8 < sum(kept.values()) <= memory / 2, f"{device.id} in step {step}"
        assert again[0] == set(range(8)) and again[1] == again[2] and 0 < len(again[1]) < 8


def bytes_of(name: str) -> int:
    """Of a shard in fp32, by the ranges in its name."""
    row0, row1, col0, col1 = map(int, re.findall(r"\d+", name.rpartition("[")[2]))
    return 4 * (row1 - row0) * (col1 - col0)
