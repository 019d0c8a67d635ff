"""Zeroth-order fine-tuning: gradients from losses alone, and steps that are told by their seeds and scalars.

    z_p = z(seed_p)                                                standard normal, a function of the seed: normal.py
    g_p = (L(theta + eps z_p) - L(theta - eps z_p)) / 2 eps        central: E[g z] = the gradient + O(eps^2)
    g_p = (L(theta + eps z_p) - L(theta)) / eps                    forward: one loss fewer for each seed but the first
    theta <- theta - lr mean_p g_p z_p

MeZO: Malladi et al. 2023, arXiv:2305.17333. DeComFL: Li et al. 2024, arXiv:2405.15861; who was away replays the steps
that were missed. FedKSeed: Qin et al. 2023, arXiv:2312.06353; seeds come from a pool of K, so that K sums are all there
is to know, theta = theta_0 - sum_k a_k z(seed_k), whatever the number of steps.

Three differences. MeZO adds and subtracts eps z in place, which drifts by rounding; here theta stays as it is, in fp32,
and theta + eps z is written to where the model has its weights: 4 bytes more for each trainable element, and what is
restored is theta bit for bit. z is never held whole: memory above theta is that of a slice. A step's sum is formed in
fp32 from zero, in order of p, and added to theta at once, so each element's bits depend on the steps alone and not on
how theta is cut or how many steps are replayed at a time. The pool adds the same terms in another order: it gives
theta to fp32 tolerance, not to the bit.

Scalars travel as fp32 and count as rounded to it everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from potluck.optim.normal import normal
from potluck.types.errors import InvalidUpdate, NotFinite
from potluck.types.params import Layout

Difference = Literal["central", "forward"]
Terms = tuple[tuple[int, float], ...]
"""(seed, c) of c z(seed), to be added up in this order with c rounded to fp32."""

most_seeds = 1 << 16
"""In a step or a pool: more than any method asks for, few enough to be held by everyone."""

_largest = float(np.finfo(np.float32).max)
_slice_numel = 1 << 16
"""A slice and its z stay in a core's cache."""
_slice_numel_elsewhere = 1 << 20
"""Other devices need more work for each operation; making a z takes them some 45 MiB."""


# What travels


@dataclass(frozen=True, slots=True)
class Step:
    """theta <- theta - lr mean_p scalars[p] z(seeds[p]). InvalidUpdate if it is not a step that can be taken."""

    seeds: tuple[int, ...]
    scalars: tuple[float, ...]
    lr: float

    def __post_init__(self) -> None:
        _check("the step", self.seeds, self.scalars)
        if not all(_fits_fp32(self._coefficient(scalar)) for scalar in self.scalars):
            raise InvalidUpdate(f"the step has the learning rate {self.lr:g}, which takes it beyond fp32; lower it")

    def _coefficient(self, scalar: float) -> float:
        return -self.lr * _rounded(scalar) / len(self.seeds)

    def terms(self) -> Terms:
        return tuple((seed, self._coefficient(scalar)) for seed, scalar in zip(self.seeds, self.scalars, strict=True))


@dataclass(frozen=True, slots=True)
class SeedPool:
    """theta = theta_0 - sum_k sums[k] z(seeds[k]); sums[k] adds up lr g / P over the steps that used seed k, in fp64.

    Sums that were rounded to fp32 give the same bits of theta. InvalidUpdate if it is not a pool.
    """

    seeds: tuple[int, ...]
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        _check("the pool", self.seeds, self.sums)
        if len(set(self.seeds)) != len(self.seeds):
            raise InvalidUpdate(f"the pool has {len(self.seeds)} seeds and {len(set(self.seeds))} different ones")

    @classmethod
    def of(cls, seeds: Sequence[int]) -> SeedPool:
        """Before the first step."""
        return cls(tuple(seeds), (0.0,) * len(seeds))

    def after(self, step: Step) -> SeedPool:
        """InvalidUpdate if the step has a seed that is not the pool's."""
        sums = dict(zip(self.seeds, self.sums, strict=True))
        for seed, coefficient in step.terms():
            if seed not in sums:
                raise InvalidUpdate(f"the step has the seed {seed}, which is none of the pool's {len(self.seeds)}")
            sums[seed] -= coefficient
        return replace(self, sums=tuple(sums.values()))

    def terms(self) -> Terms:
        return tuple((seed, -total) for seed, total in zip(self.seeds, self.sums, strict=True))


