"""Estimates, steps and their replay, against gradients of autograd and sums of plain products."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck.models.flat import FlatModel
from potluck.optim import zeroth_order
from potluck.optim.normal import normal
from potluck.optim.zeroth_order import (
    Difference,
    SeedPool,
    Step,
    accept,
    most_seeds,
    perturb,
    projected_gradients,
    rebuild,
    replay,
)
from potluck.storage.params import ParamStore
from potluck.types.errors import InvalidUpdate, NotFinite
from potluck.types.params import Layout

differences: list[Difference] = ["central", "forward"]


def vector(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def history(num: int, perturbations: int, *, first_seed: int = 100) -> list[Step]:
    scalars = vector(first_seed, num * perturbations).tolist()
    return [
        Step(
            tuple(range(first_seed + number * perturbations, first_seed + (number + 1) * perturbations)),
            tuple(scalars[number * perturbations : (number + 1) * perturbations]),
            lr=0.01 / (number + 1),
        )
        for number in range(num)
    ]


# Perturbation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturb_writes_beside_theta(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(zeroth_order, "_slice_numel", 1000)
    theta = vector(0, 4321)
    before, weights = theta.clone(), torch.empty(4321, dtype=dtype)
    perturb(weights, theta, seed=9, scale=-1e-3)
    assert torch.equal(weights, (theta + normal(9, 0, 4321) * -1e-3).to(dtype))
    assert same_bits(theta, before)


# Estimates


def quadratic(numel: int) -> tuple[Callable[[Tensor], float], Callable[[Tensor], Tensor]]:
    """x^T H x / 2 + b^T x and its gradient, in fp64."""
    root = vector(1, numel * numel).view(numel, numel).double() / numel
    hessian, slope = root @ root.T + 0.5 * torch.eye(numel), vector(2, numel).double()
    return (
        lambda x: float(0.5 * x.double() @ hessian @ x.double() + slope @ x.double()),
        lambda x: hessian @ x.double() + slope,
    )


@pytest.mark.parametrize("difference", differences)
def test_the_mean_of_estimates_is_the_gradient(difference: Difference) -> None:
    """Var of (g z)_j is |gradient|^2 + gradient_j^2; a quadratic's central difference has no other error."""
    numel, num = 24, 10_000
    value, gradient = quadratic(numel)
    theta, weights = vector(3, numel), torch.empty(numel)
    seeds = range(num)
    slopes = projected_gradients(lambda: value(weights), weights, theta, seeds=seeds, eps=0.01, difference=difference)
    directions = torch.stack([normal(seed, 0, numel) for seed in seeds]).double()
    mean = (torch.tensor(slopes, dtype=torch.float64)[:, None] * directions).mean(dim=0)
    exact = gradient(theta)
    spread = ((exact.square().sum() + exact.square()) / num).sqrt()
    assert float(((mean - exact).abs() / spread).max()) < 4
    assert 0.5 < float(((mean - exact) / spread).square().mean()) < 2


@pytest.mark.parametrize(("difference", "num_losses"), [("central", 10), ("forward", 6)])
def test_each_slope_is_the_gradient_along_z(difference: Difference, num_losses: int) -> None:
    value, gradient = quadratic(50)
    theta, weights = vector(3, 50), torch.empty(50)
    losses: list[float] = []

    def loss() -> float:
        losses.append(value(weights))
        return losses[-1]

    seeds = [5, 6, 7, 8, 1 << 63]
    slopes = projected_gradients(loss, weights, theta, seeds=seeds, eps=1e-3, difference=difference)
    exact = [float(normal(seed, 0, 50).double() @ gradient(theta)) for seed in seeds]
    assert slopes == pytest.approx(exact, abs=2e-3 if difference == "central" else 2e-2)
    assert len(losses) == num_losses
    assert all(torch.tensor(slope).item() == slope for slope in slopes)  # fp32 values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", differences)
