"""Zeroth order across rounds that a worker missed: it replays them, and has the coordinator's parameters to the bit."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from potluck.aggregation.config import AggregationConfig
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.contract.checks import cost_s
from potluck.fleet.config import FleetConfig
from potluck.models.config import AdapterConfig
from potluck.optim.inner import InnerConfig
from potluck.optim.zeroth_order import rebuild
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies import zeroth_order
from potluck.strategies.fleet import Replies, Reply, WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.strategies.task import BoundTask
from potluck.strategies.zeroth_order import ZerothOrder, ZerothOrderConfig, ZerothOrderState, packed
from potluck.transport.memory import Link
from potluck.types.errors import RecipeError, RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Fragment, Params
from potluck.types.profile import DeviceProfile
from potluck.worker.replica import KEPT

names = ("w1", "w2", "w3")
plain = InnerConfig(optimizer="sgd", weight_decay=0.0, lr=1e-3, batch_size=4, warmup=0.0)


def problem_of(num_rounds: int = 12, **changes: Any) -> Problem:
    fleet = FleetConfig(min_workers=2, reconnect_s=1.0, no_progress_s=60.0)
    return Problem(num_rounds=num_rounds, inner=plain, fleet=fleet, **changes)


def play(
    problem: Problem, folder: Path, config: ZerothOrderConfig, *, away_s: float = 0.0
) -> tuple[World, ZerothOrderState]:  # fmt: skip
    """w2 dies in the fourth round, with the disk as it is, and is back so much later."""

    async def main() -> tuple[World, ZerothOrderState]:
        strategy = ZerothOrder(config)
        world = World(
            problem.plan(strategy), problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor
        )
        for name in names:
            world.add(name, cost_s=cost_s, link=Link(rtt_s=0.02))
        if away_s:
            world.later(4.0, lambda: world.kill_for("w2", away_s))
        await world.start()
        state = await world.finish()
        assert isinstance(state, ZerothOrderState)
        return world, state

    return run_virtual(main())


def thetas(world: World, state: ZerothOrderState, strategy: ZerothOrder, name: str) -> list[Tensor]:
    """What each state on a worker's disk becomes by the rounds after it."""
    assert world.last is not None
    found: list[Tensor] = []
    for path in world.disk(name).glob("runs/*/local/*.safetensors"):
        with safe_open(path, "pt") as file:
            theta = file.get_tensor(f"{KEPT}theta")
        found.append(theta)
        last = zeroth_order.Round.from_json(state.history[-1])
        found += zeroth_order.take(theta.clone(), steps=last.steps(strategy.seeds(world.last.facts, last.number)))
    return found


def present(world: World) -> list[list[str]]:
    return [e.detail["workers"] for e in world.events if e.kind == "round"]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_who_was_away_replays_what_it_missed(tmp_path: Path) -> None:
    config = ZerothOrderConfig(num_perturbations=3)
    world, state = play(problem_of(), tmp_path, config, away_s=5.0)
    assert [names[1] in workers for workers in present(world)] == [True] * 3 + [False] * 5 + [True] * 4
    assert state.held == dict.fromkeys(names, 11) and len(state.history) == 12
    assert world.last is not None
    params = world.last.params.read(state.params)
    assert (params - world.last.params.read(state.initial)).abs().max() > 1e-3
    for name in names:
        assert any(same(theta, params) for theta in thetas(world, state, ZerothOrder(config), name)), name
    sent = world.object_bytes_down["w2"] - world.object_bytes_down["w1"]
    assert abs(sent) < len(params)  # nobody was given the parameters a second time


@pytest.mark.parametrize("pool_size", [0, 8])
def test_who_missed_more_than_is_remembered_is_given_the_parameters(tmp_path: Path, pool_size: int) -> None:
    """With a pool the run's first ones, and a sum for each seed: then they are the others' to fp32 tolerance."""
    config = ZerothOrderConfig(num_perturbations=3, history_rounds=2, pool_size=pool_size)
    world, state = play(problem_of(), tmp_path, config, away_s=5.0)
    assert [names[1] in workers for workers in present(world)] == [True] * 3 + [False] * 5 + [True] * 4
    assert len(state.history) == 2 and world.last is not None
    params = world.last.params.read(state.params)
    for name in names:
        found = thetas(world, state, ZerothOrder(config), name)
        if pool_size and name == "w2":
            assert min(float((theta - params).abs().max()) for theta in found) < 1e-6
        else:
            assert any(same(theta, params) for theta in found), name


def test_the_pool_knows_the_parameters(tmp_path: Path) -> None:
    config = ZerothOrderConfig(num_perturbations=3, pool_size=8, num_local_steps=2)
    world, state = play(problem_of(), tmp_path, config)
    assert world.last is not None
    facts, strategy = world.last.facts, ZerothOrder(config)
    (theta,) = rebuild(world.last.params.read(state.initial), pool=strategy.pool(state, facts))
    assert (theta - world.last.params.read(state.params)).abs().max() < 1e-6


