"""Adafactor: an AdamW without first moment whose second moment is a row and a column of each matrix.

    R <- beta2 R + (1 - beta2) mean_columns(g^2)      C <- beta2 C + (1 - beta2) mean_rows(g^2)
    v = R C^T / mean(R) / (1 - beta2^t)               u = g / (sqrt(v) + eps)
    w <- w (1 - lr decay) - lr u / max(1, rms(u))

Shazeer and Stern 2018, arXiv:1804.04235, with AdamW's constant beta2 and absolute learning rate in the place of their
schedules. What has one dimension keeps v whole. State takes rows + columns of a matrix, not twice their product.

Weights may be bfloat16: everything is computed in fp32, a few rows at a time, and rounded at random with the chance of
each neighbour as its nearness (so that steps far below a weight's precision count on average). That chance is a
function of the group's `seed`, the step and the tensor, so a replay gives the same bits. Whoever averages over workers
gives each of them seeds of its own: noise that all have in common does not average out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

slice_numel = 1 << 22
"""Elements that are held in fp32 at a time."""
_smallest = 1e-30
"""Added to squares: rows without a gradient have a second moment too."""


def factor_shapes(shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """What is kept for a tensor, and in which shape."""
    if len(shape) < 2:
        return {"second": tuple(shape)}
    return {"row": (shape[0],), "column": (math.prod(shape[1:]),)}


class Adafactor(torch.optim.Optimizer):
    """`state[p]` holds `step`, fp32 [], and the fp32 tensors of `factor_shapes`; whoever makes them may do so first."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, beta2: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "seed": 0})
        self._beta2, self._eps = beta2, eps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "a step is taken once"
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, group, index)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], index: int) -> None:
        lr = group["lr"]
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
            for name, shape in factor_shapes(parameter.shape).items():
                state[name] = torch.zeros(shape, device=parameter.device)
        state["step"] += 1
        step = int(state["step"])
        assert parameter.grad is not None
        weights, grads = _rows(parameter.data), _rows(parameter.grad)
        second = self._second_moment(state, grads, 1.0 - self._beta2**step)
        squares = 0.0
        for rows in _slices(grads):
            update = grads[rows].float() / (second(rows).sqrt_().add_(self._eps))
            squares += float(update.square_().sum(dtype=torch.float64))
        step_size = lr / max(1.0, math.sqrt(squares / max(grads.numel(), 1)))
        generator = torch.Generator(parameter.device).manual_seed(hash((group["seed"], step, index)) & (2**63 - 1))
        for rows in _slices(grads):
            update = grads[rows].float() / (second(rows).sqrt_().add_(self._eps))
            new = weights[rows].float().mul_(1.0 - lr * group["weight_decay"]).sub_(update, alpha=step_size)
            weights[rows] = new if weights.dtype == torch.float32 else round_at_random(new, generator)

    def _second_moment(self, state: dict[str, Tensor], grads: Tensor, correction: float) -> Callable[[slice], Tensor]:
        """Take up the gradients; gives v of some rows, corrected for its start at zero, in memory of its own."""
        fresh = 1.0 - self._beta2
        if "second" in state:
            kept = _rows(state["second"])
            kept.lerp_(grads.float().square().add_(_smallest), fresh)
            return lambda rows: kept[rows] / correction
        row, column = state["row"], state["column"]
        by_row, by_column = torch.empty_like(row), torch.zeros_like(column)
        for rows in _slices(grads):
            squared = grads[rows].float().square().add_(_smallest)
            by_row[rows] = squared.mean(dim=1)
            by_column += squared.sum(dim=0)
        row.lerp_(by_row, fresh)
        column.lerp_(by_column / len(grads), fresh)
        scale = correction * row.mean()
        return lambda rows: (row[rows, None] / scale) * column


def round_at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """bfloat16 values whose mean is x, fp32: one of the two neighbours, each as often as x is near to it."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = (x.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)


def _rows(tensor: Tensor) -> Tensor:
    """As [rows, columns]; what has one dimension as one column."""
    return tensor.view(tensor.shape[0], -1) if tensor.dim() >= 1 else tensor.view(1, 1)


def _slices(matrix: Tensor) -> Iterator[slice]:
    step = max(1, slice_numel // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)
