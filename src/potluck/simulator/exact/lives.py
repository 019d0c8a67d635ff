"""A process of a simulated machine: the tasks that run in it, where it runs its work, and how it dies.

A life ends as under `kill -9`: from that moment nothing it does reaches anything that matters. Its links are cut by the
world; the machine's next life gets a copy of the disk as it was at that moment, so whatever a `finally` of the dead one
still writes, also into files that it holds open, lands where nobody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

from potluck.clock import Executor
from potluck.clock.conversation import Ask
from potluck.types.errors import ConnectionLost

T = TypeVar("T")
_owner: ContextVar[Life | None] = ContextVar("owner", default=None)


class Killed(BaseException):
    """Raised inside a life's work in the middle of a file operation: the process is gone."""


class Fate(Protocol):
    """What may happen to a life while it runs; hears of each point where it could be interrupted."""

    async def at_await(self, life: Life) -> None:
        """Before a piece of work begins and after it has ended. May wait, or end the life."""
        ...

    def on_the_way(self, life: Life, method: str, message: bytes) -> tuple[bytes, ...]:
        """What becomes of a message: itself, or twice, or with a flipped bit."""
        ...

    def did(self, life: Life, what: str) -> None:
        """A piece of work has ended, well or not; `what` is the name of its function."""
        ...

    def at_file(self, life: Life, event: str) -> None:
        """Before a file is opened, renamed or removed. May raise OSError, or Killed when it has ended the life."""
        ...


class Life:
    """One process on one machine, from its start to its end."""

    def __init__(self, machine: str, folder: Path, *, begun_at: float, fate: Fate | None = None) -> None:
        self.machine, self.folder, self.begun_at, self.fate = machine, folder, begun_at, fate
        self.alive = True
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.executors: list[Executor] = []

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this life, as are all that it makes itself."""
        context = copy_context()
        context.run(_owner.set, self)
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.own(task)
        return task

    def end(self) -> None:
        """Nothing of it goes on: what its tasks do when they are cancelled finds no network and an old disk."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()

    async def gone(self) -> None:
        """Wait until its tasks have unwound, so that their memory is free."""
        me = asyncio.current_task()
        await asyncio.gather(*(t for t in list(self._tasks) if t is not me), return_exceptions=True)

    def check(self) -> None:
        if not self.alive:
            raise ConnectionLost("this process is dead")

    async def point(self) -> None:
        """A place where this life may be interrupted. Never returns to a dead one."""
        if self.alive and self.fate is not None:
            await self.fate.at_await(self)
        if not self.alive:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # it may have been begun after the others were, or have waited for a thread since
            await asyncio.get_running_loop().create_future()

    def sends(self, method: str, message: bytes) -> tuple[bytes, ...]:
        """What reaches the link when it sends this."""
        return (message,) if self.fate is None else self.fate.on_the_way(self, method, message)

    def own(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


class LifeExecutor:
    """Work of one life, with its fate at hand."""

    def __init__(self, life: Life, inner: Executor, slowness: Callable[[], float] = lambda: 1.0) -> None:
        self._life, self._inner, self._slowness = life, inner, slowness

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        def watched(*args: Any) -> T:
            with watched_files(self._life):
                return fn(*args)

        await self._life.point()
        work = fn if self._life.fate is None else watched
        try:
            result = await self._inner.run(work, *args, cost_s=cost_s * self._slowness())
        except Killed:
            await self._life.point()
            raise  # not reached
        finally:
            if self._life.fate is not None:
                self._life.fate.did(self._life, getattr(fn, "__name__", ""))
        await self._life.point()
        return result

    async def converse(self, work: Callable[[Ask], T]) -> T:
        await self._life.point()
        try:
            result = await self._inner.converse(work)
        finally:
            if self._life.fate is not None:
                self._life.fate.did(self._life, getattr(work, "__name__", ""))
        await self._life.point()
        return result

    def close(self) -> None:
        self._inner.close()


def own_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on each task of the loop belongs to the life in whose context it was made."""

    def make(loop: asyncio.AbstractEventLoop, work: Any, *, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        owner = context.get(_owner) if context is not None else _owner.get()
        if owner is not None:
            owner.own(task)
        return task

    loop.set_task_factory(make)


# File operations, by Python's audit events: a hook cannot be taken off again, so one stays and mostly does nothing.

_watched: Life | None = None
_file_events = frozenset({"open", "os.rename", "os.remove", "os.truncate", "os.link", "os.mkdir", "os.rmdir"})
_is_hooked = False


@contextlib.contextmanager
def watched_files(life: Life) -> Generator[None]:
    """Let the life's fate see each file operation of what runs inside, which must run in this thread."""
    global _watched, _is_hooked
    if life.fate is None:
        yield
        return
    if not _is_hooked:
        sys.addaudithook(_audit)
        _is_hooked = True
    before, _watched = _watched, life
    try:
        yield
    finally:
        _watched = before


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    global _watched
    life = _watched
    if life is None or event not in _file_events:
        return
    path = arguments[0]
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str | os.PathLike) or not str(path).startswith(str(life.folder)):
        return
    if event == "open" and not _writes(arguments):
        return
    _watched = None  # what fate itself does with files is none of its business
    try:
        assert life.fate is not None
        life.fate.at_file(life, event)
    finally:
        _watched = life


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def no_space(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
