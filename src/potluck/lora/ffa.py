"""FFA-LoRA: A stays what it was drawn as, the same for all; only B is trained and sent.

    B = sum_i p_i B_i      s B A = sum_i p_i s B_i A

Sun et al. 2024, arXiv:2403.12313. Exact, with half the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from potluck.lora.factors import Factors
from potluck.lora.weighted import mean


def ffa(held: Factors, sent: Sequence[tuple[float, Tensor]]) -> Factors:
    """`held` is what all workers began the round with, `sent` `(w_i, B_i)`.

    InvalidUpdate if a matrix has another shape than in `held`.
    """
    return Factors(held.a, mean("B", sent, shape=held.b.shape), held.scale)
