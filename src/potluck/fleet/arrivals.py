"""Work without a barrier: whoever is idle is given some, and replies count in the order in which they come.

Such work belongs to no round and outlives them. Each task of a worker goes on from the state that its last accepted one
left, whether that is committed yet or not: an accepted reply stays accepted until a round that commits has used it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from potluck.clock import Clock
from potluck.fleet.attempt import Attempt
from potluck.fleet.leases import Lost, OpenLease
from potluck.fleet.paces import cohort
from potluck.fleet.reduction import check_reduction
from potluck.fleet.waiting import a_little
from potluck.protocol import FLOATING, pb
from potluck.storage.ledger import Ledger, ReplyRow
from potluck.strategies.fleet import Reduction, Reply, WorkerInfo
from potluck.strategies.task import BoundTask
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId

if TYPE_CHECKING:
    from potluck.clock import Executor
    from potluck.fleet.live import LiveFleet

Offer = Callable[[WorkerInfo], BoundTask | None]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which replies a verb takes; the fields are the arguments of `Fleet.gather`."""

    offer: Offer
    min_replies: int = 1
    grace: float | None = None
    expects: Reduction | None = None
    max_staleness: int | None = None


@dataclass
class _Failures:
    """Tasks that failed since a reply came, while one verb waits."""

    open: dict[OpenLease, None] = field(default_factory=dict[OpenLease, None])  # whose outcome is to be looked at
    reasons: dict[WorkerId, list[str]] = field(default_factory=dict[WorkerId, list[str]])

    def look(self) -> None:
        for lease in [lease for lease in self.open if lease.outcome.done()]:
            del self.open[lease]
            outcome = lease.outcome.result()
            if not isinstance(outcome, Lost):
                self.reasons.clear()
            elif outcome.failed:
                self.reasons.setdefault(lease.worker, []).append(outcome.reason)

    def hopeless(self, hoped_for: Collection[WorkerId], most: int) -> str:
        """Why nothing is to be hoped for, "" if something is: all have failed so often, and whoever fails among many
        that do not is quarantined after as many times and not hoped for any more."""
        often = {worker: reasons[-1] for worker, reasons in self.reasons.items() if len(reasons) >= most}
        return "; ".join(often.values()) if often.keys() >= set(hoped_for) else ""


