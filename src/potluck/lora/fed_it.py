"""FedIT: the mean of each factor by itself.

    A = sum_i p_i A_i      B = sum_i p_i B_i

Zhang et al. 2023, arXiv:2305.05644. Equal ranks and scales. Not the mean of the workers' changes: B A has the products
of one worker's B with another's A.
"""

from __future__ import annotations

from potluck.lora.factors import Factors
from potluck.lora.weighted import Updates, common_scale, mean


def fed_it(updates: Updates) -> Factors:
    """InvalidUpdate if ranks, shapes or scales differ."""
    a = mean("A", [(weight, adapter.a) for weight, adapter in updates])
    b = mean("B", [(weight, adapter.b) for weight, adapter in updates])
    return Factors(a, b, common_scale(updates))
