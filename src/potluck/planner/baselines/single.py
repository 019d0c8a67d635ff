"""One data-centre GPU that has the memory: FLOPs over what training reaches of its peak."""

from __future__ import annotations

a100_flops_per_s = 0.4 * 312e12
"""40 % of the A100's dense bf16 peak."""


def a100_s(flops: float) -> float:
    return flops / a100_flops_per_s
