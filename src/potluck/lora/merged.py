"""What was merged into a layer's weight, with more added to it: read piece by piece, never whole in memory.

M <- M + s B A      M [d, k], fp32
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.lora.factors import Factors
from potluck.types.errors import UnusableUpdates
from potluck.types.vector import Vector


def with_product(merged: Vector, added: Factors) -> Vector:
    """M + s B A, flat as M is. Who reads it gets UnusableUpdates where finite factors have a product that is not."""
    num_columns = added.shape[1]

    def read(start: int, stop: int) -> Tensor:
        first, last = start // num_columns, -(-stop // num_columns)
        rows = (added.b[first:last].float() @ added.a.float()).mul_(added.scale).reshape(-1)
        found = rows[start - first * num_columns : stop - first * num_columns].add_(merged.read(start, stop))
        if not torch.isfinite(found).all():
            raise UnusableUpdates(
                "what the adapters of this round would add to the model is not finite; lower strategy.inner.lr, or set "
                "fleet.max_update_norm"
            )
        return found

    return Vector(merged.numel, read)
