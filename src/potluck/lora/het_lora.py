"""HetLoRA: unequal ranks, made equal by components of zeros, and averaged by how much each adapter changes.

    A = sum_i w_i pad(A_i)      B = sum_i w_i pad(s_i B_i)      w_i = ||s_i B_i A_i||_F / sum_j ||s_j B_j A_j||_F

Cho et al. 2024, arXiv:2401.06432. Receivers take the first r_i components. While it trains, a worker presses its last
components down, and has them no more where that succeeds (m is the next of the ranks that workers may have):

    loss + lambda sum over layers of ||B[:, m:]||_F ||A[m:, :]||_F

How much a worker trained on counts only where no adapter changes anything. s_i in B is ours: the paper has one scale.
"""

from __future__ import annotations

from potluck.lora.factors import Factors
from potluck.lora.fed_it import fed_it
from potluck.lora.weighted import Updates, require_one_layer, shares


def het_lora(updates: Updates) -> Factors:
    """Of the highest rank and scale 1; a receiver gets `resized(rank, scale=scale)` of it.

    A component that no adapter in the mean has is zero in both factors and without gradient: its receiver draws that
    row of A anew. InvalidUpdate if the adapters are of unequal layers.
    """
    shares([weight for weight, _ in updates])
    require_one_layer(updates)
    rank = max(adapter.rank for _, adapter in updates)
    by_norm = [(adapter.norm(), adapter) for _, adapter in updates]
    counted = [(norm, adapter) for norm, adapter in by_norm if norm > 0] or updates
    return fed_it([(weight, adapter.resized(rank, scale=1.0)) for weight, adapter in counted])
