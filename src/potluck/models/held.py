"""Frozen layers whose matrices are held in bf16 or int8 and multiplied in the precision of the activations.

    y = (x Q^T) * s + b        dx = (dy * s) Q        Q as it is held, s one fp32 scale for each output of int8 weights

Q is turned into the activations' number format for one product and a few rows at a time, and again in the backward
pass, so there is never a second copy of the model in memory. Q has no gradient.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.pytorch_utils import Conv1D

BLOCK_BYTES = 64 << 20
"""Of a matrix in the activations' format at a time."""
SCALE = "weight_scale"
"""The name, beside `weight`, of the scales of an int8 matrix: fp32 [outputs]."""


class HeldLinear(nn.Linear):
    """weight: bf16 or int8 [out_features, in_features], frozen."""

    weight_scale: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        return _with_bias(product(input, self.weight, self.weight_scale), self.bias)


class HeldConv1D(Conv1D):
    """GPT-2's linear layer. weight: bf16 or int8 [inputs, outputs], frozen."""

    weight_scale: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return _with_bias(product(x, self.weight.T, self.weight_scale), self.bias)


class HeldEmbedding(nn.Embedding):
    """weight: bf16 [num_embeddings, embedding_dim], frozen. The rows that are read come out in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, self.padding_idx).float()


_held_kinds: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: HeldLinear, Conv1D: HeldConv1D, nn.Embedding: HeldEmbedding,
}  # fmt: skip


def hold(module: nn.Module) -> None:
    """Make a layer one that multiplies by what it holds: its parameters stay for the caller to replace."""
    module.__class__ = _held_kinds[type(module)]
    if not isinstance(module, nn.Embedding):
        module.register_parameter(SCALE, None)


def can_hold(module: nn.Module) -> bool:
    """Whether `hold` knows this very kind: a subclass may do anything with its weight."""
    return type(module) in _held_kinds


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def output_axis(module: nn.Module) -> int:
    """Which axis of a linear layer's weight counts its outputs."""
    return 1 if isinstance(module, Conv1D) else 0


def quantised(weight: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Symmetric int8, one scale for each output: q = round(w / s), s = max |w| / 127. int8 as `weight`; [outputs]."""
    whole = weight.float()
    scale = whole.abs().amax(dim=1 - axis) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (whole / scale.unsqueeze(1 - axis)).round_().clamp_(-127, 127).to(torch.int8), scale


def dequantised(q: Tensor, scale: Tensor, axis: int) -> Tensor:
    """fp32, as `q`."""
    return q.float() * scale.unsqueeze(1 - axis)


def product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """x W^T, without a gradient of W. x [..., inputs], weight [outputs, inputs], scale [outputs]. Autocast applies."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return _Product.apply(x, weight, scale, dtype)  # pyright: ignore[reportReturnType]


class HeldHead:
    """`models.loss.HeadProducts` with a head that is held: for chunks of logits. There is no weight gradient."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return product(hidden.float(), weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return product(grad.float(), weight.T)

    def add_weight_gradient(self, into: Tensor, grad: Tensor, hidden: Tensor) -> None:
        raise AssertionError("a frozen head has no gradient")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.scale, ctx.dtypes = weight, scale, (x.dtype, dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _multiply(x.to(dtype), weight, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, dtype = ctx.dtypes
        with torch.autocast(grad.device.type, enabled=False):
            g = grad.to(dtype)
            if ctx.scale is not None:
                g = g * ctx.scale.to(dtype)
            return _multiply(g, ctx.weight.T, None).to(given), None, None, None


def _multiply(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """(x W^T) * s in the format of x, as much of W at a time as `BLOCK_BYTES` have room for."""
    outputs, inputs = weight.shape
    if weight.dtype == x.dtype:
        y = x @ weight.T
    elif weight.is_contiguous():
        blocks = _blocks(outputs, BLOCK_BYTES // (x.element_size() * max(inputs, 1)))
        if len(blocks) == 1:
            y = x @ _in_format(weight, x.dtype).T
        else:
            y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
            for rows in blocks:
                y[..., rows] = x @ _in_format(weight[rows], x.dtype).T
    else:  # stored the other way round: in blocks of inputs, whose products add up
        stored = weight.T
        first, *others = _blocks(inputs, BLOCK_BYTES // (x.element_size() * max(outputs, 1)))
        y = x[..., first] @ _in_format(stored[first], x.dtype)
        for rows in others:
            y += x[..., rows] @ _in_format(stored[rows], x.dtype)
    return y if scale is None else y.mul_(scale.to(y.dtype))


def _blocks(size: int, most: int) -> list[slice]:
    most = max(1, most)
    return [slice(start, min(start + most, size)) for start in range(0, size, most)]


_scratch = threading.local()
"""One matrix in the activations' format for each thread. Asked for and given back each time, between activations that
stay, it leaves holes among them: twice the memory of a step were measured."""


def _in_format(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Until the next call in this thread."""
    if weight.device.type != "cpu":
        return weight.to(dtype)
    memory: Tensor | None = getattr(_scratch, "memory", None)
    if memory is None or memory.nbytes < weight.numel() * dtype.itemsize:
        memory = _scratch.memory = torch.empty(weight.numel() * dtype.itemsize, dtype=torch.uint8)
    return memory[: weight.numel() * dtype.itemsize].view(dtype).view(weight.shape).copy_(weight)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias.to(y.dtype))
