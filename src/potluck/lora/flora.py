"""FLoRA: the adapters one after another, as one adapter of the sum of their ranks.

    A = [p_1 s_1 A_1; ...; p_n s_n A_n]      B = [B_1, ..., B_n]      B A = sum_i p_i s_i B_i A_i

Wang et al. 2024, arXiv:2409.05976. Exact for unequal ranks and scales; the stack's own scale is 1. Workers add it to
their base weights and begin new adapters, and it grows with the number of workers.
"""

from __future__ import annotations

import torch

from potluck.lora.factors import Factors
from potluck.lora.weighted import Updates, require_one_layer, shares


def flora(updates: Updates) -> Factors:
    """Of rank sum_i r_i and scale 1. InvalidUpdate if the adapters are of unequal layers."""
    parts = shares([weight for weight, _ in updates])
    require_one_layer(updates)
    adapters = [adapter for _, adapter in updates]
    a = torch.cat([x.a.float() * (part * x.scale) for part, x in zip(parts, adapters, strict=True)])
    b = torch.cat([x.b.float() for x in adapters], dim=1)
    return Factors(a, b, 1.0)
