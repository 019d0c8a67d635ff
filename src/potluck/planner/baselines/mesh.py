"""Two-dimensional tensor parallelism: D x T devices, the batch along one axis, the features of layers along the other.

Of each layer a device holds 1 / T and trains on 1 / D of the tokens. The T devices that share tokens sum activations
[tokens / D, d] in a ring twice in a layer's forward and twice in its backward pass, before either can go on; the D that
share weights sum gradients once, 2 (D - 1) / D of them each way:

    bytes each way, a device = 4 L 2 (T - 1)/T (tokens / D) d b  +  2 (D - 1)/D (params / T) b

T is a divisor of the number of heads and D the most that devices and sequences allow, or half of it, a quarter and so
on: the quickest of those. All devices get the same: the slowest link and processor in use bind everybody, and devices
are left out where that pays.

Zheng et al. 2022, arXiv:2201.12023 ("Alpa"): this is the part of their space that 2-D meshes have inside a layer, with
the sharding of Shoeybi et al. 2019, arXiv:1909.08053. Work and transfers of a layer overlap by the rule of layered.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.planner.baselines.layered import (
    BaselineTime,
    LayeredModel,
    flops_per_param,
    held_bytes,
    overlapped_s,
    ring_bytes,
)
from potluck.planner.tiles.device import TileDevice

assumptions = (
    "each layer on a grid of devices with equal shares; activations and gradients summed in rings, device to device; "
    "bf16 weights and gradients, optimizer state shared out among devices with the same weights"
)
sums_per_layer = 4
"""Of activations: after attention and after the feed-forward part, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    num_batch: int  # D
    num_features: int  # T
    seconds: float
    link_bytes: float  # down, and as many up, of each device
    needs_bytes: float
    has_bytes: float


def mesh_time(model: LayeredModel, devices: Sequence[TileDevice], *, num_pieces: int) -> BaselineTime | None:
    """None if there are no two devices. `num_pieces` of each layer's work overlap."""
    strongest = sorted(devices, key=lambda d: -d.up_bytes_per_s)
    made = [
        _mesh(model, strongest[: batch * features], batch, features, num_pieces)
        for features in range(1, min(model.num_heads, len(devices)) + 1)
        if model.num_heads % features == 0
        for batch in _halved(min(len(devices) // features, model.num_sequences))
        if batch * features > 1
    ]
    fitting = [mesh for mesh in made if mesh.needs_bytes <= mesh.has_bytes]
    best = min(fitting or made, key=lambda mesh: mesh.seconds, default=None)
    if best is None:
        return None
    return BaselineTime(
        name="tensor mesh",
        seconds=best.seconds,
        layout=f"batch in {best.num_batch}, features in {best.num_features}",
        num_devices_used=best.num_batch * best.num_features,
        down_bytes_per_device=best.link_bytes,
        up_bytes_per_device=best.link_bytes,
        needs_bytes=best.needs_bytes,
        least_bytes=min(mesh.needs_bytes for mesh in made),
        has_bytes=best.has_bytes,
        assumptions=assumptions,
    )


def _halved(most: int) -> list[int]:
    """`most`, half of it, and so on down to 1."""
    return [most >> shift for shift in range(most.bit_length())]


def _mesh(model: LayeredModel, used: Sequence[TileDevice], batch: int, features: int, num_pieces: int) -> Mesh:
    up, down = min(d.up_bytes_per_s for d in used), min(d.down_bytes_per_s for d in used)
    s_per_flop, rtt_s = max(d.s_per_flop for d in used), max(d.rtt_s for d in used)
    tokens = -(-model.num_sequences // batch) * model.seq_len
    activation_bytes = tokens * model.hidden_dim * model.wire_bytes
    layer_bytes = sums_per_layer * ring_bytes(features, activation_bytes)
    layer_s = overlapped_s(
        layer_bytes / down,
        flops_per_param * model.layer_params / features * tokens * s_per_flop,
        layer_bytes / up,
        num_pieces=num_pieces,
        fixed_s=sums_per_layer * (features - 1) * rtt_s,  # 2 (T - 1) rounds of half a round trip each
    )
    head_bytes = ring_bytes(features, activation_bytes) if model.head_params else 0.0  # its input gradient
    head_s = overlapped_s(
        head_bytes / down,
        flops_per_param * model.head_params / features * tokens * s_per_flop,
        head_bytes / up,
        num_pieces=num_pieces,
    )
    gradient_bytes = ring_bytes(batch, model.params / features * model.wire_bytes)
    return Mesh(
        num_batch=batch,
        num_features=features,
        seconds=model.num_layers * layer_s + head_s + gradient_bytes / min(up, down) + (batch - 1) * rtt_s,
        link_bytes=model.num_layers * layer_bytes + head_bytes + gradient_bytes,
        needs_bytes=held_bytes(model.params / features, batch) + activation_bytes,
        has_bytes=min(d.memory_bytes for d in used),
    )
