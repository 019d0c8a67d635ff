"""One SQLite file: a single connection behind a lock, write-ahead log, whole transactions or none.

With `durable=False` a committed transaction survives the death of the process; with `durable=True` also a power cut,
for one fsync a commit. All methods block: call them in an executor.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from potluck.types.disk import free_bytes
from potluck.types.errors import CorruptError, PotluckError, ResourceError

_corrupt = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_unusable = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})
_busy = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


class Database:
    """A database file, made where it is missing. CorruptError if it is not a whole database."""

    def __init__(self, path: Path, *, durable: bool = False, timeout_s: float = 10.0) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._translated():
            self._connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        try:
            with self._translated():
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._connection.execute("PRAGMA foreign_keys = ON")
                (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise self._corrupt_error(str(found))
        except BaseException:
            self._connection.close()
            raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run one statement; how many rows it changed. Outside of `transaction` it is one by itself."""
        with self._lock, self._translated():
            return self._connection.execute(statement, values).rowcount

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each row of values. Only within `transaction`, whose block they belong to."""
        with self._lock, self._translated():
            self._connection.executemany(statement, rows)

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._translated():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """What is done inside is kept whole or, if an exception leaves the block, not at all.

        Holds the database for this thread. A block inside another one belongs to the outer transaction.
        """
        with self._lock:
            if self._depth:
                yield
                return
            with self._translated():
                self._connection.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                with self._translated():
                    self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk may have ended it already
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0

    def close(self) -> None:
        """Fold the log into the file and let it go. Idempotent."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        """SQLite's errors about the file as ours. Errors about statements are mistakes of the program and stay."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            translated = self._error(error)
            if translated is None:
                raise
            raise translated from error

    def _error(self, error: sqlite3.DatabaseError) -> PotluckError | None:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without its details
        if code in _corrupt:
            return self._corrupt_error(str(error))
        if code == sqlite3.SQLITE_FULL:
            return ResourceError(
                f"the disk for {self.path} is full: {free_bytes(self.path):,} bytes are free and the next entry needs "
                "more; free some space and start again"
            )
        if code in _unusable:
            return ResourceError(
                f"the database {self.path} cannot be read or written ({error}); check the disk and the folder"
            )
        if code in _busy:
            return ResourceError(f"the database {self.path} is in use by another process; stop that one first")
        return None

    def _corrupt_error(self, detail: str) -> CorruptError:
        return CorruptError(
            f"the database {self.path} is damaged ({detail[:200]}); restore it from a copy or start in a new folder"
        )
