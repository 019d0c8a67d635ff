"""FedAvg and its relatives, against plain loops of several workers; SCAFFOLD through the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import references
from pydantic import ValidationError
from torch import Tensor

from potluck.contract import checks
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig, FedAvgState
from potluck.strategies.run import RunFacts
from potluck.strategies.strategy import Strategy
from potluck.types.errors import RecipeError

pytestmark = pytest.mark.timeout(120)
num_steps, num_workers = 5, 3


def made(**settings: Any) -> Callable[[], Strategy]:
    return lambda: FedAvg(FedAvgConfig(num_inner_steps=num_steps, **settings))


def plain_sgd(**changes: Any) -> InnerConfig:
    return InnerConfig(optimizer="sgd", lr=0.3, batch_size=4, warmup=0.1, **changes)


def check_equal(got: Tensor, expected: Tensor, problem: Problem, tolerance: float = 5e-6) -> None:
    assert (expected - references.flat(problem.model())).abs().max() > 1e-2
    assert (got - expected).abs().max() < tolerance


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, {}),
        ({"outer_momentum": 0.6, "outer_lr": 0.5}, {"momentum": 0.6, "lr": 0.5}),
        ({"proximal": 5.0}, {"proximal": 5.0}),
        ({"outer": "adam", "outer_lr": 0.02}, {"outer": "adam", "lr": 0.02}),
        ({"outer": "yogi"}, {"outer": "yogi", "lr": 0.01}),
        ({"outer": "adagrad", "outer_lr": 0.1, "tau": 1e-2}, {"outer": "adagrad", "lr": 0.1, "tau": 1e-2}),
    ],
    ids=["FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedYogi", "FedAdagrad"],
)  # fmt: skip
def test_three_workers_equal_a_plain_loop(settings: dict[str, Any], told: dict[str, Any], tmp_path: Path) -> None:
    problem = Problem(num_rounds=3)
    problem.store_shards(tmp_path)
    got = checks.run(problem, made(**settings), num_workers=num_workers)
    check_equal(got.params, references.fed_avg(problem, [[num_steps] * num_workers] * 3, **told), problem)


def test_a_pull_changes_the_outcome(tmp_path: Path) -> None:
    """Or the test above would not notice if there were none."""
    problem = Problem(num_rounds=3)
    problem.store_shards(tmp_path)
    without, with_pull = (references.fed_avg(problem, [[5] * 3] * 3, proximal=mu) for mu in (0.0, 5.0))
    assert (without - with_pull).abs().max() > 1e-3


class Unequal(FedAvg):
    """Whose workers may take unequal steps though they are counted twice."""

    def init(self, run: RunFacts) -> FedAvgState:
        return super().init(replace(run, balances=False))


@pytest.mark.parametrize("normalised", [False, True], ids=["FedAvg", "FedNova"])
def test_unequal_steps(normalised: bool, tmp_path: Path) -> None:
    """Averaged by tokens, or by the data behind them."""
    problem = Problem(num_rounds=3, fleet=FleetConfig(no_progress_s=5000.0, balance="time"))
    problem.store_shards(tmp_path)
    asked: list[list[int]] = []

    def costs(i: int) -> Callable[[pb.Lease], float]:
        def cost_s(lease: pb.Lease) -> float:
            if lease.num_sequences:
                asked.append([i, lease.num_sequences // problem.inner.batch_size])
            return (1.0, 2.0, 6.0)[i] * lease.num_sequences

        return cost_s

    config = FedAvgConfig(num_inner_steps=num_steps, normalised=normalised)
    got = checks.run(problem, lambda: Unequal(config), num_workers=3, costs=costs)
    steps = [[n for _, n in sorted(asked[at : at + 3])] for at in range(0, len(asked), 3)]
    assert steps[0] == [5, 5, 5] and len(set(steps[1])) == 3
    check_equal(got.params, references.fed_avg(problem, steps, normalised=normalised), problem)
    other = references.fed_avg(problem, steps, normalised=not normalised)
    assert (got.params - other).abs().max() > 1e-3


# SCAFFOLD


def scaffold_problem(**changes: Any) -> Problem:
    return Problem(num_rounds=4, inner=plain_sgd(), **changes)


scaffold = made(control_variates=True)


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_scaffold_equals_its_algorithm(lr: float, tmp_path: Path) -> None:
    problem = scaffold_problem()
    problem.store_shards(tmp_path)
    got = checks.run(problem, made(control_variates=True, outer_lr=lr), num_workers=num_workers)
    expected = references.scaffold(problem, num_workers=num_workers, num_inner_steps=num_steps, lr=lr)
    check_equal(got.params, expected, problem)
    plain = checks.run(problem, made(outer_lr=lr), num_workers=num_workers)
    assert (plain.params - expected).abs().max() > 1e-4


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "grpc"])
def test_scaffold_goes_on_exactly_after_restarts(sockets: bool) -> None:
    """The control variates of workers and coordinator come through; with snapshots in the middle of a task too."""
    problem = scaffold_problem(up_codec="int8", down_codec="bf16")
    problem.fleet = problem.fleet.model_copy(update={"snapshot_every_steps": 2})
    checks.resumes_exactly(problem, scaffold, sockets=sockets)


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "grpc"])
def test_scaffold_moves_two_versions_down_and_one_up(sockets: bool) -> None:
    checks.moves_what_it_says(scaffold_problem(), scaffold, sockets=sockets)


def test_scaffold_converges_with_losses() -> None:
    problem = Problem(num_rounds=12, inner=plain_sgd(schedule="constant"))
    checks.survives_losses(problem, scaffold)


def test_scaffold_has_one_trace_for_a_seed() -> None:
    checks.same_trace(scaffold_problem(), scaffold)


def test_scaffold_needs_plain_steps() -> None:
    with pytest.raises(RecipeError, match=r'inner.optimizer is adamw; set it to "sgd"'):
        checks.run(Problem(), scaffold, num_workers=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"outer": "adam", "outer_momentum": 0.9}, "belongs to outer"),
        ({"tau": 0.01}, '`tau` belongs to the other outer steps and `outer` is "sgd"'),
        ({"betas": (0.5, 0.99)}, "`betas` belongs to the other outer steps"),
        ({"control_variates": True, "proximal": 0.1}, "the same thing twice"),
        ({"control_variates": True, "normalised": True}, "remove `normalised`"),
        ({"betas": (0.9, 1.0)}, "below 1"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        FedAvgConfig(**settings)


def test_adam_without_adaptivity_is_momentum() -> None:
    """With a large tau the denominator is a constant."""
    from potluck.optim.federated import adaptive
    from potluck.types.params import Layout

    layout, generator = Layout.of([("w", [4, 3])]), torch.Generator().manual_seed(0)
    theta, m, v = torch.zeros(12), torch.zeros(12), torch.zeros(12)
    expected, plain = torch.zeros(12), torch.zeros(12)
    for step in range(4):
        delta = torch.randn(12, generator=generator)
        plain = 0.9 * plain + 0.1 * delta
        expected -= plain / 2
        theta, m, v = adaptive(
            theta, m, v, delta, rule="adam", lr=1e6, beta1=0.9, beta2=1.0, tau=1e6, is_first=step == 0,
            layout=layout, offset=0,
        )  # fmt: skip
    assert torch.allclose(theta, expected, rtol=1e-5)
