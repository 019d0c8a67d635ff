"""Where the files of many short runs go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from potluck.bench.rig import jobs


def test_files_are_in_memory_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "memory_disk", tmp_path / "none")
    assert jobs.scratch_place(1) is None
    monkeypatch.setattr(jobs, "memory_disk", tmp_path)
    assert jobs.scratch_place(1) == str(tmp_path)
    assert jobs.scratch_place(1 << 60) is None


PARENT = """
import os, time
from potluck.bench.rig.jobs import job_pool

if __name__ == "__main__":
    pool = job_pool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a child of a process that is gone keeps its number there")
def test_no_job_outlives_a_bench_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)
    parent.stdout.close()
