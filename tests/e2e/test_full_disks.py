"""Disks that run full, one at a time: what ends, what it says, and that the run goes on when there is room."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.processes import write_corpus, write_recipe
from e2e.test_faults import NAMES, strategy

from potluck.bench.rig.nursery import Nursery
from potluck.bench.rig.real_run import RealRun, real_run
from potluck.bench.rig.wire import WireLoop

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may mount small disks"),
]


@contextlib.contextmanager
def small_disk(place: Path, num_mb: int) -> Iterator[None]:
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_mb}m", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def full(place: Path) -> Iterator[None]:
    """No byte is free there."""
    with (place / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(1 << 12)):
            pass
    try:
        yield
    finally:
        (place / "filler").unlink()


DISKS = ("run/objects", "run/checkpoints", "run", "bert")
"""`run` last, so that the others lie in it: its own holds the ledger."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, processes: Nursery, wires: WireLoop) -> Iterator[RealRun]:
    folder = tmp_path_factory.mktemp("disks")
    write_corpus(folder / "texts", num_files=4)
    write_recipe(
        folder / "recipe.toml", 'shared = "texts"', budget="rounds = 100000", strategy=strategy(10),
        fleet="min_workers = 3\nheartbeat_s = 0.5\nreconnect_s = 1.5\nquarantine_s = 0.1",
        checkpoint="every_rounds = 2", validation="every_rounds = 0",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for place in sorted(DISKS):
            stack.enter_context(small_disk(folder / place, 24))
        made = stack.enter_context(real_run(folder, wires, start=processes.start, speeds=processes.speeds))
        made.start_host()
        made.join_all(*NAMES)
        processes.speeds = made.speeds
        made.wait_round(*NAMES)
        yield made


@pytest.mark.parametrize("place", ["run/objects", "run/checkpoints", "run"])
def test_a_coordinator_without_room_stops_and_its_workers_wait_for_it(running: RealRun, place: str) -> None:
    running.wait(lambda: running.events("checkpoint"), "checkpoint")
    said_before, last = len(running.log()), running.rounds()[-1]["round"]
    with full(running.folder / place):
        assert running.host.wait(30) == 5
        said = running.log()[said_before:]
        assert "Traceback" not in said, said[-3000:]
        (sentence,) = [line for line in said.splitlines() if line.startswith("potluck: ")]
        assert f"{running.folder / place}" in sentence and "bytes" in sentence and "free" in sentence, sentence
    assert all(worker.poll() is None for worker in running.workers.values())
    running.start_host()
    running.wait_round(*NAMES)
    assert "going back to the checkpoint" not in running.log()
    rounds = [e["round"] for e in running.rounds()]
    assert rounds == sorted({*rounds}) and rounds[-1] > last, "a committed round was lost"
    assert not [e for e in running.events("lost") if "room" in e["reason"]]


def test_a_worker_without_room_says_so_and_comes_back(running: RealRun) -> None:
    def lost() -> list[str]:
        return [event["reason"] for event in running.events("lost") if event["worker"] == "bert"]

    before = len(lost())  # a coordinator that was started again may have missed it for a while
    with full(running.folder / "bert"):
        running.wait(lambda: lost()[before:], "failure")
        (reason, *_) = lost()[before:]
        assert "STATE/" in reason and "bytes" in reason and "free" in reason, reason
        assert str(running.folder) not in reason  # which says whose machine it is
    running.wait_round(*NAMES)
    assert running.workers["bert"].poll() is None
