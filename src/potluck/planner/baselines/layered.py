"""A model as equal layers, and how long pieces of work take one after the other: what all baselines share.

A device with d seconds of download, c of work and u of upload in k pieces is done after

    t = r + (d + c + u) / k + (1 - 1/k) max(d, c, u)

which is the rule of `planner/tiles/plan.py`. Counted are the products of linear layers alone, forward, input gradient
and weight gradient: 6 FLOPs for each parameter and token, as many as in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayeredModel:
    """A decoder, and what one optimizer step trains it on. `wire_bytes`: an element of activations or gradients."""

    num_layers: int
    layer_params: float  # of its linear layers
    head_params: float  # of the language-model head
    hidden_dim: int
    num_heads: int
    num_sequences: int
    seq_len: int
    wire_bytes: float = 2.0

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_len

    @property
    def params(self) -> float:
        return self.num_layers * self.layer_params + self.head_params

    @property
    def flops(self) -> float:
        return flops_per_param * self.params * self.num_tokens

    @property
    def sequence_bytes(self) -> float:
        """Of one sequence's activations between two layers."""
        return self.seq_len * self.hidden_dim * self.wire_bytes


flops_per_param = 6.0
"""2 forward, 2 for the input gradient, 2 for the weight gradient, for each token."""
weight_bytes, state_bytes = 4.0, 12.0
"""Of one parameter: bf16 weight and gradient; fp32 weight and two moments, which replicas share out among them."""


@dataclass(frozen=True, kw_only=True)
class BaselineTime:
    """One optimizer step. Bytes are means over the devices in use.

    `needs_bytes` is what `layout` takes on its fullest device; where that is more than the devices have, no layout fits
    and `seconds` is what the step would take if they had it. `least_bytes` is that of the layout with the least, which
    may be slower.
    """

    name: str
    seconds: float
    layout: str  # in a few words
    num_devices_used: int
    down_bytes_per_device: float
    up_bytes_per_device: float
    needs_bytes: float
    least_bytes: float
    has_bytes: float
    assumptions: str

    @property
    def fits(self) -> bool:
        return self.needs_bytes <= self.has_bytes


def held_bytes(params: float, num_replicas: int) -> float:
    """Weights, gradients and a share of the optimizer's state."""
    return params * (weight_bytes + state_bytes / num_replicas)


def overlapped_s(down_s: float, compute_s: float, up_s: float, *, num_pieces: int, fixed_s: float = 0.0) -> float:
    """t of the module's docstring."""
    total, most = down_s + compute_s + up_s, max(down_s, compute_s, up_s)
    return fixed_s + most + (total - most) / num_pieces


def ring_bytes(num_members: int, num_bytes: float) -> float:
    """That each member of a ring sends, and receives, to sum `num_bytes` over all: 2 (p - 1) / p of them."""
    return 2.0 * (num_members - 1) / num_members * num_bytes
