"""Which products a micro-batch asks for, read off a model that has shapes and no values.

    each linear layer from d to f      [T, d] [d, f],  [T, f] [f, d]  and  [d, T] [T, f], or its transpose where the
                                       layer stores W'
    the language-model head            the same for a few rows at a time, where logits are large

for T tokens. A 70 B-parameter model takes no memory. Layers that are applied more or less than once in a pass (experts)
are counted once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from potluck.models.build import skeleton
from potluck.models.loss import MAX_WHOLE_BYTES, even_rows
from potluck.strategies.sub_gemm.head import LOGITS_BYTES
from potluck.strategies.sub_gemm.offload import Offload
from potluck.strategies.sub_gemm.product import ProductKind
from potluck.types.params import type_bytes


class Asked(NamedTuple):
    """C[m, q] = A[m, n] B[n, q]."""

    m: int
    n: int
    q: int
    kind: ProductKind
    times: int = 1  # in one pass, with the same weight


def asked_products(
    model_config: dict[str, Any], *, num_tokens: int, logits_bytes: int = LOGITS_BYTES
) -> Counter[Asked]:
    """How many layers ask for each in a forward and backward pass over `num_tokens`. ModelError."""
    module: Any = skeleton(model_config)
    layers = Offload(module).layers
    head = module.get_output_embeddings()
    found: Counter[Asked] = Counter()
    for layer in layers.values():
        chunk = _logits_rows(layer, num_tokens, logits_bytes) if layer is head else num_tokens
        whole, rest = divmod(num_tokens, chunk)
        for tokens, count in ((chunk, whole), (rest, 1)):
            for product in _of_layer(layer, tokens) if tokens and count else ():
                found[product._replace(times=count)] += 1
    return found


def _of_layer(layer: Any, tokens: int) -> tuple[Asked, Asked, Asked]:
    is_transposed = isinstance(layer, nn.Linear)
    into, out = reversed(layer.weight.shape) if is_transposed else layer.weight.shape
    rows, cols = (out, into) if is_transposed else (into, out)
    return (
        Asked(tokens, into, out, "forward"),
        Asked(tokens, out, into, "input_gradient"),
        Asked(rows, tokens, cols, "weight_gradient"),
    )


def _logits_rows(head: Any, num_tokens: int, logits_bytes: int) -> int:
    """Tokens whose logits are held at a time, as `models.loss.TokenLoss` has them for a plain linear head."""
    row_bytes = type_bytes * head.weight.shape[0]
    if head.bias is not None or num_tokens * row_bytes <= min(MAX_WHOLE_BYTES, logits_bytes):
        return num_tokens
    return even_rows(num_tokens, max(1, logits_bytes // row_bytes))
