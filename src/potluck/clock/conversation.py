"""Work in a thread that now and then needs the event loop: it asks, and stands still until the answer is there.

A training step on the head is such work: autograd calls, in its thread, for matrix products that a fleet computes.
On a virtual clock the thread and the loop pass a baton: while the thread works, the loop stands still and so does time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Ask(Protocol):
    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises, run on the event loop. Stopped if the work is not wanted any more."""
        ...


class Stopped(BaseException):
    """The work is not wanted any more; raised where it asks."""


class Conversation(Generic[T]):
    """One piece of work and its questions, one at a time."""

    def __init__(self, work: Callable[[Ask], T]) -> None:
        self._work = work
        self._question: Coroutine[Any, Any, Any] | None = None
        self._answer: tuple[Any, BaseException | None] | None = None
        self._answered = threading.Event()
        self._stopped = False
        self._turn = threading.Lock()
        self.said = threading.Event()  # something is to be heard
        self.heard: Callable[[], object] = lambda: None  # is told so too
        self._result: tuple[Any, BaseException | None] | None = None

    # In the thread

    def run(self) -> None:
        try:
            if self._stopped:
                raise Stopped
            self._result = (self._work(self._ask), None)
        except BaseException as error:
            self._result = (None, error)
        self._say()

    def _ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._turn:
            if self._stopped:
                coroutine.close()
                raise Stopped
            self._question = coroutine
            self._answered.clear()
        self._say()
        self._answered.wait()
        assert self._answer is not None
        value, error = self._answer
        if error is not None:
            raise error
        return value

    def _say(self) -> None:
        self.said.set()
        self.heard()

    # On the loop

    async def respond(self, listen: Callable[[], Coroutine[Any, Any, None]]) -> T:
        """Answer until the work ends. `listen` returns once something was said."""
        try:
            while True:
                await listen()
                self.said.clear()
                with self._turn:  # `stop` may close it from another thread
                    question, self._question = self._question, None
                if question is None:
                    break
                try:
                    value, error = await question, None
                except asyncio.CancelledError:
                    raise
                except Exception as raised:
                    value, error = None, raised
                self._give(value, error)
        except BaseException:
            self.stop()
            raise
        assert self._result is not None
        value, error = self._result
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """From any thread: the work ends where it asks, now or next."""
        with self._turn:
            self._stopped = True
            question, self._question = self._question, None
        if question is not None:
            question.close()
        self._give(None, Stopped())

    def _give(self, value: Any, error: BaseException | None) -> None:
        self._answer = (value, error)
        self._answered.set()


async def in_turns(work: Callable[[Ask], T]) -> T:
    """On a virtual clock: the loop stands still while the thread works."""
    talk = Conversation(work)
    thread = threading.Thread(target=talk.run, daemon=True)

    async def listen() -> None:
        talk.said.wait()

    thread.start()
    try:
        return await talk.respond(listen)
    finally:
        thread.join()


async def side_by_side(talk: Conversation[T], start: Callable[[Callable[[], None]], asyncio.Future[None]]) -> T:
    """On a real clock. `start` runs a function in a thread."""
    loop, said = asyncio.get_running_loop(), asyncio.Event()
    talk.heard = lambda: loop.call_soon_threadsafe(said.set)

    async def listen() -> None:
        await said.wait()
        said.clear()

    ended = start(talk.run)
    try:
        return await talk.respond(listen)
    finally:
        await asyncio.wait([ended])
