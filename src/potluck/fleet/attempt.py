"""One attempt at a round, as the ledger knows it: what makes running the round again take up where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from potluck.fleet.data import DataPlane, num_steps_left, num_trained, parted
from potluck.protocol import pb
from potluck.storage.ledger import LeaseRow, Ledger, ReplyRow


@dataclass
class Attempt:
    """Replies, leases and decisions by their keys, and which replies the verbs have returned so far."""

    round: int = 0
    attempt: int = 0
    replies: dict[str, ReplyRow] = field(default_factory=dict[str, ReplyRow])
    leases: dict[str, list[LeaseRow]] = field(default_factory=dict[str, list[LeaseRow]])
    decisions: dict[str, Any] = field(default_factory=dict[str, Any])
    consumed: dict[str, ReplyRow] = field(default_factory=dict[str, ReplyRow])
    _versions: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def add_reply(self, row: ReplyRow) -> None:
        self.replies[row.key] = row
        if row.version:
            self._versions.setdefault(row.worker, {})[row.key] = row.version

    def drop_reply(self, key: str) -> None:
        row = self.replies.pop(key, None)
        if row is not None and row.version:
            self._versions[row.worker].pop(key, None)

    def lose(self, key: str, issue: int, reason: str) -> None:
        """A lease will not be answered."""
        rows = self.leases.get(key, [])
        for number, row in enumerate(rows):
            if row.issue == issue:
                rows[number] = replace(row, status="lost", reason=reason)

    def versions_of(self, worker: str) -> Iterable[str]:
        """Pinned states that a worker's replies lead to."""
        return self._versions.get(worker, {}).values()

    def last_version(self, worker: str) -> str:
        """The one of these that came last, "" for none."""
        return next(reversed(self._versions.get(worker, {}).values()), "")

    def settle(self, data: DataPlane, *, committed: bool) -> None:
        """What the replies that counted have trained is consumed; what else this attempt was dealt goes back."""
        for key, rows in self.leases.items():
            reply = self.consumed.get(key) if committed else None
            for row in rows:
                lease = pb.Lease.FromString(row.lease)
                if not lease.held_out:
                    counts = reply is not None and reply.worker == row.worker
                    scalars = reply.scalars if reply is not None else {}
                    trained, left = parted(lease.spans, num_trained(lease, scalars) if counts else 0)
                    data.settle(trained, consumed=True)
                    data.settle(left, consumed=False)

    def settle_replied(self, data: DataPlane) -> None:
        """Give back what all replies have trained: none of them counts."""
        for key in self.replies:
            for row in self.leases.get(key, ()):
                data.settle(pb.Lease.FromString(row.lease).spans, consumed=False)

    def steps_left(self) -> dict[str, int]:
        """By worker the steps that it was granted and did not take, of the replies that count."""
        return {
            row.worker: num_steps_left(pb.Lease.FromString(row.lease), reply.scalars)
            for key, reply in self.consumed.items()
            for row in self.leases.get(key, ())
            if row.worker == reply.worker
        }

    def inputs(self, key: str) -> list[pb.SessionInput]:
        """What was sent to a session and not yet taken."""
        prefix = f"input/{key}/"
        return [
            pb.SessionInput(
                key=key,
                step=int(name[len(prefix) :]),
                arguments_json=json.dumps(value["arguments"]),
                objects=value["objects"],
            )
            for name, value in self.decisions.items()
            if name.startswith(prefix) and not value["acknowledged"]
        ]


def read_attempt(ledger: Ledger, round: int, attempt: int, first: Mapping[str, Any] | None = None) -> Attempt:
    """What the ledger has of an attempt. One that is new begins with the decisions `first`, its cohort. Blocks."""
    found = Attempt(round=round, attempt=attempt)
    for row in ledger.replies(round, attempt):
        found.add_reply(row)
    for row in ledger.leases(round, attempt):
        found.leases.setdefault(row.key, []).append(row)
    found.decisions = ledger.decisions(round, attempt)
    if first and "cohort" not in found.decisions:
        found.decisions |= first
        ledger.decide_all(round, attempt, first)
    return found