def test_weights_come_back_bit_for_bit(difference: Difference, dtype: torch.dtype) -> None:
    """In place they would not: adding and taking away 1,000 times moves most of them."""
    theta, drifting = vector(3, 1000), vector(3, 1000)
    before, weights = theta.clone(), torch.zeros(1000, dtype=dtype)
    for seed in range(1000):
        z = normal(seed, 0, 1000) * 1e-3
        drifting.add_(z).sub_(2 * z).add_(z)
    projected_gradients(
        lambda: float(weights.float().sum()), weights, theta, seeds=range(1000), eps=1e-3, difference=difference
    )
    assert same_bits(theta, before)
    assert torch.equal(weights, before.to(dtype))
    assert int((drifting != before).sum()) > 500


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_loss_that_is_not_finite_is_an_error_and_leaves_theta(value: float) -> None:
    theta, weights = vector(3, 100), torch.empty(100)
    with pytest.raises(NotFinite, match="seed 4 is"):
        projected_gradients(lambda: value, weights, theta, seeds=[4], eps=1e-3)
    assert same_bits(weights, theta)


def test_a_loss_that_raises_leaves_theta() -> None:
    theta, weights = vector(3, 100), torch.empty(100)

    def loss() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        projected_gradients(loss, weights, theta, seeds=[4], eps=1e-3)
    assert same_bits(weights, theta)


# Descent


@pytest.mark.parametrize("difference", differences)
def test_the_loss_of_a_quadratic_falls_to_its_least(difference: Difference) -> None:
    value, gradient = quadratic(10)
    theta, weights = vector(3, 10), torch.empty(10)
    norm = float(gradient(theta).norm())
    losses = [value(theta)]
    for number in range(1500):
        seeds = (2 * number, 2 * number + 1)
        slopes = projected_gradients(
            lambda: value(weights), weights, theta, seeds=seeds, eps=1e-3, difference=difference
        )
        replay(theta, steps=[Step(seeds, slopes, lr=0.1)])
        losses.append(value(theta))
    assert losses[-1] < losses[100] < losses[10] < losses[0]
    assert float(gradient(theta).norm()) < 0.01 * norm


def test_the_loss_of_a_small_model_falls() -> None:
    """Two clients, whose slopes are averaged, as in DeComFL; a third that was away has the same bits after a replay."""
    torch.manual_seed(0)
    model = FlatModel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    examples = vector(1, 8 * 64).view(64, 8)
    targets = torch.sin(examples[:, :1]) + 0.5 * examples[:, 1:2]
    halves = [slice(0, 32), slice(32, 64)]

    @torch.no_grad()
    def loss(part: slice) -> float:
        return float(nn.functional.mse_loss(model.module(examples[part]), targets[part]))

    start = model.params()
    theta = start.clone()
    before = loss(slice(0, 64))
    steps: list[Step] = []
    for number in range(300):
        seeds = tuple(range(10 * number, 10 * number + 10))
        each = [
            projected_gradients(lambda part=part: loss(part), model.vector, theta, seeds=seeds, eps=1e-3)
            for part in halves
        ]
        steps.append(Step(seeds, tuple(sum(pair) / 2 for pair in zip(*each, strict=True)), lr=0.02))
        replay(theta, steps=steps[-1:])
    model.load(theta)
    assert loss(slice(0, 64)) < 0.2 * before
    assert same_bits(replay(start, steps=steps)[0], theta)


# Steps and replay


def test_a_step_is_the_mean_of_its_terms() -> None:
    theta = vector(0, 5000)
    step = Step((1, 2, 3), (0.5, -2.0, 3.25), lr=0.01)
    expected = (
        theta.double()
        - 0.01 * sum(g * normal(seed, 0, 5000).double() for seed, g in zip(step.seeds, step.scalars, strict=True)) / 3
    )
    (moved,) = replay(theta, steps=[step])
    assert moved is theta
    torch.testing.assert_close(moved.double(), expected, rtol=3e-7, atol=1e-8)


