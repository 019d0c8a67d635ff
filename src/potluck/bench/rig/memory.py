"""What a process takes: anonymous and shared memory, and all that is resident, at its peak."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

sample_s = 0.02


def memory_bytes() -> tuple[int, int]:
    """Anonymous and shared memory, and all that is resident; where the system does not tell them apart, all twice."""
    status = Path("/proc/self/status")
    if not status.exists():
        resident = psutil.Process().memory_info().rss
        return resident, resident
    lines = (line.split() for line in status.read_text().splitlines())
    kb = {words[0][:-1]: int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:", "VmRSS:")}
    return (kb["RssAnon"] + kb["RssShmem"]) * 1024, kb["VmRSS"] * 1024


@contextmanager
def peak_memory(idle: tuple[int, int]) -> Iterator[Callable[[], dict[str, float]]]:
    """The most memory since it began, above that of the idle process, in MB."""
    most = memory_bytes()
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(sample_s):
            now = memory_bytes()
            most = (max(most[0], now[0]), max(most[1], now[1]))

    watching = threading.Thread(target=watch, name="memory", daemon=True)
    watching.start()
    try:
        yield lambda: {
            "anonymous_mb": round((most[0] - idle[0]) / 1e6, 1),
            "rss_mb": round((most[1] - idle[1]) / 1e6, 1),
        }
    finally:
        over.set()
        watching.join()
