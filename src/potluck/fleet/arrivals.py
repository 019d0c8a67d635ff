"""Work without a barrier: whoever is idle is given some, and replies count in the order in which they come.

Such work belongs to no round and outlives them. Each task of a worker goes on from the state that its last accepted one
left, whether that is committed yet or not: an accepted reply stays accepted until a round that commits has used it.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.fleet.attempt import Attempt
from potluck.fleet.leases import FLOATING, LeaseBook, OpenLease
from potluck.fleet.paces import Paces, cohort
from potluck.fleet.roster import Roster
from potluck.fleet.waiting import a_little
from potluck.protocol import pb
from potluck.storage.ledger import ReplyRow
from potluck.strategies.fleet import Reduction, WorkerInfo
from potluck.strategies.task import BoundTask
from potluck.types.ids import WorkerId

Offer = Callable[[WorkerInfo], BoundTask | None]
Work = tuple[WorkerId, BoundTask, str, int]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which replies a verb takes; the fields are the arguments of `Fleet.gather`."""

    offer: Offer
    min_replies: int = 1
    grace: float | None = None
    expects: Reduction | None = None


class Arrivals:
    """`issue` hands work out under the round FLOATING, `ready` waits for a worker, `decide` writes down a decision of
    the attempt."""

    def __init__(
        self, roster: Roster, book: LeaseBook, clock: Clock, paces: Paces, *,
        issue: Callable[[Sequence[Work], Reduction | None], Awaitable[None]],
        ready: Callable[[int], Awaitable[None]], decide: Callable[[str, list[str]], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._roster, self._book, self._clock, self._paces = roster, book, clock, paces
        self._issue, self._ready, self._decide = issue, ready, decide
        self.claimed: Callable[[OpenLease], None] = lambda _lease: None  # hears that a result will be taken now

    async def take(self, now: Attempt, floating: Attempt, wanted: Wanted, name: str) -> list[ReplyRow]:
        """The replies for the verb of that name, as was decided before if it was. They count with this attempt."""
        if name not in now.decisions:
            await self._decide(name, await self._choose(now, floating, wanted))
        rows = [floating.replies[key] for key in now.decisions[name]]
        now.consumed |= {row.key: row for row in rows}
        return rows

    async def _choose(self, now: Attempt, floating: Attempt, wanted: Wanted) -> list[str]:
        """The keys of the replies to take, once they are here."""
        self._claim(wanted.expects)
        ends_at: float | None = None
        while True:
            delivered = {row.worker for row in _free(now, floating)}
            await self._offer(now, floating, wanted, but=delivered)
            free = _free(now, floating, one_each=wanted.grace is not None)
            is_enough = len(free) >= wanted.min_replies
            if wanted.grace is None and is_enough:
                return [row.key for row in free[: wanted.min_replies]]
            if wanted.grace is None:  # who has delivered goes on with the state as it is
                await self._offer(now, floating, wanted, but=())
            elif free and not any(self._at_work()):
                return [row.key for row in free]  # nobody else can come
            elif is_enough:
                if ends_at is None:
                    ends_at = self._clock.now() + wanted.grace * self._typical_s(floating, free)
                if self._clock.now() >= ends_at:
                    return [row.key for row in free]
            if not free and not any(self._at_work()) and not self._roster.here(self._clock.now()):
                await self._ready(1)
            else:
                await a_little(self._roster, until=ends_at, clock=self._clock)

    def _claim(self, expects: Reduction | None) -> None:
        """What was handed out before a restart is taken from now on."""
        for lease in list(self._at_work()):
            if not lease.claimed:
                lease.expects, lease.claimed = expects, True
                self.claimed(lease)

    def _at_work(self) -> list[OpenLease]:
        return [x for x in self._book.open.values() if x.message.round == FLOATING and x.message.kind != "session"]

    async def _offer(self, now: Attempt, floating: Attempt, wanted: Wanted, *, but: Collection[str]) -> None:
        """Give idle workers something to do, but not those who must wait."""
        here = [w.id for w in self._roster.here(self._clock.now())]
        idle = {id for id in here if id not in but and not self._book.of(id)}
        if not idle:
            return
        fresh: list[Work] = []
        stem = _stem(now)
        num_before = sum(stem in key for key in floating.leases)
        balance = self._roster.config.balance == "time"
        for worker in cohort(self._paces.first(here, balance=balance), self._roster.members):
            bound = wanted.offer(worker) if worker.id in idle else None
            if bound is not None:
                fresh.append((worker.id, bound, f"{worker.id}{stem}{num_before + len(fresh):06d}", 0))
        await self._issue(fresh, wanted.expects)

    def _typical_s(self, floating: Attempt, replies: Sequence[ReplyRow]) -> float:
        """What those who have delivered are known to take for such a task; 0 where nothing is."""
        took: list[float] = []
        for row in replies:
            past = self._paces.seconds.get(WorkerId(row.worker))
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
