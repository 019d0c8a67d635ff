"""RoLoRA: the factors take turns. One is trained, sent and averaged; the other is the same for all and rests.

    odd rounds    B = sum_i p_i B_i      A rests
    even rounds   A = sum_i p_i A_i      B rests

Chen et al. 2025, arXiv:2502.01755 (first 2024, arXiv:2409.02346). Each round is exact, as in FFA-LoRA. B is first: it
starts at zero, and as long as it is zero A has no gradient.
"""

from __future__ import annotations

from typing import Literal


def moving(round_number: int) -> Literal["a", "b"]:
    """The factor that is trained in a round; the first round is number 1."""
    return "b" if round_number % 2 else "a"
