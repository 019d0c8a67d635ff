"""`test`: the contract tests on a strategy of your own."""

from __future__ import annotations

import sys
from pathlib import Path

from potluck.contract.own import Verdict, check_file
from potluck.types.errors import PotluckError

MARKS = {True: "passed", False: "FAILED", None: "not run"}


def test_file(path: Path) -> None:
    """Print one line for each check as it ends. PotluckError if any failed."""
    verdicts = check_file(path, told)
    num_failed = sum(verdict.passed is False for verdict in verdicts)
    if num_failed:
        raise PotluckError(f"{path} broke {num_failed} of {len(verdicts)} contract tests; the lines above say where")


def told(verdict: Verdict) -> None:
    detail = f": {verdict.detail}" if verdict.detail else ""
    print(f"{verdict.strategy}: {MARKS[verdict.passed]:7}  {verdict.check}{detail}", file=sys.stderr, flush=True)
