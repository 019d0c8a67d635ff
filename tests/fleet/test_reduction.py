"""The run's rule of aggregation, from the recipe to the state, through the shipping hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor
from worlds import virtual_world

from potluck.aggregation.config import AggregationConfig
from potluck.clock import run_virtual
from potluck.contract import checks
from potluck.fleet.config import FleetConfig
from potluck.fleet.reduction import check_reduction
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fleet import Fleet, Reduction, total, weighted_mean
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.strategies.task import Result, task
from potluck.types.errors import RecipeError, RunStopped
from potluck.types.vector import Vector


class NoSettings(BaseModel):
    pass


@task("test_reduction.constant", numbers=("num_tokens",))
def constant(replica: object, *, theta: Vector, value: float) -> Result:
    return Result({"num_tokens": 10}, {"delta": torch.full((theta.numel,), value)})


class Constant:
    """Each worker's update is a constant, and the state becomes their reduction."""

    Config: ClassVar[type[BaseModel]] = NoSettings
    State: ClassVar[type[State]] = State

    def __init__(self, values: dict[str, float], reduction: Reduction) -> None:
        self._values, self._reduction = values, reduction

    def init(self, run: RunFacts) -> State:
        return State(params=run.initial)

    async def run_round(self, state: State, fleet: Fleet) -> State:
        work = {w.id: constant.bind(theta=state.params, value=self._values[w.id]) for w in fleet.workers()}
        got = await fleet.call(work, key="constant", min_replies=1, reduce=self._reduction)
        return replace(state, params=got.reduced, round=state.round + 1)

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=0, down=0)


def play(folder: Path, values: list[float], reduction: Reduction, **config: Any) -> tuple[set[float], World]:
    """The distinct parameters after one round of workers w1, w2, ... with these updates."""
    by_worker = {f"w{i + 1}": value for i, value in enumerate(values)}
    problem = Problem(num_rounds=1, validate=False, aggregation=AggregationConfig(**config))
    problem.fleet = FleetConfig(min_workers=len(values), no_progress_s=20.0, max_discarded_rounds=1)

    async def main() -> tuple[set[float], World]:
        world = virtual_world(problem, Constant(by_worker, reduction), folder)
        for name in by_worker:
            world.add(name, cost_s=lambda _: 1.0)
        await world.clock.sleep(1.0)
        await world.start()
        state = await world.finish()
        assert world.last is not None
        return set(world.last.params.read(state.params).tolist()), world

    return run_virtual(main())


by_tokens = weighted_mean("delta", by="num_tokens")
attacked = [1.0, 1.0, 1.0, 1.0, -1000.0]


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "multi_krum"])
def test_a_robust_rule_of_the_recipe_leaves_an_attacker_out(tmp_path: Path, rule: str) -> None:
    values, _ = play(tmp_path, attacked, by_tokens, rule=rule)
    assert values == {1.0}


def test_the_mean_does_not(tmp_path: Path) -> None:
    values, world = play(tmp_path, attacked, by_tokens)
    assert all(value == pytest.approx(-199.2) for value in values)
    assert not [event for event in world.events if event.kind == "aggregation"]


def test_who_was_scaled_and_left_out_is_told(tmp_path: Path) -> None:
    values, world = play(tmp_path / "a", attacked, by_tokens, rule="norm_clipping")
    assert all(value == pytest.approx(0.6) for value in values)
    (event,) = [event for event in world.events if event.kind == "aggregation"]
    assert event.text == "norm_clipping scaled w5 by 0.001"
    assert event.detail["rule"] == "norm_clipping" and event.detail["left_out"] == []
    assert event.detail["scaled"] == {"w5": pytest.approx(0.001)}
    _, world = play(tmp_path / "b", attacked, by_tokens, rule="multi_krum")
    (event,) = [event for event in world.events if event.kind == "aggregation"]
    assert event.detail["left_out"] == ["w3", "w4", "w5"] and event.detail["scaled"] == {}


def test_too_few_updates_discard_the_round_with_the_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"krum with aggregation\.max_faulty = 1 needs 5 updates and 4 came"):
        play(tmp_path, attacked[:4], by_tokens, rule="krum")


def test_a_sum_over_items_can_be_robust(tmp_path: Path) -> None:
    values, _ = play(tmp_path, attacked, total("delta", over="num_tokens"), rule="median")
    assert all(value == pytest.approx(5.0) for value in values)  # the 50 items' sum, at a tenth each


def test_a_plain_sum_cannot_and_says_so_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"plain sum of delta, which aggregation\.rule = 'median' cannot make"):
        play(tmp_path, attacked, total("delta"), rule="median")
    check_reduction(total("delta"), AggregationConfig())
    check_reduction(by_tokens, AggregationConfig(rule="median"))


def test_synchronous_training_with_a_rule_that_changes_nothing_is_bit_for_bit_the_same() -> None:
    def params(rule: Any) -> Tensor:
        problem = Problem(num_rounds=2, aggregation=AggregationConfig(rule=rule))
        return checks.run(problem, lambda: SyncSGD(SyncSGDConfig()), num_workers=1).params

    assert torch.equal(params("mean"), params("norm_clipping"))


def test_clipping_around_the_aggregate_before_survives_restarts() -> None:
    def make() -> DiLoCo:
        return DiLoCo(DiLoCoConfig(num_inner_steps=2))

    rule = AggregationConfig(rule="centered_clipping")
    checks.resumes_exactly(Problem(num_rounds=3, aggregation=rule), make)
    final = checks.run(Problem(num_rounds=2, aggregation=rule), make, num_workers=2).state
    assert getattr(final, "aggregate", None) is not None
    final = checks.run(Problem(num_rounds=2), make, num_workers=2).state
    assert getattr(final, "aggregate", None) is None
