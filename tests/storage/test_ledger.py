"""The run's ledger: one answer per task, whatever order they come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.storage.database import Database
from potluck.storage.ledger import LeaseRow, Ledger, ReplyRow


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(Database(tmp_path / "ledger.db"))


def lease(worker: str, issue: int) -> LeaseRow:
    return LeaseRow(key="bag/0", issue=issue, worker=worker, lease=b"x", status="open")


def reply(worker: str) -> ReplyRow:
    return ReplyRow(key="bag/0", worker=worker, object="", scalars={"n": 1}, version="")


def test_the_first_of_two_copies_is_the_answer(ledger: Ledger) -> None:
    ledger.issue(0, 0, [lease("w1", 0), lease("w2", 1)], {"deal": 1})
    assert ledger.reply(0, 0, reply("w2"), 1)
    assert not ledger.reply(0, 0, reply("w1"), 0)
    assert [r.worker for r in ledger.replies(0, 0)] == ["w2"]
    assert [(r.worker, r.status) for r in ledger.leases(0, 0)] == [("w1", "lost"), ("w2", "replied")]


def test_data_that_is_taken_back_is_written_with_its_lease(ledger: Ledger) -> None:
    ledger.issue(0, 0, [lease("w1", 0)], {"outstanding": 4})
    ledger.settle(0, 0, "bag/0", 0, "lost", "gone")
    assert ledger.deal() == {"outstanding": 4}
    ledger.settle(0, 0, "bag/0", 0, "lost", "gone", {"outstanding": 0})
    assert ledger.deal() == {"outstanding": 0}
    assert [(r.status, r.reason) for r in ledger.leases(0, 0)] == [("lost", "gone")]
