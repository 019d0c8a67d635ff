"""Many small rounds: how much the coordinator's memory grows once it is warm.

The processes of `bench round` with its tiny model. Growth is from the 50th round to the last, in medians over 40 rounds
after the one and before the other, of anonymous and shared memory: what a leak would show in, without the page cache of
files. So many, because the memory swings with what goes on at the end of a round.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from potluck.bench.round import run_rounds
from potluck.types.errors import PotluckError

num_warm = 50
num_smoothed = 40


def bench_soak(*, rounds: int = 300, workers: int = 2) -> dict[str, Any]:
    """Memory in MB; the target of the growth is below 1 %."""
    if rounds <= num_warm:
        raise PotluckError(f"--rounds is {rounds} and memory counts from round {num_warm} on; give more than that")
    with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=os.environ.get("POTLUCK_BENCH_DIR")) as name:
        host, _ = run_rounds(Path(name), "tiny", workers, "fp32", "fp32", rounds)
    grown = growth(host["memory_mb"])
    return {"rounds": rounds, "workers": workers, "round_s": round(median(host["seconds"]), 3)} | {
        f"coordinator_{figure}": value for figure, value in grown.items()
    }


def growth(memory_mb: list[float]) -> dict[str, float]:
    """Of what was measured after each round."""
    warm, last = median(memory_mb[num_warm : num_warm + num_smoothed]), median(memory_mb[-num_smoothed:])
    return {
        "warm_mb": round(warm, 1),
        "last_mb": round(last, 1),
        "growth_percent": round(100 * (last / warm - 1), 2),
    }
