"""Local workers as real processes, with small programs in the place of `potluck join`."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil

from potluck.cli.local import LocalWorkers

# Says how it was called, then does what the worker's name says.
PROGRAM = """
import sys, time
from potluck.cli.local import end_with_parent
print(*sys.argv[1:], flush=True)
name = sys.argv[sys.argv.index("--name") + 1]
if name == "fails":
    print("no good", file=sys.stderr)
    sys.exit(5)
if name == "obeys":
    sys.exit(0)
end_with_parent(sys.stdin.fileno())
time.sleep(60)
"""


def fleet(folder: Path, ended: list[tuple[str, int, str]], **options: object) -> LocalWorkers:
    return LocalWorkers(
        folder,
        program=[sys.executable, "-c", PROGRAM],
        ended=lambda name, code, line: ended.append((name, code, line)),
        **options,  # pyright: ignore[reportArgumentType]
    )


async def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_start_kill_and_start_again(tmp_path: Path) -> None:
    async def main() -> None:
        ended: list[tuple[str, int, str]] = []
        workers = fleet(tmp_path, ended, num_threads=3, arguments=["--everyone"])
        await workers.use_link("potluck://secret")
        await workers.start("anna", ["--device", "cpu"])
        assert workers.running == ["anna"]
        await until(lambda: workers.last_line("anna"))
        link = tmp_path / "local-join-line"
        assert workers.last_line("anna").split() == [
            f"@{link}", "--state", str(tmp_path / "workers" / "anna"), "--name", "anna", "--threads", "3",
            "--with-parent", "--everyone", "--device", "cpu",
        ]  # fmt: skip
        assert link.read_text() == "potluck://secret"
        if os.name == "posix":
            assert stat.S_IMODE(link.stat().st_mode) == 0o600
        first = workers.pid("anna")
        await workers.kill("anna")
        assert workers.running == []
        assert not psutil.pid_exists(first)
        await workers.start("anna")
        assert workers.pid("anna") != first
        second = workers.pid("anna")
        began = time.monotonic()
        await workers.close(wait_s=0.2)
        assert time.monotonic() - began < 10
        assert not psutil.pid_exists(second)
        assert not link.exists()
        assert ended == [], "ends that are ours are not reported"

    asyncio.run(main())


def test_a_worker_that_ends_by_itself_is_reported_with_its_last_word(tmp_path: Path) -> None:
    async def main() -> None:
        ended: list[tuple[str, int, str]] = []
        workers = fleet(tmp_path, ended)
        await workers.start("fails")
        await workers.start("obeys")
        await until(lambda: len(ended) == 2)
        assert sorted(ended)[0] == ("fails", 5, "no good")
        assert sorted(ended)[1][:2] == ("obeys", 0)
        assert workers.last_line("nobody") == ""
        await workers.close()

    asyncio.run(main())


PARENT = """
import asyncio, sys
from pathlib import Path
from potluck.cli.local import LocalWorkers

async def main():
    workers = LocalWorkers(Path(sys.argv[1]), program=[sys.executable, "-c", sys.argv[2]])
    await workers.start("anna")
    while not workers.last_line("anna"):
        await asyncio.sleep(0.02)
    print(workers.pid("anna"), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), PROGRAM], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
        parent.kill()
        assert worker.wait(10) in (0, None)
