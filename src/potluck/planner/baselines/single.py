"""One machine that has the memory and no link to wait for: FLOPs over what training reaches a second."""

from __future__ import annotations

a100_flops_per_s = 0.4 * 312e12
"""40 % of the A100's dense bf16 peak."""


def alone_s(flops: float, flops_per_s: float) -> float:
    return flops / flops_per_s
