"""A model whose matrix products are computed elsewhere; everything else of it runs here, as it would.

    y = x W                 x [tokens, in], W [in, out], for every nn.Linear and transformers' Conv1D
    dx = dy W'              only if somebody needs it
    dW = x' dy              only if W is trained: dy' x where the layer stores W' (nn.Linear)

Each goes as a `Product` to the multiplier of the moment; outside of `multiplying` the model is the plain one. Factors
are views, also transposed ones, whose name then ends in ".T". An activation has one name where several layers read it,
and in the weight gradient of each. Bias, embedding, norms, softmax, loss and optimizer are native.

Xue et al. 2025, arXiv:2512.22142. Differences: works under autocast and activation checkpointing, where a block's last
product is not repeated, and takes the head's products of a cross entropy made in parts (`models.loss`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from potluck.models.loss import NativeHead
from potluck.strategies.sub_gemm.product import Matrix, Multiplier, Product, ProductKind
from potluck.types.errors import ModelError


class Offload:
    """`module` with its layers' products redirected. Built and used in one thread; the module stays as it is else.

    ModelError if the module has no layer to redirect, or one with parameters of another type than fp32.
    """

    def __init__(self, module: nn.Module) -> None:
        self._multiplier: Multiplier | None = None
        self._scope = ""
        self._calls: Counter[str] = Counter()
        self._last_input: tuple[weakref.ref[Tensor], int, str] | None = None
        self.layers: dict[str, nn.Module] = {}
        for name, child in module.named_modules():
            if _is_linear(child):
                if child.weight.dtype != torch.float32:
                    raise ModelError(f"{name} has parameters in {child.weight.dtype} and only fp32 ones are offloaded")
                self.layers[name] = child
                child.forward = _redirected(self, child, name)
        if not self.layers:
            raise ModelError("the model has no linear layer to offload; use another strategy")

    @contextmanager
    def multiplying(self, multiplier: Multiplier, *, micro_batch: int) -> Iterator[None]:
        """While this lasts, forward and backward passes multiply there. Activations are named after `micro_batch`."""
        assert self._multiplier is None, "one micro-batch at a time"
        self._multiplier, self._scope = multiplier, f"{micro_batch}/"
        try:
            yield
        finally:
            self._multiplier, self._last_input = None, None
            self._calls.clear()

    @property
    def is_multiplying(self) -> bool:
        return self._multiplier is not None

    def multiply(self, a: Matrix, b: Matrix, kind: ProductKind, layer: str) -> Tensor:
        """fp32 [m, q]."""
        assert self._multiplier is not None, "a backward pass after its micro-batch"
        product = Product(a=a, b=b, kind=kind, layer=layer)
        result = self._multiplier(product)
        m, _, q = product.shape
        assert result.shape == (m, q) and result.dtype == torch.float32, f"{layer} came back as {result.shape}"
        return result

    def call(self, layer: str) -> str:
        """A name for one more call of this layer: a second one within a micro-batch has other activations."""
        self._calls[layer] += 1
        return f"{self._scope}{layer}#{self._calls[layer]}"

    def input_name(self, values: Tensor, call: str) -> str:
        """`call` with ".input", or the name that the layer before had for this same tensor."""
        if self._last_input is not None:
            last, version, name = self._last_input
            if last() is values and values._version == version:
                return name
        name = f"{call}.input"
        self._last_input = (weakref.ref(values), values._version, name)
        return name

    def head(self, module: nn.Module) -> OffloadedHead:
        """The products of that layer, for a loss that multiplies with its weight itself."""
        return OffloadedHead(self, next(name for name, layer in self.layers.items() if layer is module))


class Layer:
    """One call of a linear layer. `weight` is W' [out, in] where `is_transposed`, W [in, out] else."""

    def __init__(self, offload: Offload, name: str, call: str, input_name: str, *, is_transposed: bool) -> None:
        self._offload, self._name, self._call, self._input_name = offload, name, call, input_name
        self.is_transposed = is_transposed

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._offload.multiply(self._input(x), self._weight(x, weight), "forward", self._name)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._offload.multiply(self._grad(grad), self._weight(grad, weight).T, "input_gradient", self._name)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """In the layout that the layer stores its weight in."""
        a, b = self._input(x), self._grad(grad)
        if self.is_transposed:
            a, b = b, a
        return self._offload.multiply(a.T, b, "weight_gradient", self._name)

    def _input(self, x: Tensor) -> Matrix:
        return Matrix(x, self._input_name)

    def _grad(self, grad: Tensor) -> Matrix:
        return Matrix(grad, f"{self._call}.output_gradient")

    def _weight(self, like: Tensor, weight: Tensor) -> Matrix:
        """W [in, out], in the type of the activations."""
        stored = Matrix(weight.detach().to(like.dtype), f"{self._name}.weight", is_weight=True)
        return stored.T if self.is_transposed else stored


