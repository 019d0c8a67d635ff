"""What a restart makes of work that was begun early: whose chains go on, and what follows work that was lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from potluck.fleet.ahead import Ahead, Chain
from potluck.fleet.attempt import Attempt
from potluck.protocol import AHEAD, pb
from potluck.storage.ledger import LeaseRow, ReplyRow
from potluck.types.ids import WorkerId


def row(key: str, worker: str, base: str, leads_to: str, status: str = "open", reason: str = "") -> LeaseRow:
    name = f"{key}/{worker}#0.0"
    lease = pb.Lease(key=name, round=AHEAD, kind="pinned", base_version=base, next_version=leads_to)
    return LeaseRow(key=name, issue=0, worker=worker, lease=lease.SerializeToString(), status=status, reason=reason)


def unsent(key: str, worker: str) -> LeaseRow:
    """Of work that was not handed out, since what it would follow is lost."""
    return row(key, worker, "", "", "lost", "it died")


def ahead(*rows: LeaseRow) -> Ahead:
    return Ahead.of(Attempt(round=AHEAD, leases={r.key: [r] for r in rows}))


def test_work_that_was_never_sent_takes_nothing_with_it() -> None:
    """Chains that begin with no state are those of other workers."""
    found = ahead(
        row("0b", "w1", "", "v1", "lost", "it died"),
        unsent("1b", "w1"),
        row("0b", "w2", "", "u1"),
        row("1b", "w2", "u1", "u2"),
    )
    assert found.orphans() == {}
    assert found.under_way() == ["w2"]


def test_all_that_follows_lost_work_is_lost() -> None:
    """Answered or not: a small result may come, and count, before the large one that it follows is refused."""
    found = ahead(
        row("0b", "w1", "", "v1", "replied"),
        row("1a", "w1", "v1", "v2", "lost", "it died"),
        row("1b", "w1", "v2", "v3"),
        row("2a", "w1", "v3", "v4", "replied"),
        row("2b", "w1", "v4", "v5"),
        row("1a", "w2", "u1", "u2", "replied"),
        row("1b", "w2", "u2", "u3"),
    )
    assert found.orphans() == dict.fromkeys(["1b/w1#0.0", "2a/w1#0.0", "2b/w1#0.0"], "it died")
    assert found.orphans(WorkerId("w1")) == found.orphans() and found.orphans(WorkerId("w2")) == {}
    for name, reason in found.orphans().items():
        found.lose(name, reason)
    assert found.orphans() == {}
    assert found.chains[WorkerId("w1")].broken == "it died"
    assert found.under_way() == ["w2"]


def test_what_was_answered_and_is_lost_has_no_reply_and_leads_nowhere() -> None:
    rows = [row("0b", "w1", "", "v1", "lost", "it died"), row("1a", "w1", "v1", "v2", "replied")]
    attempt = Attempt(round=AHEAD, leases={r.key: [r] for r in rows})
    attempt.add_reply(ReplyRow(key="1a/w1#0.0", worker="w1", object="", scalars={}, version="v2"))
    found = Ahead.of(attempt)
    found.lose("1a/w1#0.0", "it died")
    found.lose("9b/w1#0.0", "a late answer to work of a round that is over")
    assert found.row("1a/w1#0.0").status == "lost"
    assert not attempt.replies and not list(attempt.versions_of("w1"))
    assert found.chains[WorkerId("w1")].broken == "it died"


@pytest.mark.parametrize(
    ("rows", "chain"),
    [
        ([row("0b", "w", "v0", "v1", "replied"), row("1b", "w", "v1", "v2")], Chain("v2")),
        (
            [row("0b", "w", "v0", "v1", "replied"), row("1b", "w", "v1", "v2", "lost", "it died"), unsent("2b", "w")],
            Chain("v1", broken="it died"),
        ),
        ([row("0b", "w", "v0", "v1", "lost", "it died"), unsent("1b", "w")], Chain("", broken="it died")),
        (
            [
                row("0b", "w", "v0", "v1", "replied"),
                row("1b", "w", "v1", "v2", "lost", "it died"),
                unsent("2b", "w"),
                row("3b", "w", "v0", "v3"),
            ],
            Chain("v3"),
        ),
        ([row("0b", "w", "", "v1", "lost", "it died"), row("1b", "w", "", "v2")], Chain("v2")),
    ],
    ids=["whole", "broken", "nothing left", "begun again", "begun again with no state"],
)
def test_a_chain_is_what_was_handed_to_its_worker(rows: Sequence[LeaseRow], chain: Chain) -> None:
    found = ahead(*rows)
    assert found.chains == {WorkerId("w"): chain}
    assert found.under_way() == ([] if chain.broken else ["w"])


def test_names_are_kept_by_key_and_worker() -> None:
    found = ahead(row("0b", "w2", "", "u1"), row("0b", "w1", "", "v1", "replied"), unsent("1b", "w1"))
    assert dict(found.begun("0b")) == {"w1": "0b/w1#0.0", "w2": "0b/w2#0.0"}
    assert list(found.begun("0b")) == ["w1", "w2"]
    assert list(found.names(["0b", "1b"])) == ["0b/w2#0.0", "0b/w1#0.0", "1b/w1#0.0"]
