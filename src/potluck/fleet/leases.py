"""Leases: one piece of work in one worker's hands, until it is answered or lost."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from potluck.fleet.claims import Claims
from potluck.fleet.config import FleetConfig
from potluck.fleet.roster import Member, absence, heard_until, silence
from potluck.planner.deadline import deadline_s
from potluck.protocol import AHEAD, pb
from potluck.storage.ledger import ReplyRow
from potluck.strategies.fleet import Reduction, WorkerInfo
from potluck.types.ids import LeaseId, WorkerId

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
    is_taken_over: bool = False  # from an earlier process: how long its worker has had it is not known
    started_at: float = 0.0  # when it was first seen to be worked on, 0 for not yet
    worked_until: float = 0.0  # when its result was first seen on its way, 0 for not yet
    claims: Claims = field(default_factory=Claims)
    checking: bool = False  # its result is being validated
    is_cut_short: bool = False  # its worker is told to end after the step it is at
    began: Callable[[], None] = lambda: None  # hears that it was seen to be worked on
    early: pb.TaskResult | None = None  # came before it was claimed
    claimed: bool = True  # a verb waits for it; after a restart not until the round has been run again up to there
    number: int = 0  # in the order in which leases were opened
    look_at: float = math.inf  # when it is to be judged next whether it is lost

    @property
    def id(self) -> LeaseId:
        return (self.message.round, self.message.attempt, self.message.key)

    @property
    def told(self) -> pb.Lease:
        """As its worker is told of it now."""
        if not self.is_cut_short:
            return self.message
        told = pb.Lease()
        told.CopyFrom(self.message)
        told.cut_short = True
        return told

    @property
    def units(self) -> float:
        """What its duration grows with: sequences of data, else one."""
        return float(self.message.num_sequences or sum(s.stop - s.start for s in self.message.spans) or 1)

    def seen(self, progress: pb.Progress, now: float) -> bool:
        """The worker says how far it is; True where its work began or ended, so that its deadline is another."""
        if self.claims.is_progress(progress.activity, progress.step):
            self.progress_at = now
        if progress.activity == "training" and not self.started_at:
            self.started_at = now
            self.began()
            return True
        if progress.activity == "uploading" and self.started_at and not self.worked_until:
            self.worked_until = now
            return True
        return False

    def answer(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


@dataclass
class LeaseBook:
    """Every open lease, by id, by worker, and by when it is to be looked at. `add` and `close` change `open`."""

    open: dict[LeaseId, OpenLease] = field(default_factory=dict[LeaseId, OpenLease])
    sooner: asyncio.Event = field(default_factory=asyncio.Event)  # a look is due before `planned`
    planned: float = -math.inf
    closed: Callable[[OpenLease], None] = lambda _: None  # hears what is open no longer
    _by_worker: dict[WorkerId, dict[LeaseId, OpenLease]] = field(
        default_factory=dict[WorkerId, dict[LeaseId, OpenLease]]
    )
    _looks: list[tuple[float, int, OpenLease]] = field(default_factory=list[tuple[float, int, OpenLease]])
    _num_added: int = 0
    _num_looks: int = 0

    def add(self, lease: OpenLease) -> None:
        self._num_added += 1
        lease.number = self._num_added
        self.open[lease.id] = lease
        self._by_worker.setdefault(lease.worker, {})[lease.id] = lease

    def of(self, worker: WorkerId) -> list[OpenLease]:
        return list(self._by_worker.get(worker, {}).values())

    def free(self, workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        """Who may be given pure work, those with least else to do first: it goes before what was begun ahead."""
        found = [w for w in workers if all(x.message.round == AHEAD for x in self.of(w.id))]
        return sorted(found, key=lambda w: len(self.of(w.id)))

    def look(self, lease: OpenLease, at: float) -> None:
        """Have it looked at from that time on, and no earlier."""
        lease.look_at = at
        if at < math.inf:
            self._num_looks += 1
            heapq.heappush(self._looks, (at, self._num_looks, lease))
            if at < self.planned:
                self.sooner.set()

    def first_look(self) -> float:
        """When the next look is due; inf for never."""
        while self._looks and not self._is_due_then(*self._looks[0]):
            heapq.heappop(self._looks)
        return self._looks[0][0] if self._looks else math.inf

    def due(self, now: float) -> list[OpenLease]:
        """Those to look at now, in the order in which they were opened."""
        found: dict[int, OpenLease] = {}
        while self._looks and self._looks[0][0] <= now:
            at, number, lease = heapq.heappop(self._looks)
            if self._is_due_then(at, number, lease):
                found[lease.number] = lease
        return [found[number] for number in sorted(found)]

    def _is_due_then(self, at: float, _: int, lease: OpenLease) -> bool:
        return lease.look_at == at and self.open.get(lease.id) is lease

    def forgive(self, paused_s: float) -> None:
        """As `Roster.forgive`."""
        for lease in self.open.values():
            lease.issued_at += paused_s
            lease.progress_at += paused_s
            if lease.started_at and not lease.worked_until:
                lease.started_at += paused_s

    def close(self, lease: OpenLease, outcome: Outcome) -> None:
        self.open.pop(lease.id, None)
        held = self._by_worker.get(lease.worker)
        if held is not None and held.pop(lease.id, None) is not None and not held:
            del self._by_worker[lease.worker]
        lease.answer(outcome)
        self.closed(lease)


def loss(
    lease: OpenLease, member: Member | None, now: float, config: FleetConfig, *, is_alone: bool = False,
    others_work: bool = False,
) -> str:  # fmt: skip
    """Why a lease is to be given up now, "" while it is not. Nobody waits for a worker that `is_alone`.

    As long as `others_work` on what waits for it too, a worker that has gone may come back to its pinned task for
    nothing.
    """
    if lease.checking:
        return ""
    if member is None:
        waited_s = now - lease.issued_at
        return f"{lease.worker} did not come back" if waited_s > restart_grace * config.reconnect_s else ""
    if member.quarantined:
        return f"{member.id} is quarantined: {member.quarantined}"
    if lease.early is not None:
        return ""  # its worker has answered, and nobody asks yet
    gone = absence(member, now, config)
    if gone and others_work and lease.message.kind == "pinned" and not member.leaving:
        return ""  # it may come back before they are done
    if lease.message.kind == "pure":
        gone = gone or silence(member, now, config)  # nothing is lost where another one does it meanwhile
    if gone:
        return gone
    if lease.message.kind == "session":
        return ""
    if not member.connected:
        return ""
    if is_stuck(lease, now, config):
        stuck_s, at = now - lease.progress_at, lease.claims.activity or "not started"
        return f"{member.id} has made no progress for {stuck_s:.0f} s ({at})"
    return overdue(lease, member, now) if config.deadlines and not is_alone else ""


def may_be_lost_at(lease: OpenLease, member: Member | None, config: FleetConfig) -> float:
    """The earliest time at which `loss` can find a reason if nothing is heard until then; -inf for at once."""
    if member is None:
        return lease.issued_at + restart_grace * config.reconnect_s
    if member.quarantined or member.leaving:
        return -math.inf
    silent_at = heard_until(member, config)
    if not member.connected:
        away_at = member.away_since + config.reconnect_s
        return min(away_at, silent_at) if lease.message.kind == "pure" else away_at
    if lease.message.kind == "session":
        return silent_at
    stuck_at = lease.progress_at + config.no_progress_s
    late_at = math.inf
    if config.deadlines and lease.started_at:
        limit_s = deadline_s(member.seconds_per_unit.get(lease.message.task, []), lease.units)
        if limit_s is not None:
            late_at = lease.started_at + limit_s
        if lease.worked_until:
            late_at = -math.inf if lease.worked_until > late_at else math.inf
    return min(silent_at, stuck_at, late_at)


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
