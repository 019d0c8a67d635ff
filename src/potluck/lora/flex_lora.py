"""FlexLoRA: the mean change of the workers, cut to each receiver's rank by its singular values.

    sum_i p_i s_i B_i A_i = U S V^T      worker i receives B = U_r S_r / s_i, A = V_r^T with r = r_i

Bai et al. 2024, arXiv:2402.11505. The best approximation of each rank; unequal ranks and scales. The paper makes the
dense sum; here the SVD is of the factors where their ranks sum up to less than min(d, k), see svd.py.
"""

from __future__ import annotations

from potluck.lora.factors import Factors
from potluck.lora.flora import flora
from potluck.lora.svd import principal
from potluck.lora.weighted import Updates


def flex_lora(updates: Updates, *, max_rank: int) -> Factors:
    """Of rank `max_rank`, the highest of any receiver, and scale 1; a receiver gets `resized(rank, scale=scale)` of it.

    InvalidUpdate if the adapters are of unequal layers.
    """
    return principal(flora(updates), max_rank)[0]