def reply(name: str, slopes: object) -> Reply:
    return Reply(worker=WorkerId(name), key="inner", scalars={"num_tokens": 10, "loss_sum": 1.0, "slopes": slopes})


@pytest.mark.parametrize(
    "bad", [None, "", "no base64", packed([1.0]), packed([1.0, math.nan]), packed([1.0, math.inf])]
)
def test_slopes_that_cannot_be_used_are_left_out(bad: object) -> None:
    strategy, facts = ZerothOrder(ZerothOrderConfig(num_perturbations=2)), facts_of(problem_of())
    got = Replies(replies=(reply("w1", packed([1.0, 2.0])), reply("w2", bad), reply("w3", packed([3.0, 6.0]))))
    kept, slopes = strategy.joined(got, facts, num_steps=1, num_needed=2)
    assert [r.worker for r in kept.replies] == ["w1", "w3"] and slopes == (2.0, 4.0)
    with pytest.raises(RoundFailed, match="2 workers sent slopes that can be used and 3 must; w2: "):
        strategy.joined(got, facts, num_steps=1, num_needed=3)


def test_who_sent_slopes_of_no_use_goes_on_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has replayed what it had missed all the same."""
    joined, rounds = ZerothOrder.joined, count()

    def spoilt(self: ZerothOrder, got: Replies, run: RunFacts, num_steps: int, *, num_needed: int) -> Any:
        if next(rounds) == 2:
            bad = {"slopes": "no base64"}
            sent = (replace(r, scalars={**r.scalars, **bad}) if r.worker == "w2" else r for r in got.replies)
            got = Replies(replies=tuple(sent))
        return joined(self, got, run, num_steps, num_needed=num_needed)

    monkeypatch.setattr(ZerothOrder, "joined", spoilt)
    config = ZerothOrderConfig(num_perturbations=3)
    world, state = play(problem_of(6), tmp_path, config)
    assert state.held == dict.fromkeys(names, 5) and world.last is not None
    params = world.last.params.read(state.params)
    for name in names:
        assert any(same(theta, params) for theta in thetas(world, state, ZerothOrder(config), name)), name


class Steep:
    """A fleet of one worker, whose slope is as large as fp32 has it."""

    def __init__(self, run: RunFacts) -> None:
        self.run = run

    def workers(self) -> tuple[WorkerInfo, ...]:
        return (WorkerInfo(id=WorkerId("w1"), profile=DeviceProfile(device="cpu")),)

    async def call(self, tasks: dict[WorkerId, BoundTask], *, key: str, min_replies: int) -> Replies:
        return Replies(replies=tuple(reply(worker, packed([3e38])) for worker in tasks))


def test_slopes_that_no_step_can_be_taken_by_cost_the_round_and_not_the_run() -> None:
    problem = problem_of()
    problem.inner = plain.model_copy(update={"lr": 1e3, "schedule": "constant"})
    facts, strategy = facts_of(problem), ZerothOrder(ZerothOrderConfig(num_perturbations=1))
    with pytest.raises(RoundFailed, match=r"no step can be taken: .* beyond fp32"):
        asyncio.run(strategy.run_round(strategy.init(facts), Steep(facts)))  # pyright: ignore[reportArgumentType]


def test_a_pool_whose_sums_would_overflow_costs_the_round_and_not_the_run() -> None:
    problem = problem_of()
    problem.inner = plain.model_copy(update={"lr": 1.0, "schedule": "constant"})
    facts, strategy = facts_of(problem), ZerothOrder(ZerothOrderConfig(num_perturbations=1, pool_size=1))
    state = replace(strategy.init(facts), sums=packed([3e38], "<f8"))
    with pytest.raises(RoundFailed, match=r"no step can be taken: the pool has the scalar 6\.\d+e\+38"):
        asyncio.run(strategy.run_round(state, Steep(facts)))  # pyright: ignore[reportArgumentType]


def test_rules_work_on_each_slope_and_slopes_are_clipped() -> None:
    sent = Replies(replies=tuple(reply(f"w{i}", packed([v])) for i, v in enumerate((1.0, 2.0, 3.0, 90.0, -50.0))))
    for rule, limit, expected in (
        ("mean", 0.0, 9.2),
        ("median", 0.0, 2.0),
        ("trimmed_mean", 0.0, 2.0),
        ("mean", 4.0, 1.2),
    ):
        strategy = ZerothOrder(ZerothOrderConfig(num_perturbations=1, max_slope=limit))
        facts = facts_of(problem_of(aggregation=AggregationConfig.model_validate({"rule": rule, "trim_fraction": 0.2})))
        assert strategy.joined(sent, facts, num_steps=1, num_needed=5)[1] == (pytest.approx(expected),)


def facts_of(problem: Problem, **changes: Any) -> RunFacts:
    plan = replace(problem.plan(ZerothOrder(ZerothOrderConfig())), **changes)
    nowhere = Params((Fragment("nowhere", plan.layout.numel),))
    return plan.facts(initial=nowhere, zeros=nowhere)


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"down_codec": "bf16"}, {}, "codec.down is 'bf16': set it to 'fp32'"),
        ({"aggregation": AggregationConfig(rule="geometric_median")}, {}, "joins slopes by mean, median, trimmed_mean"),
        ({"fleet": FleetConfig(balance="time")}, {}, "as many steps"),
        ({}, {"pool_size": 5}, "pool_size is 5 and a step takes 10 seeds"),
        ({}, {"num_perturbations": 1024, "num_local_steps": 9}, "is 9216 and a worker may send 8192 slopes a round"),
        ({}, {"num_perturbations": 1000, "history_rounds": 1049}, "set strategy.history_rounds to 1048 or less"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], config: dict[str, Any], reason: str) -> None:
    facts = facts_of(problem_of(), **changes)
    with pytest.raises(RecipeError, match=reason):
        ZerothOrder(ZerothOrderConfig(**config)).init(facts)


def test_other_optimizers_are_refused() -> None:
    problem = problem_of()
    problem.inner = InnerConfig()
    with pytest.raises(RecipeError, match=r"set strategy\.inner\.optimizer to 'sgd'"):
        ZerothOrder(ZerothOrderConfig()).init(facts_of(problem))


def test_the_loss_falls(tmp_path: Path) -> None:
    problem = problem_of(12)
    problem.inner = plain.model_copy(update={"lr": 0.1, "batch_size": 16, "schedule": "constant"})
    world, _ = play(problem, tmp_path, ZerothOrderConfig(num_perturbations=16))
    assert world.last is not None
    assert world.last.losses[12] < world.last.losses[0] - 0.05


@pytest.mark.parametrize(("history_rounds", "pool_size"), [(256, 0), (2, 8)])
def test_with_adapters_nobody_is_sent_any_parameters(tmp_path: Path, history_rounds: int, pool_size: int) -> None:
    """Not even who missed more than is remembered, where a pool tells it."""
    adapter = AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))
    problem = problem_of(family="llama", adapter=adapter, base="fp32")
    config = ZerothOrderConfig(num_perturbations=3, history_rounds=history_rounds, pool_size=pool_size)
    world, state = play(problem, tmp_path, config, away_s=5.0)
    assert [names[1] in workers for workers in present(world)] == [True] * 3 + [False] * 5 + [True] * 4
    assert world.last is not None
    params = world.last.params.read(state.params)
    assert (params - world.last.params.read(state.initial)).abs().max() > 1e-4
    for name in names:
        found = thetas(world, state, ZerothOrder(config), name)
        assert min(float((theta - params).abs().max()) for theta in found) < 1e-6
    assert {world.object_bytes_down.get(name, 0) for name in names} == {0}
    assert {world.object_bytes_up.get(name, 0) for name in names} == {0}


class Losing:
    """A fleet of two, of whom w2 is lost in its first task."""

    def __init__(self, run: RunFacts) -> None:
        self.run, self.asked = run, list[dict[str, int]]()

    def workers(self) -> tuple[WorkerInfo, ...]:
        names = ("w1", "w2") if not self.asked else ("w1",)
        profile = DeviceProfile(device="cpu", device_name="", platform="", num_threads=1, total_memory_bytes=1)
        return tuple(WorkerInfo(id=WorkerId(name), profile=profile) for name in names)

    async def call(self, tasks: dict[WorkerId, BoundTask], *, key: str, min_replies: int) -> Replies:
        assert key == f"validation-{len(self.asked)}" and min_replies == 1
        self.asked.append({worker: task.held_out_part for worker, task in tasks.items()})
        scalars = {"num_tokens": 10, "loss_sum": 20.0}
        return Replies(replies=(Reply(worker=WorkerId("w1"), key=key, scalars=scalars),))


@pytest.mark.parametrize(
    ("num_parts", "asked", "num_tokens"),
    [(3, [{"w1": 0, "w2": 1}, {"w1": 1}, {"w1": 2}], 30), (0, [{"w1": 0, "w2": 0}], 10)],
)
def test_a_part_of_the_validation_data_whose_worker_was_lost_is_done_by_another(
    num_parts: int, asked: list[dict[str, int]], num_tokens: int
) -> None:
    facts = facts_of(problem_of())
    strategy, fleet = ZerothOrder(ZerothOrderConfig()), Losing(facts)
    loss = asyncio.run(strategy.validate(strategy.init(facts), fleet, num_parts=num_parts))  # pyright: ignore[reportArgumentType]
    assert fleet.asked == asked
    assert (loss.num_tokens, loss.loss_sum) == (num_tokens, 2.0 * num_tokens)