def test_a_step_rounds_each_product_and_sum_in_the_order_of_its_terms() -> None:
    """Other versions of Potluck must do the same."""
    theta, total = vector(0, 5000).numpy(), np.zeros(5000, np.float32)
    step = Step((1, 2, 3), (0.5, -2.0, 3.25), lr=0.01)
    for seed, scalar in zip(step.seeds, step.scalars, strict=True):
        total = total + np.float32(-0.01 * scalar / 3) * normal(seed, 0, 5000).numpy()
    assert same_bits(replay(vector(0, 5000), steps=[step])[0], torch.from_numpy(theta + total))


@pytest.mark.parametrize("size", [3, 64, 1001])
def test_any_slices_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    steps = history(4, 3)
    (expected,) = replay(vector(0, 2503), steps=steps)
    monkeypatch.setattr(zeroth_order, "_slice_numel", size)
    assert same_bits(replay(vector(0, 2503), steps=steps)[0], expected)
    parts = [
        replay(vector(0, 2503)[low : low + 777].clone(), steps=steps, offset=low)[0] for low in range(0, 2503, 777)
    ]
    assert same_bits(torch.cat(parts), expected)


def test_the_coordinator_moves_its_files_to_the_same_bits(tmp_path: Path) -> None:
    store, steps = ParamStore(tmp_path, fragment_numel=300, slice_numel=128), history(4, 3)
    pool = SeedPool.of(steps[0].seeds).after(steps[0])
    theta = store.create("theta", vector(0, 1007))
    layout = Layout.of([("a", (1007,))])
    (moved,) = store.apply(replay, theta, name="moved", layout=layout, steps=steps)
    (rebuilt,) = store.apply(rebuild, theta, name="rebuilt", layout=layout, pool=pool)
    assert same_bits(store.read(moved), replay(vector(0, 1007), steps=steps)[0])
    assert same_bits(store.read(rebuilt), rebuild(vector(0, 1007), pool=pool)[0])


@pytest.mark.parametrize("batch", [1, 2, 5, 20])
def test_any_batches_of_rounds_give_the_same_bits(batch: int) -> None:
    steps = history(20, 4)
    theta, there = vector(0, 3000), vector(0, 3000)
    for step in steps:
        replay(there, steps=[step])
    for low in range(0, len(steps), batch):
        replay(theta, steps=steps[low : low + batch])
    assert same_bits(theta, there)


def test_scalars_count_as_the_fp32_that_travels() -> None:
    step = Step((1, 2), (0.1, 1 / 3), lr=0.3)
    travelled = replace(step, scalars=tuple(torch.tensor(step.scalars).tolist()))
    assert travelled.scalars != step.scalars
    assert same_bits(replay(vector(0, 500), steps=[step])[0], replay(vector(0, 500), steps=[travelled])[0])


