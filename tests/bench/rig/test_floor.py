"""The bare server turns its rounds, and does not wait for a worker that has died."""

import asyncio
import subprocess
import sys

import pytest

from potluck.bench.rig.floor import _Server, floor_seconds


def test_each_round_has_its_seconds() -> None:
    seconds = floor_seconds(1000, 2, 3)
    assert len(seconds) == 3
    assert all(0.0 < s < 10.0 for s in seconds)


def test_a_worker_that_dies_ends_it() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as worker,
        pytest.raises(RuntimeError, match="a worker of the floor ended with 3 in round 1"),
    ):
        asyncio.run(_Server(8, 1, 2).finished([worker]))
