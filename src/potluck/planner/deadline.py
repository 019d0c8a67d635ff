"""How long a worker may take for a task: from how long it took before.

deadline = p + max(k * MAD, 0.25 p, 5 s)        p = median seconds per unit of work * units

With fewer than six samples p itself stands for 0.25 p: so few say little of the spread, and work that is thrown away by
a hair costs more than a wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

min_samples = 2
few_samples = 6
spread_factor = 4.0
min_slack_s = 5.0


def predict_s(history: Sequence[float], units: float) -> float | None:
    """Seconds that `units` of work should take, from past seconds per unit; None with fewer than two samples."""
    if len(history) < min_samples:
        return None
    return statistics.median(history) * units


def deadline_s(history: Sequence[float], units: float) -> float | None:
    """Seconds after which the task is given up on; None as long as there is too little to judge by."""
    predicted = predict_s(history, units)
    if predicted is None:
        return None
    centre = statistics.median(history)
    mad = statistics.median(abs(h - centre) for h in history) * units
    share = 1.0 if len(history) < few_samples else 0.25
    return predicted + max(spread_factor * mad, share * predicted, min_slack_s)
