"""What was merged into a layer's weight, with more added to it: read piece by piece, never whole in memory.

M <- M + sum_j s_j B_j A_j      M [d, k], fp32; added up in the order given
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.lora.factors import Factors
from potluck.types.errors import UnusableUpdates
from potluck.types.vector import Vector


def with_products(merged: Vector, *added: Factors) -> Vector:
    """M with these products, flat as M is. Who reads it gets UnusableUpdates where finite factors have one that is
    not."""

    def read(start: int, stop: int) -> Tensor:
        found = merged.read(start, stop)
        for each in added:
            num_columns = each.shape[1]
            first, last = start // num_columns, -(-stop // num_columns)
            rows = (each.b[first:last].float() @ each.a.float()).mul_(each.scale).reshape(-1)
            found = rows[start - first * num_columns : stop - first * num_columns].add_(found)
        if not torch.isfinite(found).all():
            raise UnusableUpdates(
                "what the adapters of this round would add to the model is not finite; lower strategy.inner.lr, or set "
                "fleet.max_update_norm"
            )
        return found

    return Vector(merged.numel, read)
