"""`join`: a worker in this process."""

from __future__ import annotations

import asyncio
import signal
import sys

from potluck.cli.local import end_with_parent
from potluck.cli.signals import graceful
from potluck.types.errors import PotluckError
from potluck.worker.join import work
from potluck.worker.options import JoinOptions, Leaving
from potluck.worker.terms import Condition, conditions


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """`idle,plugged-in`, or one of the two. PotluckError."""
    named = [word for part in text.split(",") if (word := part.strip())]
    if not named:
        raise PotluckError(f"--only-when names nothing; write {','.join(conditions)}, one of them, or leave it out")
    if unknown := [word for word in named if word not in conditions]:
        raise PotluckError(f"--only-when knows {' and '.join(conditions)}, not {unknown[0]!r}; write idle,plugged-in")
    return tuple(c for c in conditions if c in named)


def run_worker(options: JoinOptions, *, with_parent: bool = False) -> None:
    """Until the run ends or this machine's owner says so."""
    if with_parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which tells us
        end_with_parent(sys.stdin.fileno())
    asyncio.run(_join(options, ignore_interrupt=with_parent))


async def _join(options: JoinOptions, *, ignore_interrupt: bool) -> None:
    worker: Leaving | None = None
    serving: asyncio.Task[str] | None = None

    def leave(name: str) -> None:
        told(f"{name}: leaving in good order; once more ends it at once")
        if worker is not None:
            worker.leave()
        elif serving is not None:
            serving.cancel()

    def started(new: Leaving) -> None:
        nonlocal worker
        worker = new

    signals = [signal.SIGTERM] if ignore_interrupt else [signal.SIGINT, signal.SIGTERM]
    with graceful(leave, signals=signals):
        serving = asyncio.create_task(work(options, told=told, on_start=started))
        await asyncio.wait([serving])
    told("left" if serving.cancelled() else serving.result())


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
