"""FedEx-LoRA: the mean of each factor, and what that misses is added to the base weights.

    A = sum_i p_i A_i      B = sum_i p_i B_i
    W0 <- W0 + R,          R = s (sum_i p_i B_i A_i - B A) = s sum_i p_i (B_i - B)(A_i - A)

Singhal et al. 2024, arXiv:2410.09432. Exact; equal ranks and scales. The second form of R is how it is computed: its
rank is at most sum_i r_i, and it does not subtract nearly equal products.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.lora.factors import Factors
from potluck.lora.fed_it import fed_it
from potluck.lora.flora import flora
from potluck.lora.weighted import Updates


@dataclass(frozen=True, eq=False, slots=True)
class MeanAndResidual:
    mean: Factors
    residual: Factors  # of rank sum_i r_i and scale 1; dense by `slices` or `add_to`


def fed_ex(updates: Updates) -> MeanAndResidual:
    """InvalidUpdate if ranks, shapes or scales differ."""
    mean = fed_it(updates)
    apart = [(w, Factors(x.a.float() - mean.a, x.b.float() - mean.b, x.scale)) for w, x in updates]
    return MeanAndResidual(mean, flora(apart))
