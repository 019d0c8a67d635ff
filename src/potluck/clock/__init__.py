"""Time and heavy work as values, so that the shipping code also runs on a virtual clock.

A host never reads the system's time, starts a thread or blocks the event loop by itself: it asks a `Clock` and an
`Executor` it was given. `SystemClock` and `ThreadExecutor` are the real ones. `VirtualClock` and `InlineExecutor`
belong to a `VirtualLoop`: an asyncio event loop whose time jumps to the next timer as soon as nothing is ready, so
hours pass in milliseconds and the same program gives the same trace each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from potluck.clock.conversation import Ask, Conversation, in_turns, side_by_side

T = TypeVar("T")


class Clock(Protocol):
    """Seconds, as values."""

    def now(self) -> float:
        """Monotonic seconds, from any origin: for intervals and deadlines."""
        ...

    def time(self) -> float:
        """Seconds since 1970: for what people read and for certificates."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class Executor(Protocol):
    """Where compute and file work run, away from the event loop."""

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        """`fn(*args)`. `cost_s` is what a modelled device would take; the real one ignores it."""
        ...

    async def converse(self, work: Callable[[Ask], T]) -> T:
        """`work(ask)` away from the event loop; what it asks is answered on it."""
        ...

    def close(self) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ThreadExecutor:
    """Real threads. One worker keeps submissions in order; more run side by side."""

    def __init__(self, num_threads: int = 1, name: str = "potluck") -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._talks = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-talk")  # what these ask may need the others
        self._talking: set[Conversation[Any]] = set()

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn, *args)

    async def converse(self, work: Callable[[Ask], T]) -> T:
        loop, talk = asyncio.get_running_loop(), Conversation(work)
        self._talking.add(talk)
        try:
            return await side_by_side(talk, lambda run: loop.run_in_executor(self._talks, run))
        finally:
            self._talking.discard(talk)

    def close(self) -> None:
        """Drop what has not begun and wait for what has: it may write to a folder that is about to be let go."""
        for talk in list(self._talking):
            talk.stop()  # it may wait for an answer from a loop that waits here
        self._talks.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Lanes:
    """Executors for a coordinator's kinds of work, so that small work never waits behind a pass over the model."""

    ledger: Executor  # the databases, in order
    transfers: Executor  # chunks of objects
    compute: Executor  # passes over whole vectors: checks, aggregation, checkpoints

    @staticmethod
    def threads() -> Lanes:
        return Lanes(ThreadExecutor(1, "ledger"), ThreadExecutor(4, "transfers"), ThreadExecutor(2, "compute"))

    @staticmethod
    def one(executor: Executor) -> Lanes:
        """Everything in order: on the virtual clock, where nothing takes real time."""
        return Lanes(executor, executor, executor)

    def close(self) -> None:
        for executor in (self.ledger, self.transfers, self.compute):
            executor.close()


class VirtualClock:
    """The time of the running `VirtualLoop`; `epoch` is what `time()` shows at its start."""

    def __init__(self, epoch: float = 1_700_000_000.0) -> None:
        self.epoch = epoch
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        """Also in a thread whose work the loop waits for."""
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        assert self._loop is not None, "the clock has never been asked on its loop"
        return self._loop.time()

    def time(self) -> float:
        return self.epoch + self.now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class InlineExecutor:
    """Charges `cost_s` (or `cost(fn)`) of virtual time and then runs: nothing is there before its time is over."""

    def __init__(self, cost: Callable[[Callable[..., Any]], float] | None = None) -> None:
        self._cost = cost

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        await asyncio.sleep(cost_s or (self._cost(fn) if self._cost else 0.0))
        return fn(*args)

    async def converse(self, work: Callable[[Ask], T]) -> T:
        return await in_turns(work)

    def close(self) -> None:
        pass


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: where a real selector would sleep, it moves the loop's time on."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.elapsed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise DeadlockError("the virtual clock stands still: every coroutine waits for another")
        self.elapsed += max(timeout, 0.0)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class DeadlockError(RuntimeError):
    """On the virtual clock: nothing is ready and no timer is set, so nothing will ever happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time. Use `run_virtual`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.elapsed


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh virtual clock, then drop whatever else still runs."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
