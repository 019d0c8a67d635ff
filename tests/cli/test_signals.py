"""Signals to a real process: the first asks, the second ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from potluck.cli.signals import graceful

async def main():
    asked = asyncio.Event()
    def ask(name):
        print("asked by", name, flush=True)
        asked.set()
    with graceful(ask, at_once=lambda: print("at once", flush=True)):
        print("ready", flush=True)
        await asked.wait()
        if sys.argv[1] == "slow":
            await asyncio.sleep(60)
    print("done", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_one_signal_asks(number: signal.Signals, name: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "quick"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.stdout.read() == f"asked by {name}\ndone\n"
        assert process.wait(10) == 0


def test_two_signals_end_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "slow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "asked by Ctrl-C\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 130
        assert process.stdout.read() == "at once\n"
        assert process.stderr.read() == "potluck: ended at once by SIGTERM\n"