def accept(scalars: Sequence[float], *, num: int, limit: float = math.inf) -> tuple[float, ...]:
    """What a worker sent, clipped to [-limit, limit]. InvalidUpdate unless they are `num` finite numbers."""
    if len(scalars) != num:
        raise InvalidUpdate(f"the worker sent {len(scalars)} scalars and was asked for {num}")
    for place, scalar in enumerate(scalars):
        if not _fits_fp32(scalar):
            raise InvalidUpdate(f"scalar {place} of the worker's {num} is {scalar}, which is no finite fp32 number")
    return tuple(max(-limit, min(limit, scalar)) for scalar in scalars)


def _check(subject: str, seeds: Sequence[int], scalars: Sequence[float]) -> None:
    if not 1 <= len(seeds) <= most_seeds or len(scalars) != len(seeds):
        raise InvalidUpdate(
            f"{subject} has {len(seeds)} seeds and {len(scalars)} scalars; it must have equally many, 1 to {most_seeds}"
        )
    for seed, scalar in zip(seeds, scalars, strict=True):
        if not 0 <= seed < 1 << 64:
            raise InvalidUpdate(f"{subject} has the seed {seed}, which must have 64 bits and no sign")
        if not _fits_fp32(scalar):
            raise InvalidUpdate(f"{subject} has the scalar {scalar}, which is no finite fp32 number")


def _fits_fp32(value: float) -> bool:
    return abs(value) <= _largest  # which NaN is not


def _rounded(value: float) -> float:
    return float(np.float32(value))


# Estimates


def perturb(weights: Tensor, theta: Tensor, *, seed: int, scale: float) -> None:
    """weights <- theta + scale z(seed), rounded once more where weights are not fp32.

    theta: fp32 [numel], left as it is. weights: [numel], of any floating type, on the same device.
    """
    assert theta.dtype == torch.float32 and theta.dim() == 1 and weights.shape == theta.shape
    scale = _rounded(scale)
    for low, high in _slices(theta):
        moved = normal(seed, low, high, device=theta.device).mul_(scale).add_(theta[low:high])
        weights[low:high].copy_(moved)


@torch.no_grad()
def projected_gradients(
    loss: Callable[[], float],
    weights: Tensor,
    theta: Tensor,
    *,
    seeds: Sequence[int],
    eps: float,
    difference: Difference = "central",
) -> tuple[float, ...]:
    """g_p for each seed, about z_p . gradient: fp32 values. NotFinite if a loss is not finite.

    loss: of the model whose trainable parameters are `weights`, on the same examples each time. weights holds theta
    in the end, also when the loss raises. Takes 2 P losses, forward P + 1.
    """

    assert weights.data_ptr() != theta.data_ptr(), "theta could not be restored"

    def loss_at(seed: int, scale: float) -> float:
        perturb(weights, theta, seed=seed, scale=scale)
        return finite(loss(), seed)

    def finite(value: float, seed: int) -> float:
        if not _fits_fp32(value):
            raise NotFinite(f"a loss or its slope along seed {seed} is {value}; lower the learning rate or eps")
        return value

    try:
        if difference == "central":
            slopes = [(loss_at(seed, eps) - loss_at(seed, -eps)) / (2 * eps) for seed in seeds]
        else:
            weights.copy_(theta)
            middle = finite(loss(), seeds[0])
            slopes = [(loss_at(seed, eps) - middle) / eps for seed in seeds]
    finally:
        weights.copy_(theta)
    return tuple(_rounded(finite(slope, seed)) for slope, seed in zip(slopes, seeds, strict=True))


# Updates


def replay(theta: Tensor, *, steps: Sequence[Step], layout: Layout | None = None, offset: int = 0) -> tuple[Tensor]:
    """Take steps, one or all that were missed, in one pass over theta, in place. For `Fleet.apply` too.

    theta: fp32 [n], the elements of the flat vector from `offset` on.
    """
    return (_move(theta, [step.terms() for step in steps], offset),)


def rebuild(theta: Tensor, *, pool: SeedPool, layout: Layout | None = None, offset: int = 0) -> tuple[Tensor]:
    """theta_0 becomes, in place, theta after all steps of the pool: costs K passes of the generator. As `replay`."""
    return (_move(theta, [pool.terms()], offset),)


def _move(theta: Tensor, moves: Sequence[Terms], offset: int) -> Tensor:
    assert theta.dtype == torch.float32 and theta.dim() == 1
    rounded = [[(seed, _rounded(c)) for seed, c in terms if c] for terms in moves]
    for low, high in _slices(theta):
        part = theta[low:high]
        for terms in rounded:
            total = torch.zeros_like(part)
            for seed, coefficient in terms:
                total += normal(seed, offset + low, offset + high, device=theta.device).mul_(coefficient)
            part += total
    return theta


def _slices(theta: Tensor) -> list[tuple[int, int]]:
    size = _slice_numel if theta.device.type == "cpu" else _slice_numel_elsewhere
    return [(low, min(low + size, theta.numel())) for low in range(0, theta.numel(), size)]
