import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from potluck.bench.rig.processes import Marked, Sampler

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a process needs more of its environment there")

parent_code = """
import subprocess, sys
code = "held = bytearray(60_000_000); import time; time.sleep(50)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
"""


@contextmanager
def left_behind(marked: Marked, role: str) -> Iterator[psutil.Process]:
    """A process in a session of its own whose parent, which carried the mark, has ended."""
    command = [sys.executable, "-c", parent_code]
    done = subprocess.run(command, env=marked.environment(role), text=True, stdout=subprocess.PIPE, check=True)
    child = psutil.Process(int(done.stdout))
    try:
        yield child
    finally:
        marked.kill()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_children_in_other_sessions_are_found_and_ended_and_no_others() -> None:
    marked, other = Marked(), Marked()
    with left_behind(marked, "client-0") as child, left_behind(other, "server") as spared:
        assert marked.role_of(child) == "client-0"
        assert other.role_of(child) is None
        marked.kill()
        assert has_ended(child)
        assert not has_ended(spared)


def test_memory_and_cpu_are_by_role_and_outlive_the_process() -> None:
    marked = Marked()
    sampler = Sampler(marked.role_of)
    with left_behind(marked, "server"):
        deadline = time.monotonic() + 20
        while sampler.peak_bytes.get("server", 0) < 60_000_000 and time.monotonic() < deadline:
            sampler.look()
            time.sleep(0.02)
        spent = sampler.cpu_s()["server"]
    sampler.look()
    assert 60_000_000 <= sampler.peak_bytes["server"] < 200_000_000
    assert set(sampler.peak_bytes) == {"server"}
    assert 0.0 < spent <= sampler.cpu_s()["server"] < 10.0
