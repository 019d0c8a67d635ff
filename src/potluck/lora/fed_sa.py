"""FedSA-LoRA: A is shared, B stays with its worker.

    A = sum_i p_i A_i

Guo et al. 2024, arXiv:2410.01463. Both are trained; the workers' models differ by their B.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from potluck.lora.weighted import mean


def fed_sa(sent: Sequence[tuple[float, Tensor]]) -> Tensor:
    """A, fp32 [r, k], of `(w_i, A_i)`. InvalidUpdate if shapes differ."""
    return mean("A", sent)
