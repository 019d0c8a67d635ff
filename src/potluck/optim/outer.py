"""Outer optimizers: operations on slices of the flat model, for `ParamStore.apply`.

Each takes fp32 slices [n] that begin at element `offset` of the model and returns new slices; none keeps or changes
what it is given.

    nesterov   m <- mu m + g;  theta <- theta - lr (g + mu m)       torch.optim.SGD(nesterov=True, dampening=0)
    sgd        theta <- theta - lr g
    adamw      torch.optim.AdamW, decay on tensors with two or more dimensions only
    axpy       theta <- theta + scale x
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.types.params import Layout


def nesterov(
    theta: Tensor, momentum: Tensor, delta: Tensor, *, lr: float, momentum_coefficient: float, layout: Layout, offset: int
) -> tuple[Tensor, Tensor]:
    """New parameters and momentum. Momentum starts at zeros, where torch's first step sets it to the gradient."""
    moved = momentum.mul(momentum_coefficient).add_(delta)
    step = delta.add(moved, alpha=momentum_coefficient)
    return theta.sub(step, alpha=lr), moved


def sgd(theta: Tensor, gradient: Tensor, *, lr: float, scale: float, layout: Layout, offset: int) -> tuple[Tensor]:
    """One plain step with the gradient `scale * gradient`."""
    return (theta.sub(gradient, alpha=lr * scale),)


def axpy(theta: Tensor, x: Tensor, *, scale: float, layout: Layout, offset: int) -> tuple[Tensor]:
    """theta + scale x."""
    return (theta.add(x, alpha=scale),)


def adamw(
    theta: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float,
    layout: Layout,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """New parameters and moments after step number `step` (from 1) with the gradient `scale * gradient`."""
    g = gradient.mul(scale)
    decayed = theta.sub(theta * decay_mask(layout, offset, theta.numel()), alpha=lr * weight_decay)
    m = first.lerp(g, 1.0 - beta1)
    v = second.mul(beta2).addcmul_(g, g, value=1.0 - beta2)
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    denominator = v.sqrt().div_(correction2**0.5).add_(eps)
    return decayed.addcdiv_(m, denominator, value=-lr / correction1), m, v


def decay_mask(layout: Layout, offset: int, numel: int) -> Tensor:
    """fp32 [numel]: 1 where an element of the model from `offset` on belongs to a tensor with two or more dimensions."""
    mask = torch.zeros(numel)
    for spec in layout:
        if len(spec.shape) >= 2 and spec.offset < offset + numel and spec.stop > offset:
            mask[max(spec.offset - offset, 0) : spec.stop - offset] = 1.0
    return mask
