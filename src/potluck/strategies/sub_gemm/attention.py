"""The products of attention, computed elsewhere: for each sequence and each head of keys and values

    S = Q K' / sqrt(dim)        O = softmax(S + mask) V        dP = dO V'    dV = P' dO    dQ = dS K    dK = dS' Q

with the query heads that share keys and values stacked in the rows of Q. Unlike fused attention this holds P, fp32
[heads, queries, keys], until the backward pass. Through the attention interface of transformers (4.53 and later).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from potluck.strategies.sub_gemm.offload import Offload, autocast, transposed
from potluck.strategies.sub_gemm.product import Matrix
from potluck.types.errors import ModelError

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
        raise ModelError(
            f"{type(module).__name__} does not let its attention be replaced; leave attention on the head"
        )
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
    """query [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] -> [batch, queries, heads, dim]."""
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
    scores = _products(offload, name, stacked, key.flatten(0, 1).mT, f"{call}.query", f"{call}.key.T")
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
    mixed = _products(offload, name, shares, value.flatten(0, 1), f"{call}.shares", f"{call}.value")
    return mixed.to(query.dtype).view(batch, heads, queries, dim).transpose(1, 2).contiguous(), None


def _products(offload: Offload, layer: str, a: Tensor, b: Tensor, a_name: str, b_name: str) -> Tensor:
    result = _Products.apply(autocast(a), autocast(b), offload, layer, a_name, b_name)
    assert isinstance(result, Tensor)
    return result


class _Products(torch.autograd.Function):
    """a [count, m, n] times b [count, n, q], one product each."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, offload: Offload, layer: str, a_name: str, b_name: str
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.multiply = lambda x, y: offload.multiply(x, y, "attention", layer)
        ctx.names = a_name, b_name
        return torch.stack([ctx.multiply(x, y) for x, y in zip(*_pairs(ctx, a, b), strict=True)]).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad[:2]
        grads = [Matrix(part, f"{ctx.names[0]}.output_gradient[{i}]") for i, part in enumerate(grad)]
        grads_a: list[Tensor] = []
        grads_b: list[Tensor] = []
        for x, y, part in zip(*_pairs(ctx, a, b), grads, strict=True):
            if needs_a:
                grads_a.append(ctx.multiply(part, transposed(y)))
            if needs_b:
                grads_b.append(ctx.multiply(transposed(x), part))
        grad_a = torch.stack(grads_a).to(a.dtype) if needs_a else None
        grad_b = torch.stack(grads_b).to(b.dtype) if needs_b else None
        return grad_a, grad_b, None, None, None, None


def _pairs(ctx: Any, a: Tensor, b: Tensor) -> tuple[list[Matrix], list[Matrix]]:
    a_name, b_name = ctx.names
    return _named(a, a_name), _named(b, b_name)


def _named(stacked: Tensor, name: str) -> list[Matrix]:
    """`name` with the place in the stack before a final ".T"."""
    stem, suffix = (name[:-2], ".T") if name.endswith(".T") else (name, "")
    return [Matrix(part, f"{stem}[{place}]{suffix}") for place, part in enumerate(stacked)]
