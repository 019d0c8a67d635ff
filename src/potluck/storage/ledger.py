"""The run's ledger: what was decided, replied and committed. Recovery log and audit log.

A round is worked on in attempts; an attempt is open, committed or discarded. Within an attempt the ledger holds
decisions (who was asked), leases (what was handed out, with its data) and replies in the order they were accepted.
A commit is one transaction: the new state, the deal of the data, the contributions and the adopted worker states.
All methods block: call them in an executor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from potluck.storage.database import Database

MARK = "ledger.db"
"""A folder with this file holds a run."""
_no_pace: Mapping[str, Sequence[float]] = MappingProxyType({})
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (
    round INTEGER, attempt INTEGER, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', opened REAL NOT NULL,
    PRIMARY KEY (round, attempt));
CREATE TABLE IF NOT EXISTS decisions (
    round INTEGER, attempt INTEGER, name TEXT, value TEXT NOT NULL, PRIMARY KEY (round, attempt, name));
CREATE TABLE IF NOT EXISTS leases (
    round INTEGER, attempt INTEGER, key TEXT, issue INTEGER, worker TEXT NOT NULL, lease BLOB NOT NULL,
    status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', PRIMARY KEY (round, attempt, key, issue));
CREATE TABLE IF NOT EXISTS replies (
    number INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER, attempt INTEGER, key TEXT, worker TEXT NOT NULL,
    object TEXT NOT NULL, scalars TEXT NOT NULL, version TEXT NOT NULL, UNIQUE (round, attempt, key));
CREATE TABLE IF NOT EXISTS commits (
    round INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL, accepted TEXT NOT NULL,
    at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS versions (worker TEXT PRIMARY KEY, version TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS contributions (
    worker TEXT PRIMARY KEY, tokens INTEGER NOT NULL, rounds INTEGER NOT NULL, bytes_up INTEGER NOT NULL,
    bytes_down INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, round INTEGER NOT NULL, kind TEXT NOT NULL,
    value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS paces (worker TEXT PRIMARY KEY, seconds TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (round INTEGER, name TEXT, value REAL NOT NULL, PRIMARY KEY (round, name));
"""


@dataclass(frozen=True, kw_only=True)
class ReplyRow:
    """One accepted reply."""

    key: str
    worker: str
    object: str
    scalars: Mapping[str, Any]
    version: str  # the pinned state that the worker adopts when this commits, "" for none
    number: int = 0  # the order of acceptance


