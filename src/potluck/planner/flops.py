"""Work of a decoder-only transformer: floating-point operations and bytes of one inner step, from its dimensions.

    P(r, h) = 2 d n_q h d_h + 2 d n_kv h d_h + m d r d_ff + 2 d      parameters of a layer; m = 3 gated, 2 not
    forward  = 2 P + 2 S n_q h d_h                                   FLOPs per token and layer
    backward = 2 x forward for a trained layer; for a frozen one above a trained one 1 x its weights' part and 2 x its
               attention's, whose operands are both activations; nothing below the lowest trained layer
    recompute adds 1 x forward where there is a backward pass

r is the share of the feed-forward part that is held, h that of the heads. Attention is causal: a token meets S / 2
keys on average. The output matrix is 2 d V more per token forward. Narayanan et al. 2021, arXiv:2104.04473, count
full attention and no grouped queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.planner.memory import ModelDims, kept_bytes
from potluck.types.params import type_bytes

adamw_passes = 7
"""Reads of parameter, gradient and two moments; writes of parameter and moments."""
logits_passes = 4
"""Logits written and read by the loss, their gradient written and read."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Which parts of a model are trained: all, unless said otherwise."""

    layers: frozenset[int] | None = None  # None for all
    embedding: bool = True
    head: bool = True

    def has(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def lowest(self, num_layers: int) -> int:
        """The first layer with a backward pass: -1 for the embedding, num_layers for the head or nothing."""
        if self.embedding:
            return -1
        return next((i for i in range(num_layers) if self.has(i)), num_layers)


everything = Trained()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one step, by class of operation."""

    gemm_flops: float
    attention_flops: float
    elementwise_bytes: float
    optimizer_bytes: float
    num_gemms: int

    @property
    def flops(self) -> float:
        return self.gemm_flops + self.attention_flops


def layer_params(dims: ModelDims, *, ff_share: float = 1.0, head_share: float = 1.0) -> float:
    """P(r, h) of the module's docstring."""
    d, num_matrices = dims.hidden_dim, 3 if dims.is_gated else 2
    attention = 2 * d * head_share * (dims.query_dim + dims.kv_dim)
    return attention + num_matrices * d * ff_share * dims.ff_dim + 2 * d


def forward_flops(
    dims: ModelDims, seq_len: int, *, ff_share: float = 1.0, head_share: float = 1.0
) -> tuple[float, float]:
    """Per token and layer: with the weights, and between activations in attention."""
    weights = 2 * layer_params(dims, ff_share=ff_share, head_share=head_share)
    return weights, 2 * seq_len * head_share * dims.query_dim


def step_work(
    dims: ModelDims,
    *,
    seq_len: int,
    num_tokens: int,
    precision: str = "fp32",
    trained: Trained = everything,
    recompute: bool = False,
    num_trained_params: int | None = None,
) -> Work:
    """Forward, backward and optimizer of `num_tokens` tokens. `num_trained_params`: None for all of `dims`."""
    weights, products = forward_flops(dims, seq_len)
    lowest = trained.lowest(dims.num_layers)
    gemm = attention = 0.0
    num_gemm_passes = num_backward = 0
    for layer in range(dims.num_layers):
        is_reached = layer >= lowest
        passes = 1 + (2 if trained.has(layer) else 1) * is_reached + (recompute and is_reached)
        gemm += passes * weights
        attention += (1 + 2 * is_reached + (recompute and is_reached)) * products
        num_gemm_passes += passes
        num_backward += is_reached
    head_passes = 1 + trained.head + (lowest < dims.num_layers)  # a gradient of its own, one for what is below
    gemm += head_passes * 2 * dims.hidden_dim * dims.vocab_size
    # What a layer keeps is written and read back, and so is a gradient of the same size.
    traffic = (2 * dims.num_layers + 2 * num_backward) * kept_bytes(dims, precision)
    logits = (logits_passes if head_passes > 1 else logits_passes // 2) * type_bytes * dims.vocab_size
    held = dims.num_params if num_trained_params is None else num_trained_params
    return Work(
        gemm_flops=gemm * num_tokens,
        attention_flops=attention * num_tokens,
        elementwise_bytes=(traffic + logits) * num_tokens,
        optimizer_bytes=float(adamw_passes * type_bytes * held),
        num_gemms=(7 if dims.is_gated else 6) * num_gemm_passes + head_passes,
    )