class OffloadedHead:
    """Implements `models.loss.HeadProducts` with one layer's products: a call for each chunk of rows."""

    def __init__(self, offload: Offload, name: str) -> None:
        self._offload, self._name = offload, name
        self._native = NativeHead()
        self._layer: Layer | None = None

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        self._layer = None
        if not self._offload.is_multiplying:
            return self._native.logits(hidden, weight)
        call = self._offload.call(self._name)
        self._layer = Layer(self._offload, self._name, call, f"{call}.input", is_transposed=True)
        return self._layer.forward(hidden, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return (self._layer or self._native).input_gradient(grad, weight)

    def add_weight_gradient(self, into: Tensor, grad: Tensor, hidden: Tensor) -> None:
        if self._layer is None:
            self._native.add_weight_gradient(into, grad, hidden)
        else:
            into += self._layer.weight_gradient(grad, hidden)


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _redirected(offload: Offload, module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The module's forward: the plain one, or the product elsewhere and the bias here."""
    plain: Callable[[Tensor], Tensor] = module.forward
    is_transposed = isinstance(module, nn.Linear)

    def forward(x: Tensor) -> Tensor:
        if not offload.is_multiplying:
            return plain(x)
        call = offload.call(name)
        layer = Layer(offload, name, call, offload.input_name(x, call), is_transposed=is_transposed)
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        rows = autocast(x.reshape(-1, x.shape[-1]))
        held = _Hold.apply(rows, weight, layer)
        y = _Forward.apply(held, rows.detach(), weight.detach(), bias, layer)
        assert isinstance(y, Tensor)
        return y.view(*x.shape[:-1], y.shape[-1])

    return forward


def autocast(values: Tensor) -> Tensor:
    """In the type that autocast gives factors of products here. ModelError for fp16, which no product has."""
    kind = values.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return values
    dtype = torch.get_autocast_dtype(kind)
    if dtype != torch.bfloat16:
        raise ModelError(f"products under autocast to {dtype} are not offloaded; use bf16-mixed or fp32")
    return values.to(dtype)


class _Hold(torch.autograd.Function):
    """Keeps the factors for the backward pass, and gives a tensor [tokens, out] that takes no memory.

    Apart from the product, so that a recomputation (activation checkpointing), which ends as soon as it has the last
    tensor that was kept, does not compute a product whose result nobody reads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.layer = layer
        num_out = weight.shape[0 if layer.is_transposed else 1]
        return x.new_zeros(()).expand(x.shape[0], num_out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        layer: Layer = ctx.layer
        grad_x = layer.input_gradient(grad, weight).to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = layer.weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _Forward(torch.autograd.Function):
    """The product itself and the bias. The gradient of the product goes to what `_Hold` gave."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        y = layer.forward(x, weight)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        (grad,) = grad_outputs
        grad_held = grad if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        return grad_held, None, None, grad_bias, None
