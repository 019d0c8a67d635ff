"""Attention over short sequences in fp32, for models that otherwise train in bf16 on a processor.

There, below 192 tokens, PyTorch's fused attention takes two to five times as long in bf16 as in fp32, nearly all of it
in the backward pass: a fifth of a step of adapters on SmolLM2 (docs/lab.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

implementation = "potluck_fp32_sdpa"
max_tokens = 191
"""Of sequences that are short: from the next on PyTorch's kernel works in larger blocks."""


def widen_attention(module: nn.Module) -> None:
    """Compute the attention of a `transformers` model over short sequences in fp32, whatever type its inputs have.

    A model without PyTorch's fused attention stays as it is, as does any where `transformers` has no registry of them.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:
        return
    model: Any = module
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return
    AttentionInterface.register(implementation, _attention)
    AttentionMaskInterface.register(implementation, sdpa_mask)
    model.set_attn_implementation(implementation)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [batch, heads, queries, dim], key, value [batch, kv_heads, keys, dim] -> [batch, queries, heads, dim]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.shape[-2] > max_tokens:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast(query.device.type, enabled=False):
        mixed, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return mixed.to(query.dtype), None
