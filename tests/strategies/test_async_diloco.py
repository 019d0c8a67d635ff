"""Asynchronous DiLoCo against a plain loop over scripted arrivals, and the weights and steps it gives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.aggregation.config import AggregationConfig
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.planner.balance import Pace
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig, AsyncDiLoCoState, dynamic_steps
from potluck.strategies.fleet import Reduction, Reply, WorkerInfo
from potluck.strategies.run import Budget, RunFacts
from potluck.strategies.task import BoundTask
from potluck.types.errors import RecipeError, RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Fragment, Layout, Params
from potluck.types.profile import DeviceProfile

layout = Layout.of([("w", (7, 3)), ("b", (4,))])
Arrival = tuple[str, int, int]
"""worker, the round in which its work began, the seed of its update"""


def vector(seed: int) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def worker(name: str, unit_s: float | None = None) -> WorkerInfo:
    pace = None if unit_s is None else Pace(unit_s=unit_s)
    return WorkerInfo(id=WorkerId(name), profile=DeviceProfile(device="cpu"), pace=pace)


@dataclass
class Scripted:
    """A fleet whose replies are given; its vectors are tensors in memory."""

    facts: RunFacts
    values: dict[Params, Tensor]
    here: tuple[WorkerInfo, ...]
    arrivals: Sequence[Arrival] = ()
    asked: tuple[int, float | None, int | None] = (0, None, None)

    @property
    def run(self) -> RunFacts:
        return self.facts

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.here

    async def gather(
        self, offer: Callable[[WorkerInfo], BoundTask | None], *, key: str, min_replies: int, expects: Reduction,
        grace: float | None = None, max_staleness: int | None = None,
    ) -> tuple[Reply, ...]:  # fmt: skip
        self.asked = (min_replies, grace, max_staleness)
        return tuple(
            Reply(worker=WorkerId(w), key=f"{w}#{seed}", scalars={"num_tokens": 10, "loss_sum": 20.0}, round=began)
            for w, began, seed in self.arrivals
        )

    async def reduce(self, replies: Sequence[Reply], reduction: Reduction) -> Params:
        weights = [reduction.factor(r.worker, r.key) for r in replies]
        vectors = [vector(int(r.key.partition("#")[2])) for r in replies]
        return self.new(sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights))  # pyright: ignore

    async def apply(self, op: Any, *handles: Params, num_outputs: int = 1, **scalars: Any) -> tuple[Params, ...]:
        made = op(*(self.values[h].clone() for h in handles), layout=layout, offset=0, **scalars)
        return tuple(self.new(value) for value in made)

    def new(self, value: Tensor) -> Params:
        handle = Params((Fragment(f"v{len(self.values)}", value.numel()),))
        self.values[handle] = value
        return handle


def scripted(num_workers: int) -> Scripted:
    initial, zeros = Params((Fragment("initial", layout.numel),)), Params((Fragment("zeros", layout.numel),))
    facts = RunFacts(
        seed=1, layout=layout, initial=initial, zeros=zeros, seq_len=5, inner=InnerConfig(batch_size=2),
        budget=Budget(rounds=100), up_codec="fp32", down_codec="fp32",
    )  # fmt: skip
    values = {initial: vector(0), zeros: torch.zeros(layout.numel)}
    return Scripted(facts, values, tuple(worker(f"w{i + 1}") for i in range(num_workers)))


def play(config: AsyncDiLoCoConfig, commits: Sequence[Sequence[Arrival]], num_workers: int) -> tuple[Tensor, Scripted]:
    """The parameters after these commits."""
    fleet, strategy = scripted(num_workers), AsyncDiLoCo(config)
    state: AsyncDiLoCoState = strategy.init(fleet.run)
    for arrivals in commits:
        fleet.arrivals = arrivals
        state = asyncio.run(strategy.run_round(state, fleet))  # pyright: ignore[reportArgumentType]
    assert state.round == len(commits)
    assert state.tokens == 10 * sum(len(c) for c in commits) and state.loss == 2.0
    return fleet.values[state.params], fleet


def test_delayed_nesterov_one_update_at_a_time() -> None:
    """Three workers, seven arrivals, some stale: the description of the method as a plain loop."""
    arrivals = [("w1", 0, 1), ("w1", 1, 2), ("w2", 0, 3), ("w3", 0, 4), ("w1", 2, 5), ("w2", 3, 6), ("w1", 5, 7)]
    config = AsyncDiLoCoConfig(
        outer_lr=0.5, outer_momentum=0.8, staleness="polynomial", staleness_rate=0.5, momentum_spread=0.6
    )
    got, fleet = play(config, [[a] for a in arrivals], num_workers=3)
    assert fleet.asked == (1, None, 24)  # stale after eight updates of each of the three
    theta, momentum, gathered = vector(0), torch.zeros(layout.numel), torch.zeros(layout.numel)
    for version, (_, began, seed) in enumerate(arrivals):
        step = vector(seed) / math.sqrt(1 + version - began) / 3
        gathered = gathered + step
        if (version + 1) % 3:
            theta = theta - 0.5 * (step + 0.2 * 0.8 * momentum)
        else:
            momentum, gathered = 0.8 * momentum + gathered, torch.zeros(layout.numel)
            theta = theta - 0.5 * (step + (1 - 0.4) * 0.8 * momentum)
    torch.testing.assert_close(got, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_a_cycle_is_a_nesterov_step_with_the_mean_where_the_momentum_is_not_spread(spread: float) -> None:
    """Spread, the steps within a cycle take up the momentum of the cycle before."""
    arrivals = [("w1", 3 * (seed // 3), seed) for seed in range(9)]
    config = AsyncDiLoCoConfig(outer_momentum=0.8, momentum_spread=spread)
    got, _ = play(config, [[a] for a in arrivals], num_workers=3)
    theta = torch.nn.Parameter(vector(0))
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.8, nesterov=True)
    for cycle in range(3):
        theta.grad = torch.stack([vector(3 * cycle + i) for i in range(3)]).mean(dim=0)
        optimizer.step()
    assert torch.allclose(got, theta.detach(), rtol=1e-5, atol=1e-6) == (spread == 0.0)


def test_a_buffer_without_momentum_is_fedbuff() -> None:
    commits = [[("w1", 0, 1), ("w2", 0, 2)], [("w1", 1, 3), ("w3", 0, 4)], [("w1", 2, 5), ("w1", 2, 6)]]
    config = AsyncDiLoCoConfig(
        outer_lr=0.9, outer_momentum=0.0, updates_per_commit=2, momentum_every=2, staleness="polynomial"
    )
    got, fleet = play(config, commits, num_workers=3)
    assert fleet.asked == (2, None, 16)
    theta = vector(0)
    for version, commit in enumerate(commits):
        theta = theta - 0.9 / 2 * sum(vector(seed) / math.sqrt(1 + version - began) for _, began, seed in commit)  # pyright: ignore
    torch.testing.assert_close(got, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 4, 2, 3)], ids=["all reply", "some are late"])
def test_with_a_quorum_each_commit_is_a_nesterov_step_with_the_mean_of_those_who_replied(sizes: Sequence[int]) -> None:
    commits = [[(f"w{i + 1}", r, 10 * r + i) for i in range(size)] for r, size in enumerate(sizes)]
    got, fleet = play(AsyncDiLoCoConfig(quorum=0.5, grace=0.5, outer_momentum=0.9), commits, num_workers=4)
    assert fleet.asked == (2, 0.5, 8)
    theta = torch.nn.Parameter(vector(0))
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for commit in commits:
        theta.grad = torch.stack([vector(seed) for _, _, seed in commit]).mean(dim=0)
        optimizer.step()
    torch.testing.assert_close(got, theta.detach(), rtol=1e-5, atol=1e-6)


def test_a_cycle_is_of_whole_commits_so_that_the_momentum_takes_up_a_mean() -> None:
    """Two updates a commit and three workers: a cycle is four updates, each a quarter of it."""
    commits = [[("w1", r, 10 * r), ("w2", r, 10 * r + 1)] for r in range(6)]
    got, fleet = play(AsyncDiLoCoConfig(updates_per_commit=2, outer_momentum=0.8), commits, num_workers=3)
    assert fleet.asked == (2, None, 16)
    theta, momentum, gathered = vector(0), torch.zeros(layout.numel), torch.zeros(layout.numel)
    for number, commit in enumerate(commits):
        step = sum(vector(seed) for _, _, seed in commit) / 4
        gathered = gathered + step
        if number % 2 == 0:
            theta = theta - 0.7 * step
        else:
            momentum, gathered = 0.8 * momentum + gathered, torch.zeros(layout.numel)
            theta = theta - 0.7 * (step + 0.8 * momentum)
    torch.testing.assert_close(got, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("none", [1.0, 1.0, 1.0, 1.0]), ("polynomial", [1.0, 0.5, 1 / 3, 1 / 6]), ("hinge", [1.0, 1.0, 0.5, 0.2])],
)
def test_weights_fall_with_staleness(kind: Any, expected: list[float]) -> None:
    strategy = AsyncDiLoCo(AsyncDiLoCoConfig(staleness=kind, staleness_rate=1.0, staleness_free=1))
    assert [strategy.weight(tau) for tau in (0, 1, 2, 5)] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["polynomial", "hinge"])
def test_however_stale_an_update_has_a_weight(kind: Any) -> None:
    strategy = AsyncDiLoCo(AsyncDiLoCoConfig(staleness=kind, staleness_rate=1e306, staleness_free=1))
    assert strategy.weight(0) == 1.0 and 0.0 < strategy.weight(10**4) <= 1e-30


def test_commits_of_more_updates_than_workers_keep_to_the_budget() -> None:
    """Eight updates of two workers: what is left is dealt to eight, and the run ends with it."""
    fleet, granted = scripted(2), list[int]()
    fleet.facts = replace(fleet.facts, budget=Budget(tokens=fleet.facts.tokens_per_step(80)))

    async def gather(offer: Callable[[WorkerInfo], BoundTask | None], **_: Any) -> tuple[Reply, ...]:
        offered = [task for w in fleet.here if (task := offer(w)) is not None]
        granted.extend(task.num_sequences // 2 for task in offered)
        return (Reply(worker=WorkerId("w1"), key="w1#1", scalars={"num_tokens": 10, "loss_sum": 20.0}),)

    fleet.gather = gather
    strategy = AsyncDiLoCo(AsyncDiLoCoConfig(num_inner_steps=100, updates_per_commit=8))
    asyncio.run(strategy.run_round(strategy.init(fleet.run), fleet))  # pyright: ignore[reportArgumentType]
    assert granted == [10, 10]


def test_slower_workers_are_given_fewer_steps() -> None:
    assert [dynamic_steps(40, worker("x", s), 1.0) for s in (4.0, 2.0, 1.0)] == [10, 20, 40]
    assert dynamic_steps(40, worker("x", 3.0), 1.0) == 13
    assert dynamic_steps(40, worker("x", 1000.0), 1.0) == 1
    assert dynamic_steps(40, worker("x", 0.5), 1.0) == 40  # a newcomer that is faster than all
    assert dynamic_steps(40, worker("x"), 1.0) == 40


@pytest.mark.parametrize(("num_honest", "least_steps"), [(1, 5), (2, 10), (7, 10)])
def test_one_that_says_it_is_far_faster_leaves_steps_to_the_others(num_honest: int, least_steps: int) -> None:
    fleet, granted = scripted(0), dict[str, int]()
    fleet.here = (worker("liar", 1e-6), *(worker(f"w{i}", 4.0) for i in range(num_honest)))

    async def gather(offer: Callable[[WorkerInfo], BoundTask | None], **_: Any) -> tuple[Reply, ...]:
        offered = {w.id: offer(w) for w in fleet.here}
        granted.update({w: task.num_sequences // 2 for w, task in offered.items() if task is not None})
        return (Reply(worker=WorkerId("w0"), key="w0#1", scalars={"num_tokens": 10, "loss_sum": 20.0}),)

    fleet.gather = gather
    strategy = AsyncDiLoCo(AsyncDiLoCoConfig(num_inner_steps=80))
    asyncio.run(strategy.run_round(strategy.init(fleet.run), fleet))  # pyright: ignore[reportArgumentType]
    assert granted.pop("liar") == 80
    assert set(granted.values()) == {least_steps} and len(granted) == num_honest


def test_the_seconds_of_a_commit_bound_the_updates_a_second(tmp_path: Path) -> None:
    """Four workers with updates of 1 s, on a coordinator that takes 0.5 s to write a commit down."""

    async def seconds(updates_per_commit: int) -> float:
        problem = Problem(num_rounds=24 // updates_per_commit, validate=False, fleet=FleetConfig(min_workers=4))
        strategy = AsyncDiLoCo(AsyncDiLoCoConfig(num_inner_steps=1, updates_per_commit=updates_per_commit))
        world = World(
            problem.plan(strategy), problem.make_deck, tmp_path / str(updates_per_commit), clock=VirtualClock(),
            make_executor=lambda: InlineExecutor(lambda fn: 0.5 if getattr(fn, "__name__", "") == "commit" else 0.0),
        )  # fmt: skip
        for i in range(4):
            world.add(f"w{i + 1}", cost_s=lambda _: 1.0)
        await world.start()
        await world.finish()
        rounds = [event.at for event in world.events if event.kind == "round"]
        return rounds[-1] - rounds[0]

    assert run_virtual(seconds(1)) >= 23 * 0.5
    assert run_virtual(seconds(4)) == pytest.approx(5 * (1.0 + 0.5), rel=0.1)


@pytest.mark.parametrize(("settings", "num_behind"), [({}, 6), ({"updates_per_commit": 3}, 2), ({"quorum": 0.5}, 1)])
def test_a_worker_fetches_the_differences_of_all_commits_since_it_began(
    settings: dict[str, Any], num_behind: int
) -> None:
    large = Layout.of([("w", (300, 200))])
    facts = replace(scripted(6).facts, layout=large, min_workers=6, down_codec="int4-delta")
    strategy = AsyncDiLoCo(AsyncDiLoCoConfig(**settings))
    strategy.init(facts)
    assert strategy.estimate(facts).down == num_behind * strategy.estimate(replace(facts, min_workers=1)).down
    int8 = replace(facts, down_codec="int8-delta")
    if num_behind > 3:
        with pytest.raises(
            RecipeError, match="sends 3 differences in a row at most, and with 6 workers each goes on 6"
        ):
            strategy.init(int8)
    else:
        strategy.init(int8)
    strategy.init(replace(facts, down_codec="int8"))


@pytest.mark.parametrize(
    ("settings", "rule", "reason"),
    [
        ({}, "norm_clipping", "'norm_clipping' needs 3 .* given 1: raise strategy.updates_per_commit"),
        ({"updates_per_commit": 4}, "krum", "'krum' needs 5 .* given 4"),
        ({"quorum": 0.75}, "krum", "needs 5 .* given 3: raise fleet.min_workers and strategy.quorum"),
    ],
)
def test_a_rule_that_needs_more_updates_than_a_commit_takes_is_refused(
    settings: dict[str, Any], rule: Any, reason: str
) -> None:
    facts = replace(scripted(4).facts, aggregation=AggregationConfig(rule=rule), min_workers=4)
    with pytest.raises(RecipeError, match=reason):
        AsyncDiLoCo(AsyncDiLoCoConfig(**settings)).init(facts)
    AsyncDiLoCo(AsyncDiLoCoConfig(updates_per_commit=5)).init(replace(facts, min_workers=5))
    AsyncDiLoCo(AsyncDiLoCoConfig(**settings)).init(replace(facts, aggregation=AggregationConfig()))


def test_a_rule_that_bears_wrong_workers_is_given_one_update_of_each() -> None:
    """Else the fastest one would be all of a commit, and a rule bear nothing."""
    fleet, asked = scripted(3), list[tuple[int, float | None]]()

    async def gather(*_: Any, min_replies: int, grace: float | None, **__: Any) -> tuple[Reply, ...]:
        asked.append((min_replies, grace))
        raise RoundFailed("that was all")

    fleet.gather = gather
    for rule, settings in (
        ("mean", {"updates_per_commit": 4}), ("norm_clipping", {"updates_per_commit": 4}),
        ("median", {"updates_per_commit": 3}), ("median", {"quorum": 1.0, "grace": 0.5}),
    ):  # fmt: skip
        fleet.facts = replace(fleet.facts, min_workers=3, aggregation=AggregationConfig.model_validate({"rule": rule}))
        strategy = AsyncDiLoCo(AsyncDiLoCoConfig.model_validate(settings))
        state = strategy.init(fleet.run)
        with pytest.raises(RoundFailed, match="that was all"):
            asyncio.run(strategy.run_round(state, fleet))  # pyright: ignore[reportArgumentType]
    assert asked == [(4, None), (3, 0.0), (3, 0.0), (3, 0.5)]
    few = replace(fleet.facts, min_workers=2)
    with pytest.raises(RecipeError, match=r"'median' needs 3 .* given 2: raise fleet.min_workers"):
        AsyncDiLoCo(AsyncDiLoCoConfig(updates_per_commit=3)).init(few)
