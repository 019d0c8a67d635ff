"""Ctrl-C and SIGTERM: the first one asks, the second one ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def graceful(
    ask: Callable[[str], None],
    at_once: Callable[[], None] = lambda: None,
    signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[None]:
    """Within it the first signal calls `ask` with its name, from the running loop; the second calls `at_once` and
    ends the process with 130. Works where the loop has no signal handlers of its own (Windows)."""
    loop = asyncio.get_running_loop()
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        name = NAMES[signal.Signals(number)]
        if not asked:
            asked = True
            loop.call_soon_threadsafe(ask, name)
            return
        at_once()
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"potluck: ended at once by {name}\n".encode())
        os._exit(130)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
