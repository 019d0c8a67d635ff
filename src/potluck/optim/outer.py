"""Operations on slices of flat vectors, for `Fleet.apply`: the outer optimizers, equal to those of PyTorch.

Each takes slices, fp32 [n], that start at element `offset` of the flat model, and returns new values for them, in the
memory it was given where that serves: nothing is allocated slice after slice. None needs anything outside its slice, so
the result does not depend on how the vector is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from potluck.types.params import Layout


def nesterov(
    theta: Tensor,
    momentum: Tensor,
    delta: Tensor,
    *,
    lr: float,
    momentum_coefficient: float,
    scale: float = 1.0,
    layout: Layout,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """m <- mu m + delta; theta <- theta - lr (delta + mu m): `torch.optim.SGD(nesterov=True)` with gradient delta.

    The gradient is `scale * delta`. PyTorch's first step sets m = delta; here m starts at zeros, which is the same.
    """
    if scale != 1.0:
        delta.mul_(scale)
    momentum.mul_(momentum_coefficient).add_(delta)
    return theta.add_(delta.add_(momentum, alpha=momentum_coefficient), alpha=-lr), momentum


def delayed_nesterov(
    theta: Tensor,
    gathered: Tensor,
    momentum: Tensor,
    delta: Tensor,
    *,
    lr: float,
    momentum_coefficient: float,
    momentum_share: float,
    ends_cycle: bool,
    scale: float,
    layout: Layout,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Nesterov's momentum, moved once in a cycle of steps whose sum it takes up.

    b <- b + d, d = scale * delta; where a cycle ends m <- mu m + b and b <- 0; theta <- theta - lr (d + share mu m).
    Gives theta, and b or, where a cycle ends, m: b is zeros then. A cycle of one step with share 1 is `nesterov`.
    """
    delta.mul_(scale)
    gathered.add_(delta)
    if ends_cycle:
        momentum.mul_(momentum_coefficient).add_(gathered)
    if momentum_share:
        delta.add_(momentum, alpha=momentum_share * momentum_coefficient)
    return theta.add_(delta, alpha=-lr), momentum if ends_cycle else gathered


def sgd(
    theta: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    layout: Layout,
    offset: int,
) -> tuple[Tensor]:
    """theta <- theta (1 - lr decay) - lr scale gradient, with decay on tensors of two or more dimensions only."""
    _decay(theta, 1 - lr * weight_decay, layout, offset)
    return (theta.add_(gradient, alpha=-lr * scale),)


def axpy(x: Tensor, y: Tensor, *, a: float, layout: Layout, offset: int) -> tuple[Tensor]:
    """a x + y."""
    return (y.add_(x, alpha=a),)


def adamw(
    theta: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float = 1.0,
    layout: Layout,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `torch.optim.AdamW` with the gradient `scale * gradient`; `step` counts from 1.

    Decoupled decay, on tensors of two or more dimensions only. Loshchilov and Hutter 2017, arXiv:1711.05101.
    """
    gradient.mul_(scale)
    _decay(theta, 1 - lr * weight_decay, layout, offset)
    first_moment.lerp_(gradient, 1 - beta1)
    second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step_size = lr / (1 - beta1**step)
    denominator = second_moment.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    return theta.addcdiv_(first_moment, denominator, value=-step_size), first_moment, second_moment


def _decay(theta: Tensor, factor: float, layout: Layout, offset: int) -> None:
    if factor != 1:
        for low, high in _decayed(layout, offset, theta.numel()):
            theta[low:high].mul_(factor)


def _decayed(layout: Layout, offset: int, numel: int) -> Iterator[tuple[int, int]]:
    """Where the slice holds elements of tensors of two or more dimensions, counted from its start."""
    for tensor, low, high in layout.overlapping(offset, offset + numel):
        if len(tensor.shape) >= 2:
            yield low - offset, high - offset
