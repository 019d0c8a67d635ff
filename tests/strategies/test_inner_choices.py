"""Whole runs with each inner optimizer: what workers keep of it comes through restarts in the middle of tasks."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.contract import checks
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.types.errors import RecipeError


def diloco() -> Strategy:
    return DiLoCo(DiLoCoConfig(num_inner_steps=5, outer_lr=0.7, outer_momentum=0.6))


def problem(num_rounds: int = 3, **inner: Any) -> Problem:
    settings = InnerConfig(**{"lr": 1e-2, "batch_size": 4, "warmup": 0.1, **inner})
    given = Problem(num_rounds=num_rounds, inner=settings, family="llama")
    given.fleet = given.fleet.model_copy(update={"snapshot_every_steps": 2})
    return given


@pytest.mark.parametrize(
    "inner",
    [{"optimizer": "muon"}, {"optimizer": "adafactor", "weights": "bf16", "checkpoint_activations": True}],
    ids=["muon", "bf16"],
)
def test_stop_and_resume_changes_nothing(inner: dict[str, Any]) -> None:
    checks.resumes_exactly(problem(**inner), diloco, moments=(0.4, 0.7))


def test_bf16_workers_train_a_master_in_fp32() -> None:
    """Within 0.1 of the validation loss that fp32 workers come to."""
    losses = {
        weights: checks.run(problem(10, optimizer="adafactor", weights=weights), diloco, num_workers=2).losses
        for weights in ("fp32", "bf16")
    }
    assert losses["bf16"][10] < losses["bf16"][0] - 0.3
    assert losses["bf16"][10] == pytest.approx(losses["fp32"][10], abs=0.1)


def test_steps_on_the_coordinator_are_refused() -> None:
    with pytest.raises(RecipeError, match="which has no muon"):
        checks.run(problem(optimizer="muon"), lambda: SyncSGD(SyncSGDConfig()), num_workers=1)
