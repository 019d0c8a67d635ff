"""Gradients of single records, of the factors B of adapters.

    y_t = B x_t                      x_t = A h_t, what B is given of token t
    dL_i/dB = sum_t g_t x_t^T        over the tokens of record i; g_t = dL_i/dy_t

While they are wanted each record multiplies with a copy of B of its own, so that what autograd gives to the copies are
these sums. That holds where the records of a batch lie along the first axis and do not see each other, and it is exact
with activations that are computed again, and with tied weights, which no adapter touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from potluck.types.errors import ModelError


def record_gradients(layers: Sequence[nn.Linear], losses: Callable[[], Tensor], num_records: int) -> list[Tensor]:
    """Of the weight of each layer, fp32 [num_records, outputs, inputs]. `losses` gives that of each: [num_records].

    ModelError where a layer is given something else than tokens of so many records.
    """
    with own_copies(layers, num_records) as copies:
        losses().sum().backward()
    return [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]


@contextmanager
def own_copies(layers: Sequence[nn.Linear], num_records: int) -> Iterator[list[Tensor]]:
    """In it each record multiplies with its own copy of a layer's weight, [num_records, outputs, inputs]."""
    copies = [
        layer.weight.detach().expand(num_records, -1, -1).clone().requires_grad_() for layer in layers
    ]  # fmt: skip
    try:
        for layer, copy in zip(layers, copies, strict=True):
            layer.forward = _multiplying(layer, copy)
        yield copies
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _multiplying(layer: nn.Linear, copy: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # the model is asked something, of which no gradient is wanted
            return linear(x, layer.weight, layer.bias)
        if x.dim() != 3 or len(x) != len(copy):
            raise ModelError(
                f"an adapter is given {list(x.shape)} where {len(copy)} records of tokens were to come, so that "
                "they cannot be told apart in this model; train it without strategy.privacy, or adapt other layers"
            )
        y = torch.matmul(x, copy.transpose(-1, -2))
        return y if layer.bias is None else y + layer.bias

    return forward