def test_memory_of_an_update_is_that_of_a_slice() -> None:
    """Fifty million elements take 191 MiB; one z of them would take as much again."""
    script = """
import resource, torch
from potluck.optim.zeroth_order import Step, perturb, replay
torch.set_num_threads(1)
steps = [Step((1, 2), (0.5, -1.0), lr=1e-3)]
replay(torch.zeros(1 << 20), steps=steps)
theta = torch.zeros(50_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
replay(theta, steps=steps)
perturb(torch.empty(1 << 20), theta[:1 << 20], seed=3, scale=1e-3)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, theta.std().item())
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert int(printed[0]) < 8 * 1024  # KiB
    assert float(printed[1]) == pytest.approx(1e-3 * math.sqrt(0.5**2 + 1) / 2, rel=1e-3)


# FedKSeed's pool


def test_a_pool_and_a_replay_agree_to_fp32_tolerance() -> None:
    """Their sums have other orders, so not in bits."""
    pool = SeedPool.of([7 * k + 1 for k in range(32)])
    steps: list[Step] = []
    for number in range(200):
        seeds = tuple(pool.seeds[(5 * number + 3 * p) % 32] for p in range(4))
        steps.append(Step(seeds, tuple(vector(number, 4).tolist()), lr=0.01 / (1 + number / 50)))
        pool = pool.after(steps[-1])
    start = vector(0, 20_000)
    (replayed,), (rebuilt,) = replay(start.clone(), steps=steps), rebuild(start.clone(), pool=pool)
    exact = start.double()
    for step in steps:
        for seed, coefficient in step.terms():
            exact += coefficient * normal(seed, 0, 20_000).double()
    assert float((exact - start).abs().max()) > 0.1
    assert float((replayed - exact).abs().max()) < 200 * 2**-24 * 4  # each step rounds |theta| < 8 once
    assert float((rebuilt - exact).abs().max()) < 2e-6
    assert not same_bits(replayed, rebuilt)


def test_a_pool_in_fp32_gives_the_same_bits() -> None:
    pool = SeedPool.of([1, 2, 3]).after(Step((1, 3), (0.1, 0.7), lr=1 / 3)).after(Step((1,), (0.2,), lr=0.1))
    travelled = replace(pool, sums=tuple(torch.tensor(pool.sums).tolist()))
    assert travelled.sums != pool.sums
    assert same_bits(rebuild(vector(0, 999), pool=pool)[0], rebuild(vector(0, 999), pool=travelled)[0])


def test_a_pool_sums_what_each_seed_was_given() -> None:
    pool = SeedPool.of([5, 6, 7]).after(Step((5, 7, 5, 5), (1.0, 2.0, 3.0, -8.0), lr=0.5))
    assert pool == SeedPool((5, 6, 7), (-0.5, 0.0, 0.25))


# What is refused


@pytest.mark.parametrize(
    ("seeds", "scalars", "lr", "reason"),
    [
        ((), (), 0.1, "has 0 seeds and 0 scalars"),
        ((1, 2), (0.5,), 0.1, "has 2 seeds and 1 scalars"),
        (tuple(range(most_seeds + 1)), (0.0,) * (most_seeds + 1), 0.1, "1 to 65536"),
        ((-1,), (0.5,), 0.1, "the seed -1"),
        ((1 << 64,), (0.5,), 0.1, "must have 64 bits"),
        ((1,), (math.nan,), 0.1, "the scalar nan"),
        ((1,), (-math.inf,), 0.1, "the scalar -inf"),
        ((1,), (1e39,), 0.1, r"the scalar 1e\+39"),
        ((1,), (1e38,), 1e10, r"learning rate 1e\+10"),
        ((1,), (0.5,), math.nan, "learning rate nan"),
    ],
)
def test_a_step_that_cannot_be_taken_is_refused(
    seeds: tuple[int, ...], scalars: tuple[float, ...], lr: float, reason: str
) -> None:
    with pytest.raises(InvalidUpdate, match=reason):
        Step(seeds, scalars, lr)


def test_a_pool_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidUpdate, match="3 seeds and 2 different"):
        SeedPool.of([1, 2, 1])
    with pytest.raises(InvalidUpdate, match="the pool has the scalar inf"):
        SeedPool((1, 2), (0.0, math.inf))
    with pytest.raises(InvalidUpdate, match="seed 9, which is none of the pool's 2"):
        SeedPool.of([1, 2]).after(Step((1, 9), (0.5, 0.5), lr=0.1))


def test_scalars_of_a_worker_are_counted_checked_and_clipped() -> None:
    assert accept([0.5, -7.0, 9.0], num=3, limit=2.0) == (0.5, -2.0, 2.0)
    assert accept([0.5, -7.0], num=2) == (0.5, -7.0)
    with pytest.raises(InvalidUpdate, match="sent 2 scalars and was asked for 3"):
        accept([0.5, 0.5], num=3)
    for scalar in (math.nan, math.inf, 1e39):
        with pytest.raises(InvalidUpdate, match="scalar 1 of the worker's 2"):
            accept([0.5, scalar], num=2, limit=2.0)
