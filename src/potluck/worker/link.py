"""The worker's link to its coordinator: one connection at a time, replaced when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from potluck.transport.connection import Connection
from potluck.types.errors import ConnectionLost

T = TypeVar("T")


class Link:
    """Hands out the connection of the moment; whoever meets a broken one waits for the next."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._up = asyncio.Event()

    def set(self, connection: Connection | None) -> None:
        self._connection = connection
        if connection is None:
            self._up.clear()
        else:
            self._up.set()

    async def connection(self) -> Connection:
        while self._connection is None:  # it may break again before the one who waited runs
            await self._up.wait()
        return self._connection

    async def retry(self, action: Callable[[Connection], Awaitable[T]]) -> T:
        """Run a resumable action until it ends without losing the link."""
        while True:
            connection = await self.connection()
            try:
                return await action(connection)
            except ConnectionLost:
                if self._connection is connection:
                    await asyncio.sleep(0.1)  # the agent notices the same loss and clears the link
