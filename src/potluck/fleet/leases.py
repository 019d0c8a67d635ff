"""Leases: one piece of work in one worker's hands, until it is answered or lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from potluck.fleet.claims import Claims
from potluck.fleet.config import FleetConfig
from potluck.fleet.roster import LeaseId, Member, absence
from potluck.planner.deadline import deadline_s
from potluck.protocol import pb
from potluck.storage.ledger import ReplyRow
from potluck.strategies.fleet import Reduction
from potluck.types.ids import WorkerId

FLOATING = (1 << 40) - 1
"""The round under which work is kept that may outlive rounds: `next` and sessions."""

restart_grace = 5.0
"""After a restart of the coordinator workers have this many times `reconnect_s` to find it again."""

_ISSUES = 1024


def wire_attempt(attempt: int, issue: int) -> int:
    """One number for (attempt at the round, how often the task was issued in it)."""
    return attempt * _ISSUES + issue


@dataclass(frozen=True)
class Lost:
    """What became of a lease that will not be answered."""

    worker: WorkerId
    reason: str
    failed: bool = False  # the task itself failed there, so another worker may fail too


Outcome = ReplyRow | Lost


@dataclass(kw_only=True, eq=False)
class OpenLease:
    """A lease that waits for its answer. Times are the clock's seconds."""

    message: pb.Lease
    worker: WorkerId
    attempt: int  # at the round
    issue: int
    expects: Reduction | None
    issued_at: float
    progress_at: float
    outcome: asyncio.Future[Outcome]
    started_at: float = 0.0  # when it was first seen to be worked on, 0 for not yet
    worked_until: float = 0.0  # when its result was first seen on its way, 0 for not yet
    claims: Claims = field(default_factory=Claims)
    checking: bool = False  # its result is being validated
    claimed: bool = True  # a verb waits for it; after a restart not until the round has been run again up to there

    @property
    def id(self) -> LeaseId:
        return (self.message.round, self.message.attempt, self.message.key)

    @property
    def units(self) -> float:
        """What its duration grows with: sequences of data, else one."""
        return float(self.message.num_sequences or sum(s.stop - s.start for s in self.message.spans) or 1)

    def seen(self, progress: pb.Progress, now: float) -> None:
        """The worker says how far it is."""
        if self.claims.is_progress(progress.activity, progress.step):
            self.progress_at = now
        if progress.activity == "training" and not self.started_at:
            self.started_at = now
        if progress.activity == "uploading" and self.started_at and not self.worked_until:
            self.worked_until = now

    def answer(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@dataclass
class LeaseBook:
    """Every open lease, by id and by worker."""

    open: dict[LeaseId, OpenLease] = field(default_factory=dict[LeaseId, OpenLease])

    def add(self, lease: OpenLease) -> None:
        self.open[lease.id] = lease

    def of(self, worker: WorkerId) -> list[OpenLease]:
        return [lease for lease in self.open.values() if lease.worker == worker]

    def forgive(self, paused_s: float) -> None:
        """As `Roster.forgive`."""
        for lease in self.open.values():
            lease.issued_at += paused_s
            lease.progress_at += paused_s
            if lease.started_at and not lease.worked_until:
                lease.started_at += paused_s

    def close(self, lease: OpenLease, outcome: Outcome) -> None:
        self.open.pop(lease.id, None)
        lease.answer(outcome)


def loss(
    lease: OpenLease, member: Member | None, now: float, config: FleetConfig, *, is_alone: bool = False,
    others_work: bool = False,
) -> str:  # fmt: skip
    """Why a lease is to be given up now, "" while it is not. Nobody waits for a worker that `is_alone`.

    As long as `others_work` on the same round, a worker that has gone may come back to its pinned task for nothing.
    """
    if lease.checking:
        return ""
    if member is None:
        waited_s = now - lease.issued_at
        return f"{lease.worker} did not come back" if waited_s > restart_grace * config.reconnect_s else ""
    if member.quarantined:
        return f"{member.id} is quarantined: {member.quarantined}"
    if gone := absence(member, now, config):
        may_come_back = others_work and lease.message.kind == "pinned" and not member.leaving
        return "" if may_come_back else gone
    if not member.connected:
        return ""
    if lease.message.kind == "session":
        return ""
    if is_stuck(lease, now, config):
        stuck_s, at = now - lease.progress_at, lease.claims.activity or "not started"
        return f"{member.id} has made no progress for {stuck_s:.0f} s ({at})"
    return overdue(lease, member, now) if config.deadlines and not is_alone else ""


def is_stuck(lease: OpenLease, now: float, config: FleetConfig) -> bool:
    """Whether its worker, though here, has not moved it on for too long."""
    return now - lease.progress_at > config.no_progress_s


def overdue(lease: OpenLease, member: Member, now: float) -> str:
    """Why a lease was worked on far too long, by what its worker's past predicts; "" while it was not.

    How long its result takes to come counts for nothing: bytes that move are progress.
    """
    limit_s = deadline_s(member.seconds_per_unit.get(lease.message.task, []), lease.units)
    taken_s = (lease.worked_until or now) - lease.started_at
    if not lease.started_at or limit_s is None or taken_s <= limit_s:
        return ""
    return f"{member.id} has worked {taken_s:.0f} s on {lease.message.task} and its past allows {limit_s:.0f} s"
