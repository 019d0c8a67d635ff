"""Settings that do not go together are refused before a run begins, by every strategy they concern."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from potluck.aggregation.config import AggregationConfig
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.async_diloco import AsyncDiLoCoConfig
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.run import RunFacts
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.types.errors import RecipeError
from potluck.types.params import Fragment, Params

strategies = [
    SyncSGD(SyncSGDConfig()), DiLoCo(DiLoCoConfig()), FedAvg(FedAvgConfig()),
    StreamingDiLoCo(StreamingDiLoCoConfig(num_fragments=2)),
]  # fmt: skip


def facts_of(strategy: Any, problem: Problem, aggregation: AggregationConfig | None = None) -> RunFacts:
    plan = replace(problem.plan(strategy), aggregation=aggregation or AggregationConfig())
    nowhere = Params((Fragment("nowhere", plan.layout.numel),))
    return plan.facts(initial=nowhere, zeros=nowhere)


def named(strategy: Any) -> str:
    return type(strategy).__name__


@pytest.mark.parametrize("strategy", strategies, ids=named)
def test_fewer_workers_than_the_rule_of_aggregation_takes(strategy: Any) -> None:
    krum = AggregationConfig(rule="krum", max_faulty=1)
    few, enough = Problem(fleet=FleetConfig(min_workers=4)), Problem(fleet=FleetConfig(min_workers=5))
    with pytest.raises(RecipeError, match=r"'krum' needs 5 updates and may be given 4: raise fleet.min_workers"):
        strategy.init(facts_of(strategy, few, krum))
    strategy.init(facts_of(strategy, enough, krum))
    strategy.init(facts_of(strategy, few, AggregationConfig(rule="median")))  # which does what it can with fewer


@pytest.mark.parametrize("strategy", strategies, ids=named)
def test_work_by_speed_where_every_worker_has_as_much(strategy: Any) -> None:
    balanced = Problem(fleet=FleetConfig(balance="time"))
    if isinstance(strategy, StreamingDiLoCo):
        with pytest.raises(RecipeError, match="streaming_diloco gives every worker as many steps"):
            strategy.init(facts_of(strategy, balanced))
    elif isinstance(strategy, FedAvg):
        with pytest.raises(RecipeError, match=r"would count these twice.*set strategy.normalised to true"):
            strategy.init(facts_of(strategy, balanced))
        FedAvg(FedAvgConfig(normalised=True)).init(facts_of(strategy, balanced))
    else:
        strategy.init(facts_of(strategy, balanced))
    strategy.init(facts_of(strategy, Problem()))


def test_control_variates_with_work_by_speed() -> None:
    strategy = FedAvg(FedAvgConfig(control_variates=True))
    problem = Problem(inner=InnerConfig(optimizer="sgd"), fleet=FleetConfig(balance="time"))
    with pytest.raises(RecipeError, match="control_variates gives every worker as many steps"):
        strategy.init(facts_of(strategy, problem))


def test_a_quorum_with_a_number_of_updates() -> None:
    with pytest.raises(ValidationError, match="remove `updates_per_commit`"):
        AsyncDiLoCoConfig(quorum=0.5, updates_per_commit=2)
