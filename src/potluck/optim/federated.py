"""Outer optimizers of federated averaging, for `Fleet.apply` like those of optim/outer.py.

The gradient is d = scale * delta, delta = theta - theta_i averaged over workers: it points down, as gradients do.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from potluck.types.params import Layout

Adaptive = Literal["adam", "yogi", "adagrad"]


def heavy_ball(
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
    """m <- beta m + d; theta <- theta - lr m: `torch.optim.SGD(momentum=beta)`. FedAvgM, Hsu et al. 2019,
    arXiv:1909.06335.
    """
    momentum.mul_(momentum_coefficient).add_(delta, alpha=scale)
    return theta.add_(momentum, alpha=-lr), momentum


def adaptive(
    theta: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    delta: Tensor,
    *,
    rule: Adaptive,
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    is_first: bool,
    scale: float = 1.0,
    layout: Layout,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """FedAdagrad, FedAdam and FedYogi: Reddi et al. 2020, arXiv:2003.00295, Algorithm 2. No bias correction.

    m <- beta1 m + (1 - beta1) d
    v <- v + d^2                                   adagrad
         beta2 v + (1 - beta2) d^2                 adam
         v - (1 - beta2) d^2 sign(v - d^2)         yogi
    theta <- theta - lr m / (sqrt(v) + tau)        m = 0, v = tau^2 before the first
    """
    delta.mul_(scale)
    if is_first:
        second_moment.fill_(tau * tau)
    first_moment.lerp_(delta, 1 - beta1)
    squared = delta.square_()
    match rule:
        case "adagrad":
            second_moment.add_(squared)
        case "adam":
            second_moment.lerp_(squared, 1 - beta2)
        case "yogi":
            signs = (second_moment - squared).sign_()
            second_moment.addcmul_(squared, signs, value=beta2 - 1)
    denominator = second_moment.sqrt().add_(tau)
    return theta.addcdiv_(first_moment, denominator, value=-lr), first_moment, second_moment


def blend(x: Tensor, y: Tensor, *, a: float, b: float, layout: Layout, offset: int) -> tuple[Tensor]:
    """a x + b y."""
    return (y.mul_(b).add_(x, alpha=a),)
