"""The products of attention, computed elsewhere: for each sequence and each head of keys and values

    S = Q K' / sqrt(dim)        O = softmax(S + mask) V        dP = dO V'    dV = P' dO    dQ = dS K    dK = dS' Q

with the query heads that share keys and values stacked in the rows of Q. Unlike fused attention this holds P, fp32
[heads, queries, keys], until the backward pass. Through the attention interface of transformers (4.53 and later).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from potluck.strategies.sub_gemm.offload import Offload, autocast
from potluck.strategies.sub_gemm.product import Matrix
from potluck.types.errors import ModelError

Multiply = Callable[[Matrix, Matrix], Tensor]

implementation = "potluck_products"
_where = "_potluck_attention"


def redirect_attention(offload: Offload, module: nn.Module) -> None:
    """Send the products of every attention layer through `offload`. ModelError where that is not possible."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ModelError(
            "products of attention need transformers 4.53 or later; install it, or leave attention on the head"
        ) from error
    AttentionInterface.register(implementation, _attention)
    AttentionMaskInterface.register(implementation, sdpa_mask)
    found = {name: child for name, child in module.named_modules() if hasattr(child, "is_causal")}
    model: Any = module
    if found:
        model.set_attn_implementation(implementation)
    if not found or model.config._attn_implementation != implementation:
        raise ModelError(f"{type(module).__name__} does not let its attention be replaced; leave attention on the head")
    for name, child in found.items():
        setattr(child, _where, (offload, name))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [batch, heads, queries, dim], key, value [batch, kv_heads, keys, dim] -> [batch, queries, heads, dim]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    offload, name = getattr(module, _where)
    if not offload.is_multiplying:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise ModelError(f"attention with {option} is not offloaded; leave attention on the head")
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    call = offload.call(name)
    stacked = query.reshape(batch * kv_heads, heads // kv_heads * queries, dim)

    def multiply(a: Matrix, b: Matrix) -> Tensor:
        return offload.multiply(a, b, "attention", name)

    scores = _products(stacked, key.flatten(0, 1).mT, multiply, f"{call}.query", f"{call}.key.T")
    scores = scores.float().view(batch, heads, queries, keys) * (dim**-0.5 if scaling is None else scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and queries > 1:
        places = torch.arange(keys, device=query.device)
        attention_mask = places <= places[keys - queries :, None]
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    shares = drop(scores.softmax(-1), dropout, module.training).view(*stacked.shape[:2], keys)
    mixed = _products(shares, value.flatten(0, 1), multiply, f"{call}.shares", f"{call}.value")
    return mixed.to(query.dtype).view(batch, heads, queries, dim).transpose(1, 2).contiguous(), None


def _products(a: Tensor, b: Tensor, multiply: Multiply, a_name: str, b_name: str) -> Tensor:
    result = _Products.apply(autocast(a), autocast(b), multiply, a_name, b_name)
    assert isinstance(result, Tensor)
    return result


class _Products(torch.autograd.Function):
    """a [count, m, n] times b [count, n, q], one product each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, multiply: Multiply, a_name: str, b_name: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.multiply, ctx.names = multiply, (a_name, b_name)
        pairs = zip(_named(a, a_name), _named(b, b_name), strict=True)
        return torch.stack([multiply(x, y) for x, y in pairs]).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        a, b = ctx.saved_tensors
        multiply: Multiply = ctx.multiply
        a_name, b_name = ctx.names
        grads = _named(grad, f"{a_name}.output_gradient")
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            pairs = zip(grads, _named(b, b_name), strict=True)
            grad_a = torch.stack([multiply(part, y.T) for part, y in pairs]).to(a.dtype)
        if ctx.needs_input_grad[1]:
            pairs = zip(_named(a, a_name), grads, strict=True)
            grad_b = torch.stack([multiply(x.T, part) for x, part in pairs]).to(b.dtype)
        return grad_a, grad_b, None, None, None


def _named(stacked: Tensor, name: str) -> list[Matrix]:
    """`name` with the place in the stack, before a final ".T"."""
    stem, suffix = (name[:-2], ".T") if name.endswith(".T") else (name, "")
    return [Matrix(part, f"{stem}[{place}]{suffix}") for place, part in enumerate(stacked)]
