"""The run's ledger: one answer per task, whatever order they come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.storage.database import Database
from potluck.storage.ledger import CommitRow, LeaseRow, Ledger, Operation, ReplyRow


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


def test_a_commit_is_the_state_from_then_on_until_it_is_rolled_back(ledger: Ledger) -> None:
    assert ledger.last_state() is None
    assert ledger.deal() is None
    for round in range(2):
        attempt = ledger.open_attempt(round, at=1.0)
        accepted = ReplyRow(key="inner/w1", worker="w1", object="", scalars={"num_tokens": 10}, version=f"v{round}")
        row = CommitRow(
            round=round, attempt=attempt, state={"round": round + 1}, deal={"done": round + 1}, accepted=(accepted,)
        )
        ledger.commit(row, at=2.0)
    assert ledger.last_state() == {"round": 2}
    assert ledger.deal() == {"done": 2}
    assert ledger.versions() == {"w1": "v1"}
    assert ledger.contributions() == [{"id": "w1", "tokens": 20, "rounds": 2, "bytes_up": 0, "bytes_down": 0}]

    assert ledger.num_roll_backs() == 0
    ledger.roll_back(1, {"done": 1}, "its files are gone")
    assert ledger.num_roll_backs() == 1
    assert ledger.last_state() == {"round": 1}
    assert ledger.deal() == {"done": 1}
    assert ledger.versions() == {}
    assert ledger.contributions() == [{"id": "w1", "tokens": 10, "rounds": 1, "bytes_up": 0, "bytes_down": 0}]
    assert ledger.open_attempt(1, at=3.0) == 1  # not 0, which was done and no longer counts


def test_operations_are_kept_in_order_and_one_that_goes_back_is_written_with_it(ledger: Ledger) -> None:
    first = Operation(kind="set", at=1.0, round=2, value={"key": "a"})
    back = Operation(kind="roll_back", at=2.0, round=3, value={"to_round": 1})
    ledger.record(first)
    for round in range(3):
        row = CommitRow(
            round=round, attempt=0, state={"round": round + 1}, deal={}, accepted=(), metrics={"loss": float(round)}
        )
        ledger.commit(row, 0.0)
    assert ledger.metrics("loss", 2) == [(2, 1.0), (3, 2.0)]
    ledger.roll_back(1, {"again": 1}, "no good", state={"round": 1, "moved": True}, operation=back)
    assert ledger.operations() == [first, back]
    assert ledger.last_state() == {"round": 1, "moved": True}
    assert ledger.metrics("loss") == [(1, 0.0)]


def test_a_workers_pace_is_written_with_its_reply(ledger: Ledger) -> None:
    ledger.issue(0, 0, [lease("w1", 0)], {})
    ledger.reply(0, 0, reply("w1"), 0, {"w1": [2.0, 3.0]})
    assert ledger.paces() == {"w1": [2.0, 3.0]}


def test_the_pace_of_a_worker_that_was_late_is_written_with_the_loss(ledger: Ledger) -> None:
    ledger.issue(0, 0, [lease("w1", 0)], {})
    ledger.settle(0, 0, "w1", 0, "lost", "late", pace={"w1": [9.0]})
    assert ledger.paces() == {"w1": [9.0]}


def test_what_was_answered_may_be_withdrawn_and_cannot_be_answered_again(ledger: Ledger) -> None:
    """Whichever is written down first."""
    other = LeaseRow(key="bag/1", issue=0, worker="w1", lease=b"x", status="open")
    ledger.issue(0, 0, [lease("w1", 0), other], {"outstanding": 8})
    ledger.reply(0, 0, reply("w1"), 0)
    ledger.withdraw(0, 0, {"bag/0": "it follows lost work", "bag/1": "gone"}, {"outstanding": 0}, {"w1": [9.0]})
    assert not ledger.reply(0, 0, reply("w1"), 0)
    assert ledger.replies(0, 0) == []
    assert [(r.key, r.status, r.reason) for r in ledger.leases(0, 0)] == [
        ("bag/0", "lost", "it follows lost work"), ("bag/1", "lost", "gone")
    ]  # fmt: skip
    assert ledger.deal() == {"outstanding": 0}
    assert ledger.paces() == {"w1": [9.0]}
