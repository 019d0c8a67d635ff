"""What a method adds to the gradients of a task's steps: a pull to where it began, a shift that is always the same, and
the gradient of lambda sum ||X|| ||Y|| over pairs (X, Y) of the model's tensors.

    g <- clip(g + pull (w - anchor) + [lambda ||Y|| X / ||X||]) + shift

Vectors are read slice by slice from where they lie. Where X is zero, so is what is added to its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.models.flat import FlatModel
from potluck.types.vector import Vector, slice_numel


class Steering:
    """`anchor` and `shift` are as long as the model. Used between a backward pass and the optimizer's step."""

    def __init__(
        self, flat: FlatModel, *, anchor: Vector | None, pull: float, shift: Vector | None,
        pressed: Sequence[tuple[int, int]] = (), press: float = 0.0,
    ) -> None:  # fmt: skip
        self._flat, self._anchor, self._pull, self._shift = flat, anchor, pull, shift
        self._pressed, self._press = pressed, press

    def before_clipping(self) -> None:
        self._press_down()
        anchor, flat = self._anchor, self._flat
        if anchor is None or not self._pull:
            return
        self._add(lambda a, b: (flat.vector[a:b] - anchor.read(a, b).to(flat.device)).mul_(self._pull))

    @torch.no_grad()
    def _press_down(self) -> None:
        for pair in self._pressed:
            one, other = (self._flat.parameters[i] for i in pair)
            norms = [torch.linalg.vector_norm(each) for each in (one, other)]
            for each, own, its in ((one, *norms), (other, *reversed(norms))):
                if each.grad is not None and own > 0:
                    each.grad.add_(each, alpha=float(self._press * its / own))

    def after_clipping(self) -> None:
        shift, flat = self._shift, self._flat
        if shift is not None:
            self._add(lambda a, b: shift.read(a, b).to(flat.device))

    def _add(self, read: Callable[[int, int], Tensor]) -> None:
        with torch.no_grad():
            for spec, parameter in zip(self._flat.layout, self._flat.parameters, strict=True):
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = parameter.grad.view(-1)
                for start in range(0, spec.numel, slice_numel):
                    stop = min(start + slice_numel, spec.numel)
                    grad[start:stop] += read(spec.offset + start, spec.offset + stop)