@dataclass(frozen=True, kw_only=True)
class LeaseRow:
    """One piece of work handed to a worker. `lease` is the serialized message."""

    key: str
    issue: int
    worker: str
    lease: bytes
    status: str  # "open", "replied", "lost"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CommitRow:
    """The state after a round, what made it, and the deal of the data from then on."""

    round: int
    attempt: int
    state: Mapping[str, Any]
    deal: Mapping[str, Any]
    accepted: tuple[ReplyRow, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    over: tuple[str, ...] = ()  # keys of work beyond rounds that nobody asks for any more, though it did not count


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Something that was done to the run as a whole, such as `set` or `roll_back`; `value` is JSON values."""

    kind: str
    at: float  # seconds since 1970
    round: int  # rounds that were committed then
    value: Mapping[str, Any]


class Ledger:
    def __init__(self, database: Database) -> None:
        self._db = database
        with self._db.transaction():
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._db.execute(statement)

    def close(self) -> None:
        self._db.close()

    # Attempts

    def unfinished_attempt(self, round: int) -> int | None:
        """The attempt at a round that a process before this one left open."""
        rows = self._db.query("SELECT attempt FROM attempts WHERE round = ? AND status = 'open'", (round,))
        return int(rows[-1][0]) if rows else None

    def open_attempt(self, round: int, at: float) -> int:
        """The attempt to work on: the open one, or one after the last discarded."""
        unfinished = self.unfinished_attempt(round)
        if unfinished is not None:
            return unfinished
        rows = self._db.query("SELECT attempt FROM attempts WHERE round = ? ORDER BY attempt", (round,))
        attempt = int(rows[-1][0]) + 1 if rows else 0
        self._db.execute("INSERT INTO attempts VALUES (?, ?, 'open', '', ?)", (round, attempt, at))
        return attempt

    def discard(
        self, round: int, attempt: int, reason: str, deal: Any, operation: Operation | None = None, *,
        beyond: Sequence[int], withdrawn: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """What is kept under the rounds `beyond` is dropped too, and work beyond rounds of the keys `withdrawn`."""
        with self._db.transaction():
            for table in ("leases", "replies"):
                self._db.execute_many(f"DELETE FROM {table} WHERE round = ?", [(place,) for place in beyond])
                self._db.execute_many(
                    f"DELETE FROM {table} WHERE round > ? AND key = ?", [(round, key) for key in withdrawn]
                )
            if operation is not None:
                self.record(operation)
            self._db.execute(
                "UPDATE attempts SET status = 'discarded', reason = ? WHERE round = ? AND attempt = ?",
                (reason, round, attempt),
            )
            self._put_deal(deal)

    def commit(self, row: CommitRow, at: float) -> None:
        """One transaction: after it the round counts, before it nothing of it does."""
        accepted = [[r.key, r.worker, r.object, r.version, dict(r.scalars)] for r in row.accepted]
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO commits VALUES (?, ?, ?, ?, ?)",
                (row.round, row.attempt, json.dumps(row.state), json.dumps(accepted), at),
            )
            self._db.execute(
                "UPDATE attempts SET status = 'committed' WHERE round = ? AND attempt = ?", (row.round, row.attempt)
            )
            for name, value in row.metrics.items():
                self.metric(row.round + 1, name, value)
            self._db.execute_many(
                "INSERT OR REPLACE INTO versions VALUES (?, ?)",
                [(r.worker, r.version) for r in row.accepted if r.version],
            )
            self._db.execute_many(
                "INSERT INTO contributions VALUES (?, ?, 1, 0, 0) ON CONFLICT (worker) DO UPDATE SET "
                "tokens = tokens + excluded.tokens, rounds = rounds + 1",
                [(r.worker, int(r.scalars.get("num_tokens", 0))) for r in row.accepted],
            )
            counted = {r.key for r in row.accepted}
            for table in ("leases", "replies"):  # work beyond rounds belongs to the round that used it
                self._db.execute_many(
                    f"UPDATE {table} SET round = ?, attempt = ? WHERE round > ? AND key = ?",
                    [(row.round, row.attempt, row.round, key) for key in sorted(counted)],
                )
                self._db.execute_many(
                    f"DELETE FROM {table} WHERE round > ? AND key = ?",
                    [(row.round, key) for key in row.over if key not in counted],
                )
            self._put_deal(row.deal)
            # What older rounds needed for replay is covered by this commit.
            for table in ("decisions", "leases", "replies"):
                self._db.execute(f"DELETE FROM {table} WHERE round < ?", (row.round,))

    def last_state(self) -> dict[str, Any] | None:
        """The state after the last commit, as JSON; None before the first."""
        rows = self._db.query("SELECT state FROM commits ORDER BY round DESC LIMIT 1")
        return json.loads(rows[0][0]) if rows else None

    def deal(self) -> Any:
        """The data's deal as of now: the last commit's, and what open leases hold since. None before the first."""
        rows = self._db.query("SELECT value FROM meta WHERE name = 'deal'")
        return json.loads(rows[0][0]) if rows else None

    def _put_deal(self, deal: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('deal', ?)", (json.dumps(deal),))

    def roll_back(
        self, round: int, deal: Any, reason: str, *, state: Any = None, operation: Operation | None = None
    ) -> None:
        """Go back to the state after `round` rounds: used when the files of a later commit are gone, or it is no good.

        What came after it no longer counts for anyone. Its attempts stay, as discarded: so no result of theirs that a
        worker still holds can pass for one of the rounds that are done again. `state` is that state where its files
        are others now.
        """
        with self._db.transaction():
            self._put_deal(deal)
            for (accepted,) in self._db.query("SELECT accepted FROM commits WHERE round >= ?", (round,)):
                for _, worker, _, _, scalars in json.loads(accepted):
                    self._db.execute(
                        "UPDATE contributions SET tokens = tokens - ?, rounds = rounds - 1 WHERE worker = ?",
                        (int(scalars.get("num_tokens", 0)), worker),
                    )
            self._db.execute("UPDATE attempts SET status = 'discarded', reason = ? WHERE round >= ?", (reason, round))
            for table in ("commits", "decisions", "leases", "replies"):
                self._db.execute(f"DELETE FROM {table} WHERE round >= ?", (round,))
            self._db.execute("DELETE FROM metrics WHERE round > ?", (round,))
            self._db.execute("DELETE FROM versions")
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('roll_backs', ?)", (str(self.num_roll_backs() + 1),))
            if state is not None:
                self._db.execute("UPDATE commits SET state = ? WHERE round = ?", (json.dumps(state), round - 1))
            if operation is not None:
                self.record(operation)

    def num_roll_backs(self) -> int:
        """How often the run went back."""
        rows = self._db.query("SELECT value FROM meta WHERE name = 'roll_backs'")
        return int(rows[0][0]) if rows else 0

    # The run as a whole

    def record(self, operation: Operation) -> None:
        row = (operation.at, operation.round, operation.kind, json.dumps(dict(operation.value)))
        self._db.execute("INSERT INTO operations (at, round, kind, value) VALUES (?, ?, ?, ?)", row)

    def operations(self) -> list[Operation]:
        """All of them, in order."""
        rows = self._db.query("SELECT kind, at, round, value FROM operations ORDER BY number")
        return [Operation(kind=k, at=at, round=r, value=json.loads(value)) for k, at, r, value in rows]

    # Within an attempt

    def decide(self, round: int, attempt: int, name: str, value: Any) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?)", (round, attempt, name, json.dumps(value))
        )

    def decide_all(self, round: int, attempt: int, values: Mapping[str, Any]) -> None:
        """All of them or none."""
        with self._db.transaction():
            for name, value in values.items():
                self.decide(round, attempt, name, value)

    def decisions(self, round: int, attempt: int) -> dict[str, Any]:
        rows = self._db.query("SELECT name, value FROM decisions WHERE round = ? AND attempt = ?", (round, attempt))
        return {str(name): json.loads(value) for name, value in rows}

    def issue(self, round: int, attempt: int, leases: Iterable[LeaseRow], deal: Any) -> None:
        """Leases and the deal of the data that they hold, at once."""
        with self._db.transaction():
            self._db.execute_many(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(round, attempt, x.key, x.issue, x.worker, x.lease, x.status, x.reason) for x in leases],
            )
            self._put_deal(deal)

    def settle(
        self, round: int, attempt: int, key: str, issue: int, status: str, reason: str = "", deal: Any = None,
        pace: Mapping[str, Sequence[float]] = _no_pace,
    ) -> None:  # fmt: skip
        """Close a lease; with `deal` where its data was taken back.

        `pace` is what its worker took for a training sequence, this time and before.
        """
        with self._db.transaction():
            self._db.execute(
                "UPDATE leases SET status = ?, reason = ? WHERE round = ? AND attempt = ? AND key = ? AND issue = ?",
                (status, reason, round, attempt, key, issue),
            )
            if deal is not None:
                self._put_deal(deal)
            self._put_paces(pace)

    def withdraw(
        self, round: int, attempt: int, reasons: Mapping[str, str], deal: Any,
        pace: Mapping[str, Sequence[float]] = _no_pace,
    ) -> None:  # fmt: skip
        """The tasks of these keys are lost, also where they were answered, and their data was taken back: all at once.

        `pace` as in `settle`.
        """
        with self._db.transaction():
            self._db.execute_many(
                "UPDATE leases SET status = 'lost', reason = ? WHERE round = ? AND attempt = ? AND key = ?",
                [(reason, round, attempt, key) for key, reason in reasons.items()],
            )
            self._db.execute_many(
                "DELETE FROM replies WHERE round = ? AND attempt = ? AND key = ?",
                [(round, attempt, key) for key in reasons],
            )
            self._put_deal(deal)
            self._put_paces(pace)

    def _put_paces(self, pace: Mapping[str, Sequence[float]]) -> None:
        for worker, seconds in pace.items():
            self._db.execute("INSERT OR REPLACE INTO paces VALUES (?, ?)", (worker, json.dumps(list(seconds))))

    def leases(self, round: int, attempt: int) -> list[LeaseRow]:
        rows = self._db.query(
            "SELECT key, issue, worker, lease, status, reason FROM leases WHERE round = ? AND attempt = ? "
            "ORDER BY rowid",  # as they were handed out: a chain is gone through in this order
            (round, attempt),
        )
        return [
            LeaseRow(key=k, issue=i, worker=w, lease=bytes(blob), status=s, reason=r) for k, i, w, blob, s, r in rows
        ]

    def reply(
        self, round: int, attempt: int, row: ReplyRow, issue: int, pace: Mapping[str, Sequence[float]] = _no_pace
    ) -> bool:
        """Log an accepted reply and close its lease. False if the task had a reply already, which stays, or was lost.

        `pace` as in `settle`.
        """
        with self._db.transaction():
            if self._db.query(
                "SELECT 1 FROM leases WHERE round = ? AND attempt = ? AND key = ? AND issue = ? AND status = 'lost'",
                (round, attempt, row.key, issue),
            ):
                return False
            is_first = self._db.execute(
                "INSERT INTO replies (round, attempt, key, worker, object, scalars, version) VALUES (?,?,?,?,?,?,?) "
                "ON CONFLICT DO NOTHING",
                (round, attempt, row.key, row.worker, row.object, json.dumps(dict(row.scalars)), row.version),
            )
            self.settle(round, attempt, row.key, issue, "replied" if is_first else "lost", pace=pace)
            return bool(is_first)

    def replies(self, round: int, attempt: int) -> list[ReplyRow]:
        rows = self._db.query(
            "SELECT number, key, worker, object, scalars, version FROM replies WHERE round = ? AND attempt = ? "
            "ORDER BY number",
            (round, attempt),
        )
        return [
            ReplyRow(number=n, key=k, worker=w, object=o, scalars=json.loads(s), version=v) for n, k, w, o, s, v in rows
        ]

    # Who holds what, and who gave what

    def versions(self) -> dict[str, str]:
        """The committed pinned state of each worker."""
        return {str(w): str(v) for w, v in self._db.query("SELECT worker, version FROM versions")}

    def paces(self) -> dict[str, list[float]]:
        """Seconds for a training sequence in the last tasks of each worker."""
        return {str(w): json.loads(seconds) for w, seconds in self._db.query("SELECT worker, seconds FROM paces")}

    def add_traffic(self, moved: Mapping[str, tuple[int, int]]) -> None:
        """Bytes up and down by worker."""
        with self._db.transaction():
            self._db.execute_many(
                "INSERT INTO contributions VALUES (?, 0, 0, ?, ?) ON CONFLICT (worker) DO UPDATE SET "
                "bytes_up = bytes_up + excluded.bytes_up, bytes_down = bytes_down + excluded.bytes_down",
                [(worker, up, down) for worker, (up, down) in moved.items()],
            )

    def contributions(self) -> list[dict[str, Any]]:
        rows = self._db.query("SELECT worker, tokens, rounds, bytes_up, bytes_down FROM contributions ORDER BY worker")
        return [
            {"id": w, "tokens": int(t), "rounds": int(r), "bytes_up": int(u), "bytes_down": int(d)}
            for w, t, r, u, d in rows
        ]

    def audit(self, query: str) -> list[tuple[Any, ...]]:
        """Any SELECT, for those who look at a run from outside."""
        return self._db.query(query)

    # Metrics

    def metric(self, round: int, name: str, value: float) -> None:
        self._db.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", (round, name, value))

    def metrics(self, name: str, last: int = -1) -> list[tuple[int, float]]:
        """By round; of the last so many rounds that have it, -1 for all."""
        rows = self._db.query(
            "SELECT round, value FROM (SELECT round, value FROM metrics WHERE name = ? ORDER BY round DESC LIMIT ?) "
            "ORDER BY round",
            (name, last),
        )
        return [(int(r), float(v)) for r, v in rows]

    def metrics_under(self, prefix: str) -> list[tuple[str, int, float]]:
        """Name, round and value of all whose names begin so, by name and round."""
        rows = self._db.query(
            "SELECT name, round, value FROM metrics WHERE substr(name, 1, ?) = ? ORDER BY name, round",
            (len(prefix), prefix),
        )
        return [(str(n), int(r), float(v)) for n, r, v in rows]
