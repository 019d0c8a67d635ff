"""The processes of a system that is measured, whoever starts them: what they take, and their end.

A process belongs when it carries a mark in its environment, which its children inherit even if it leaves them behind.
Memory is the resident memory of a role's processes together, pages that they share counted in each. CPU seconds are
those last seen: what a process uses in its last `sample_s` is lost.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

sample_s = 0.2
settled_s = 1.0  # a process younger than this may still change into what it will be
variable = "POTLUCK_BENCH_ROLE"

RoleOf = Callable[[psutil.Process], str | None]


class Sampler:
    """Memory and CPU by role, of the processes to which `role_of` gives one."""

    def __init__(self, role_of: RoleOf) -> None:
        self._role_of = role_of
        self._found: dict[int, tuple[str, psutil.Process]] = {}
        self._strangers: set[int] = set()
        self._cpu_s: dict[tuple[str, float], tuple[str, float]] = {}
        self.peak_bytes: dict[str, int] = {}

    def look(self) -> None:
        """Find new processes and take one sample of all."""
        present = set(psutil.pids())
        self._strangers &= present
        for pid in present - self._strangers - self._found.keys():
            self._meet(pid)
        now: dict[str, int] = defaultdict(int)
        for pid, (role, process) in list(self._found.items()):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    now[role] += process.memory_info().rss
                    self._cpu_s[str(pid), process.create_time()] = role, times.user + times.system
            except psutil.Error:
                del self._found[pid]
        for role, resident in now.items():
            self.peak_bytes[role] = max(resident, self.peak_bytes.get(role, 0))

    def _meet(self, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            role = self._role_of(process)
            if role is not None:
                self._found[pid] = role, process
            elif time.time() - process.create_time() > settled_s:
                self._strangers.add(pid)
        except psutil.AccessDenied:
            self._strangers.add(pid)
        except psutil.Error:
            return

    def cpu_s(self) -> dict[str, float]:
        """By role, of the processes that live and of those that ended."""
        total: dict[str, float] = defaultdict(float)
        for role, seconds in list(self._cpu_s.values()):  # a copy: the watching thread goes on
            total[role] += seconds
        return dict(total)

    @contextmanager
    def running(self) -> Iterator[Sampler]:
        """Samples from a thread until it is left."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(sample_s):
                self.look()

        watching = threading.Thread(target=watch, name="watch", daemon=True)
        watching.start()
        try:
            yield self
        finally:
            over.set()
            watching.join()


class Marked:
    """A mark of its own for one system's processes."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)

    def environment(self, role: str) -> dict[str, str]:
        """What to add to the environment of a process that is started for `role`."""
        return {variable: f"{self.mark}:{role}"}

    def role_of(self, process: psutil.Process) -> str | None:
        mark, _, role = process.environ().get(variable, "").partition(":")
        return role if mark == self.mark else None

    def kill(self, patience_s: float = 30.0) -> None:
        """End all of them at once, those that are started meanwhile too. TimeoutError if some do not end."""
        deadline = time.monotonic() + patience_s
        while living := self._living():
            for process in living:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            psutil.wait_procs(living, timeout=1)
            if time.monotonic() > deadline:
                names = ", ".join(f"{process.pid}" for process in living)
                raise TimeoutError(f"processes {names} do not end within {patience_s:.0f} s of being killed")

    def _living(self) -> list[psutil.Process]:
        living: list[psutil.Process] = []
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid)
                if pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and self.role_of(process):
                    living.append(process)
            except psutil.Error:
                continue
        return living
