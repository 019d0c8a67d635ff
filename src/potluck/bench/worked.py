"""A worked example with published settings: one batch of OPT-13B on 256 to 8,192 volunteers' devices.

Xue et al. (arXiv:2512.22142): batch 128 x 1,024 tokens, linear products only, 2 bytes an element, devices of 5-7
TFLOP/s with 5-10 MB/s up and 10-100 MB/s down, nothing cached, transfers and work overlapped in full, memory without
end, and a coordinator whose link counts for nothing. Each thing that those settings leave out, or that this planner
adds, is then changed by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from potluck.planner.baselines.single import a100_flops_per_s, alone_s
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.layers import Linear, Mlp, cheapest_linear, cheapest_mlp
from potluck.planner.tiles.product import Options, Pass, Product
from potluck.planner.tiles.step import StepPlan, Use, plan_step
from potluck.types.ids import WorkerId

num_tokens = 128 * 1024
num_layers = 40
hidden_dim = 5120
ff_dim = 20480
gbit = 1e9 / 8


def published_devices(num_devices: int, *, seed: int) -> tuple[TileDevice, ...]:
    """Evenly drawn from the published ranges."""
    chance = np.random.default_rng(seed)
    flops, up, down = (chance.uniform(low, high, num_devices) for low, high in ((5e12, 7e12), (5e6, 1e7), (1e7, 1e8)))
    return _devices(flops, up, down)


def unequal_devices(num_devices: int, *, seed: int) -> tuple[TileDevice, ...]:
    """Logarithms evenly drawn: 0.2-20 TFLOP/s, 1-30 MB/s up, 5-300 MB/s down, each independent of the others."""
    chance = np.random.default_rng(seed)
    ranges = ((2e11, 2e13), (1e6, 3e7), (5e6, 3e8))
    flops, up, down = (np.exp(chance.uniform(np.log(low), np.log(high), num_devices)) for low, high in ranges)
    return _devices(flops, up, down)


def _devices(flops: np.ndarray, up: np.ndarray, down: np.ndarray) -> tuple[TileDevice, ...]:
    width = len(str(len(flops)))
    return tuple(
        TileDevice(
            id=WorkerId(f"device-{i:0{width}d}"),
            down_bytes_per_s=float(down[i]),
            up_bytes_per_s=float(up[i]),
            s_per_flop=float(1 / flops[i]),
        )
        for i in range(len(flops))
    )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is assumed of one batch."""

    options: Options
    head: Head = field(default_factory=Head)
    wire_bytes: float = 2.0  # for each element, both ways
    memory_bytes: float = math.inf  # of each device
    joins_inputs: bool = False  # queries, keys and values as one product, whose input is sent once


published = Terms(options=Options(may_keep_weights=False, may_split_inner=False, num_tiles=0))
variants: Mapping[str, Terms] = {
    "published": published,
    "4 tiles a device": replace(published, options=replace(published.options, num_tiles=4)),
    "queries, keys and values share their input": replace(published, joins_inputs=True),
    "inner split": replace(published, options=replace(published.options, may_split_inner=True)),
    "int8 on the wire": replace(published, wire_bytes=1.0),
    "8 micro-batches": replace(published, options=replace(published.options, num_micro_batches=8)),
    "8 micro-batches, weights kept": replace(
        published, options=replace(published.options, num_micro_batches=8, may_keep_weights=True)
    ),
    "8 micro-batches, weights kept in 8 GB": replace(
        published, options=replace(published.options, num_micro_batches=8, may_keep_weights=True), memory_bytes=8e9
    ),
    "coordinator of 100 Gbit/s": replace(
        published, head=Head(egress_bytes_per_s=100 * gbit, ingress_bytes_per_s=100 * gbit)
    ),
    "coordinator of 25 Gbit/s": replace(
        published, head=Head(egress_bytes_per_s=25 * gbit, ingress_bytes_per_s=25 * gbit)
    ),
    "all, unlimited coordinator": Terms(options=Options(), wire_bytes=1.0, joins_inputs=True),
    "all, coordinator of 100 Gbit/s": Terms(
        options=Options(),
        head=Head(egress_bytes_per_s=100 * gbit, ingress_bytes_per_s=100 * gbit),
        wire_bytes=1.0,
        joins_inputs=True,
    ),
}


def plan_batch(devices: Sequence[TileDevice], terms: Terms = published) -> StepPlan:
    """Every linear product of every layer, one after the other, in one optimizer step."""
    uses: Counter[Use] = Counter()
    for product in _products(terms):
        uses[Use(product, terms.options.num_micro_batches)] += num_layers
    given = [replace(device, memory_bytes=min(device.memory_bytes, terms.memory_bytes)) for device in devices]
    return plan_step(uses, given, terms.head, terms.options)


def whole_layers_s(devices: Sequence[TileDevice]) -> Mapping[str, float]:
    """The batch as published, but for what runs cannot do: see `planner/tiles/layers.py`. Each where it is quicker."""
    d, f = hidden_dim, ff_dim
    linears = Counter({
        Linear(num_tokens=num_tokens, in_dim=into, out_dim=out, down_bytes=2, up_bytes=2, held_bytes=2): count
        for into, out, count in ((d, d, 4), (d, f, 1), (f, d, 1))
    })  # fmt: skip
    plans = {linear: cheapest_linear(linear, devices, options=published.options) for linear in linears}
    apart_s = num_layers * sum(count * plans[linear].apart_s for linear, count in linears.items())
    stay_s = num_layers * sum(count * min(plans[x].apart_s, plans[x].stay_s) for x, count in linears.items())
    mlp = Mlp(num_tokens=num_tokens, hidden_dim=d, ff_dim=f, down_bytes=2, up_bytes=2, held_bytes=2)
    forward = cheapest_mlp(mlp, devices, options=published.options)
    fused_s = apart_s - num_layers * max(0.0, forward.apart_s - forward.fused_s)
    return {"rectangles of layers stay": stay_s, "MLPs fused": fused_s}


def a100_s() -> float:
    """The same products on one A100 at 40 % of its peak."""
    return alone_s(num_layers * sum(product.flops for product in _products(published)), a100_flops_per_s)


def _products(terms: Terms) -> list[Product]:
    """Of one layer and micro-batch."""
    tokens, d, f = num_tokens // terms.options.num_micro_batches, hidden_dim, ff_dim
    linears = [(d, 3 * d), (d, d)] if terms.joins_inputs else [(d, d)] * 4
    found: list[Product] = []
    for into, out in [*linears, (d, f), (f, d)]:
        sizes: list[tuple[Pass, int, int, int]] = [
            ("forward", tokens, into, out),
            ("input_gradient", tokens, out, into),
            ("weight_gradient", into, tokens, out),
        ]
        found += [
            Product(m=m, n=n, q=q, kind=kind, down_bytes=terms.wire_bytes, up_bytes=terms.wire_bytes, held_bytes=2.0)
            for kind, m, n, q in sizes
        ]
    return found
