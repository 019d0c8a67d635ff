import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.storage.database import Database
from potluck.types.errors import CorruptError, ResourceError


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "folder" / "ledger.db")
    database.execute("CREATE TABLE t (name TEXT PRIMARY KEY, value INTEGER)")
    yield database
    database.close()


def names(database: Database) -> list[str]:
    return [row[0] for row in database.query("SELECT name FROM t ORDER BY name")]


def test_rows_survive_closing(database: Database) -> None:
    assert database.execute("INSERT INTO t VALUES (?, ?)", ("a", 1)) == 1
    database.close()
    database.close()
    again = Database(database.path)
    assert again.query("SELECT * FROM t") == [("a", 1)]
    again.close()


def test_a_committed_row_is_seen_by_a_reader_that_opens_the_files_as_a_crash_leaves_them(
    database: Database, tmp_path: Path
) -> None:
    database.execute("INSERT INTO t VALUES ('a', 1)")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in database.path.parent.iterdir():
        if not file.name.endswith("-shm"):
            (copy / file.name).write_bytes(file.read_bytes())
    again = Database(copy / "ledger.db")
    assert names(again) == ["a"]
    again.close()


def test_a_transaction_is_whole_or_nothing(database: Database) -> None:
    def half() -> None:
        with database.transaction():
            database.execute("INSERT INTO t VALUES ('a', 1)")
            with database.transaction():
                database.execute("INSERT INTO t VALUES ('b', 2)")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        half()
    assert names(database) == []
    with database.transaction():
        database.execute("INSERT INTO t VALUES ('a', 1)")
        with database.transaction():
            database.execute("INSERT INTO t VALUES ('b', 2)")
    assert names(database) == ["a", "b"]


def test_a_failed_statement_inside_a_transaction_leaves_nothing(database: Database) -> None:
    database.execute("INSERT INTO t VALUES ('a', 1)")

    def twice() -> None:
        with database.transaction():
            database.execute("INSERT INTO t VALUES ('b', 1)")
            database.execute("INSERT INTO t VALUES ('a', 1)")

    with pytest.raises(sqlite3.IntegrityError):
        twice()
    assert names(database) == ["a"]


def test_threads_take_turns(database: Database) -> None:
    database.execute("INSERT INTO t VALUES ('count', 0)")

    def add() -> None:
        for _ in range(50):
            with database.transaction():
                (value,) = database.query("SELECT value FROM t")[0]
                database.execute("UPDATE t SET value = ?", (value + 1,))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.query("SELECT value FROM t") == [(200,)]


def test_durability_is_the_sync_setting(database: Database, tmp_path: Path) -> None:
    durable = Database(tmp_path / "durable.db", durable=True)
    assert durable.query("PRAGMA synchronous") == [(2,)]
    assert database.query("PRAGMA synchronous") == [(1,)]
    assert database.query("PRAGMA journal_mode") == [("wal",)]
    durable.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"this is not a database at all" * 100)
    with pytest.raises(CorruptError, match=r"ledger\.db is damaged"):
        Database(path)
    path.unlink()  # no handle is left open on it


def test_a_damaged_database_is_found_when_it_is_opened(database: Database) -> None:
    with database.transaction():
        for i in range(2000):
            database.execute("INSERT INTO t VALUES (?, ?)", (f"name {i:06d}", i))
    database.close()
    data = bytearray(database.path.read_bytes())
    for start in range(8192, len(data), 4096):
        data[start : start + 64] = b"\xff" * 64
    database.path.write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        Database(database.path)


def test_a_full_disk_is_a_sentence_and_keeps_what_was_there(database: Database) -> None:
    database.execute("INSERT INTO t VALUES ('a', 1)")
    (pages,) = database.query("PRAGMA page_count")[0]
    database.execute(f"PRAGMA max_page_count = {pages}")  # what SQLite sees on a full disk

    def fill() -> None:
        with database.transaction():
            for i in range(10_000):
                database.execute("INSERT INTO t VALUES (?, ?)", (f"{i:08d}", i))

    with pytest.raises(ResourceError, match=r"ledger\.db is full: [0-9,]+ bytes are free .* needs more; free some"):
        fill()
    assert names(database) == ["a"]
    with database.transaction():
        database.execute("UPDATE t SET value = 2")
    assert database.query("SELECT value FROM t") == [(2,)]


def test_another_process_holding_the_file_is_named(database: Database) -> None:
    other = Database(database.path, timeout_s=0.05)

    def write() -> None:
        with other.transaction():
            raise AssertionError("two writers at once")

    with database.transaction(), pytest.raises(ResourceError, match="in use by another process"):
        write()
    other.close()
