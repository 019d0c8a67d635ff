"""`simulate`: a run on a virtual fleet, and whole runs under faults from seeds."""

from __future__ import annotations

import sys
from typing import Any

import torch

from potluck.simulator.fuzz import Verdict, fuzz
from potluck.types.errors import PotluckError

lines_shown = 40


def run_fuzz(num_seeds: int, *, first_seed: int, num_jobs: int, keep_going: bool) -> dict[str, Any]:
    """Play that many seeds. PotluckError at the first violation, with the command that replays it."""
    torch.set_num_threads(1)
    every = max(num_seeds // 20, 1)

    def told(done: int, bad: int) -> None:
        if done % every == 0 or done == num_seeds:
            print(f"{done} of {num_seeds} seeds, {bad} violations", file=sys.stderr, flush=True)

    found = fuzz(
        range(first_seed, first_seed + num_seeds), num_jobs=num_jobs, told=told, until_first=not keep_going
    )
    if found.violated:
        first = found.violated[0]
        print(_story(first), file=sys.stderr)
        seeds = ", ".join(str(v.seed) for v in found.violated)
        raise PotluckError(
            f"seed {first.seed} violates an invariant: {first.detail}; replay it with `potluck simulate --fuzz 1 "
            f"--seed {first.seed}`" + (f"; all of them: {seeds}" if len(found.violated) > 1 else "")
        )
    return found.to_json()


def _story(verdict: Verdict) -> str:
    """The end of what happened, for people."""
    return "\n".join(verdict.history[-lines_shown:])