class Arrivals:
    """Of one fleet, whose ledger is written to in a lane of its own."""

    def __init__(self, fleet: LiveFleet, clock: Clock, ledger: Ledger, lane: Executor) -> None:
        self._fleet, self._clock, self._ledger, self._lane = fleet, clock, ledger, lane
        self._max_staleness: int | None = None  # of what the last verb takes

    async def take(self, wanted: Wanted, name: str) -> tuple[Reply, ...]:
        """The replies for the verb of that name, as was decided before if it was. They count with this attempt."""
        fleet, now = self._fleet, self._fleet.now
        self._max_staleness = wanted.max_staleness
        if wanted.expects:
            check_reduction(wanted.expects, fleet.run.aggregation)
        if name not in now.decisions:
            now.decisions[name] = chosen = await self._choose(wanted)
            await self._lane.run(self._ledger.decide, now.round, now.attempt, name, chosen)
        rows = [fleet.floating.replies[key] for key in now.decisions[name]]
        now.consumed |= {row.key: row for row in rows}
        return tuple(replace(fleet.reply_of(row), round=handed_out_in(row.key)) for row in rows)

    def too_stale(self, lease: OpenLease) -> str:
        """Why a result that has come counts no more, "" where it does."""
        most, message = self._max_staleness, lease.message
        if most is None or message.round != FLOATING or message.kind == "session":
            return ""
        staleness = self._fleet.now.round - handed_out_in(message.key)
        if staleness <= most:
            return ""
        return (
            f"{lease.worker} was {staleness} commits at an update, which counts after {most} at most; give slower "
            "workers less to do with fleet.balance = 'time', or raise strategy.max_staleness"
        )

    def drop(self) -> None:
        """The run goes back to the round before: no such work counts any more, and its data is dealt again."""
        fleet = self._fleet
        for lease in [x for x in fleet.book.open.values() if x.message.round == FLOATING]:
            fleet.give_up(lease, "the run went back to the round before")
        fleet.floating.settle_replied(fleet.data)
        fleet.floating = Attempt(round=FLOATING)
        fleet.now.consumed.clear()

    def withdraw(self, reason: str) -> list[str]:
        """The replies that this attempt took count no more, nor what workers went on to from the states that they left.
        The keys of all these; their data is dealt again."""
        fleet, floating = self._fleet, self._fleet.floating
        keys = {key for key in fleet.now.consumed if key in floating.replies and "@" not in key}
        gone = {floating.replies[key].version for key in keys} - {""}
        under_way = {x.message.key: x for x in self._at_work()}
        for key in [k for k in floating.leases if k in floating.replies or k in under_way]:
            lease = pb.Lease.FromString(floating.leases[key][-1].lease)  # a worker's in the order in which they began
            if key not in keys and lease.base_version not in gone:
                continue
            if key in under_way:
                fleet.give_up(under_way[key], reason)
            else:
                fleet.data.settle(lease.spans, consumed=False)
            keys.add(key)
            gone |= {lease.next_version} - {""}
            del floating.leases[key]
            floating.drop_reply(key)
        return sorted(keys)

    async def _choose(self, wanted: Wanted) -> list[str]:
        """The keys of the replies to take, once they are here. RoundFailed where everybody's work fails."""
        roster, now, floating = self._fleet.roster, self._fleet.now, self._fleet.floating
        self._claim(wanted.expects)
        ends_at: float | None = None
        failures = _Failures()
        while True:
            failures.look()
            delivered = {row.worker for row in _free(now, floating)}
            hoped_for = {w.id for w in roster.here(self._clock.now())}
            if wanted.grace is not None:
                hoped_for -= delivered
            why = failures.hopeless(hoped_for, self._fleet.config.quarantine_after)
            if why and (hoped_for or not delivered):  # else who has delivered is all that can be had
                raise RoundFailed(
                    f"{len(delivered)} of {wanted.min_replies} replies are here and all others fail: {why}"
                )
            await self._offer(wanted, but=delivered)
            free = _free(now, floating, one_each=wanted.grace is not None)
            is_enough = len(free) >= wanted.min_replies
            if wanted.grace is None and is_enough:
                return [row.key for row in free[: wanted.min_replies]]
            if wanted.grace is None:  # who has delivered goes on with the state as it is
                await self._offer(wanted, but=())
            elif free and not any(self._at_work()):
                return [row.key for row in free]  # nobody else can come
            elif is_enough:
                if ends_at is None:
                    ends_at = self._clock.now() + wanted.grace * self._typical_s(free)
                if self._clock.now() >= ends_at:
                    return [row.key for row in free]
            failures.open |= dict.fromkeys(self._at_work())
            if not free and not any(self._at_work()) and not roster.here(self._clock.now()):
                await self._fleet.ready(1)
            else:
                await a_little(roster, until=ends_at, clock=self._clock)

    def _claim(self, expects: Reduction | None) -> None:
        """What was handed out before a restart is taken from now on."""
        for lease in list(self._at_work()):
            if not lease.claimed:
                lease.expects, lease.claimed = expects, True
                self._fleet.claimed(lease)

    def _at_work(self) -> list[OpenLease]:
        return [
            x for x in self._fleet.book.open.values() if x.message.round == FLOATING and x.message.kind != "session"
        ]

    async def _offer(self, wanted: Wanted, *, but: Collection[str]) -> None:
        """Give idle workers something to do, but not those who must wait."""
        fleet = self._fleet
        here = [w.id for w in fleet.roster.here(self._clock.now())]
        idle = {id for id in here if id not in but and not fleet.book.of(id)}
        if not idle:
            return
        fresh: list[tuple[WorkerId, BoundTask, str, int]] = []
        stem = _stem(fleet.now)
        num_before = sum(stem in key for key in fleet.floating.leases)
        first = fleet.paces.first(here, balance=fleet.config.balance == "time")
        for worker in cohort(first, fleet.roster.members):
            bound = wanted.offer(worker) if worker.id in idle else None
            if bound is not None:
                fresh.append((worker.id, bound, f"{worker.id}{stem}{num_before + len(fresh):06d}", 0))
        await fleet.publish(bound for _, bound, _, _ in fresh)
        await fleet.issue(fleet.floating, fresh, expects=wanted.expects)

    def _typical_s(self, replies: Sequence[ReplyRow]) -> float:
        """What those who have delivered are known to take for such a task; 0 where nothing is."""
        floating = self._fleet.floating
        took: list[float] = []
        for row in replies:
            past = self._fleet.paces.seconds.get(WorkerId(row.worker))
            if past and row.key in floating.leases:
                units = pb.Lease.FromString(floating.leases[row.key][-1].lease).num_sequences
                took.append(units * statistics.median(past))
        return statistics.median(took) if took else 0.0


def given_up(floating: Attempt) -> tuple[str, ...]:
    """Keys of work, other than sessions, that was lost."""
    lost = (rows[-1] for rows in floating.leases.values() if rows[-1].status == "lost")
    return tuple(row.key for row in lost if pb.Lease.FromString(row.lease).kind != "session")


def handed_out_in(key: str) -> int:
    """The round in which work of this key was handed out."""
    return int(key.rpartition("#")[2].partition(".")[0])


def _stem(now: Attempt) -> str:
    """Of keys, which sort as they were made. Never one again that a commit has freed: a late report of the old result
    would answer the new task."""
    return f"#{now.round:09d}.{now.attempt:06d}."


def _free(now: Attempt, floating: Attempt, *, one_each: bool = False) -> list[ReplyRow]:
    """Replies that are not used yet, in the order in which they came; the first of each worker with `one_each`."""
    free = [row for key, row in floating.replies.items() if key not in now.consumed and "@" not in key]
    return list({row.worker: row for row in reversed(free)}.values())[::-1] if one_each else free
