"""Workers on this machine, each a process of its own that joins as any other machine would.

They hold one end of a pipe to this process and end when it closes, so none outlives us, whatever ends us and on
whatever system. They run apart from our terminal: Ctrl-C reaches us only, and we tell them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from potluck.transport.security.private_files import write_private

patience_s = 10.0
"""How long a worker that was told to stop may take."""
MAX_LOG_TAIL_BYTES = 4096


class LocalWorkers:
    """The local workers of one run, by name. `ended(name, exit code, last line)` hears of those we did not end."""

    def __init__(
        self, folder: Path, *, num_threads: int = 1, arguments: Sequence[str] = (),
        ended: Callable[[str, int, str], None] = lambda _name, _code, _line: None, program: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._folder, self._num_threads, self._arguments, self._ended = folder, num_threads, arguments, ended
        self._program = [*(program or (sys.executable, "-P", "-m", "potluck", "join"))]
        self._link = folder / "local-join-line"
        self._running: dict[str, Process] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._expected: set[str] = set()  # names whose end is ours

    async def use_link(self, join_line: str) -> None:
        """Keep the join line where only we can read it: an argument would show in the list of processes."""
        await asyncio.to_thread(write_private, self._link, join_line.encode())

    async def start(self, name: str, arguments: Sequence[str] = ()) -> None:
        """Start a worker, or start it again with the state it left."""
        assert name not in self._running, f"{name} runs already"
        log = self.log_path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *self._program, f"@{self._link}", "--state", str(self._folder / "workers" / name), "--name", name,
            "--threads", str(self._num_threads), "--with-parent", *self._arguments, *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._num_threads), "PYTHONUNBUFFERED": "1"}
        options: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file, env=environment, **options
            )
        self._expected.discard(name)
        self._running[name] = process
        self._watchers[name] = asyncio.create_task(self._watch(name, process))

    async def _watch(self, name: str, process: Process) -> None:
        code = await process.wait()
        self._running.pop(name, None)
        if name not in self._expected:
            self._ended(name, code, self.last_line(name))

    @property
    def running(self) -> list[str]:
        return sorted(self._running)

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def log_path(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def last_line(self, name: str) -> str:
        """What the worker said last."""
        try:
            with self.log_path(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""  # it never said anything
        return lines[-1].strip() if lines else ""

    async def kill(self, name: str) -> None:
        """`kill -9`, as a crash or a pulled plug would."""
        self._expected.add(name)
        with contextlib.suppress(ProcessLookupError):
            self._running[name].kill()
        await self._watchers[name]

    def kill_all(self) -> None:
        """End all at once; for a signal handler."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self, wait_s: float = patience_s) -> None:
        """Wait for those that were told to stop, then end the rest."""
        self._expected.update(self._running)
        if watchers := [self._watchers[name] for name in self._running]:
            await asyncio.wait(watchers, timeout=wait_s)
        self.kill_all()
        await asyncio.gather(*self._watchers.values())
        self._link.unlink(missing_ok=True)


def end_with_parent(pipe: int) -> None:
    """In a local worker: end this process as soon as its parent's end of the pipe closes. Its state is safe on disk.

    Reads the descriptor itself: a buffered reader's lock would be in the way when the interpreter ends.
    """

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
