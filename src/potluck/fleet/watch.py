"""Gives up work that will not be answered any more, at the first tick that shows it.

A lease is looked at when it may be lost, as far as is known now (`leases.may_be_lost_at`), and sooner where something
about it or its worker changes. So the cost does not grow with leases and time, but with what happens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable

from potluck.clock import Clock
from potluck.fleet.config import FleetConfig
from potluck.fleet.leases import LeaseBook, OpenLease, is_stuck, loss, may_be_lost_at, overdue
from potluck.fleet.roster import Member, Roster, absence
from potluck.protocol import AHEAD, FLOATING
from potluck.types.ids import WorkerId

tick_s = 0.5


class Watch:
    """`lose` gives a lease up, with the reason, and writes that down."""

    def __init__(
        self, roster: Roster, book: LeaseBook, clock: Clock, *,
        lose: Callable[[OpenLease, str], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._roster, self._book, self._clock, self._lose = roster, book, clock, lose
        self._longest_s = max(tick_s, roster.config.heartbeat_s / 4)
        self.held_back: Callable[[], Iterable[WorkerId]] = lambda: ()  # whose bytes wait here, for a limit of rates
        self.late: Callable[[OpenLease, float], None] = lambda _lease, _worked_s: None  # hears what took too long
        self._absent: dict[int, OpenLease] = {}  # whose worker may come back as long as others work on the round
        roster.disturbed = self.reconsider
        book.closed = self._closed

    @property
    def _config(self) -> FleetConfig:
        """As it is now: some of it may be `set` in mid-run."""
        return self._roster.config

    async def run(self) -> None:
        """As long as the fleet."""
        while True:
            planned = await self._sleep_until_look(self._clock.now())
            now = self._clock.now()
            if (paused_s := now - planned) > tick_s:
                self._roster.forgive(paused_s)
                self._book.forgive(paused_s)
            self._roster.release(now)
            for worker in self.held_back():
                for lease in self._book.of(worker):
                    lease.progress_at = now
            await self._judge(self._book.due(now), now)

    async def _judge(self, due: list[OpenLease], now: float) -> None:
        suspects: list[OpenLease] = []
        for lease in due:
            at = may_be_lost_at(lease, self._roster.members.get(lease.worker), self._config)
            if at > now:
                self._book.look(lease, at)
            else:
                suspects.append(lease)
        if not suspects:
            return
        here = {info.id for info in self._roster.here(now)}
        worked_on = {_barrier(lease) for lease in self._book.open.values() if lease.worker in here}
        for lease in suspects:
            if lease.id not in self._book.open:
                continue  # it was answered while another one's loss was written down
            member = self._roster.members.get(lease.worker)
            others_work = _barrier(lease) in worked_on
            reason = loss(lease, member, now, self._config, is_alone=len(here) == 1, others_work=others_work)
            if not reason:
                self._book.look(lease, max(may_be_lost_at(lease, member, self._config), now + self._longest_s))
                if member is not None and absence(member, now, self._config):
                    self._absent[lease.number] = lease
                continue
            if member is not None and overdue(lease, member, now):
                member.forget(lease.message.task)  # its past predicts it no longer
                self.late(lease, now - lease.started_at)
            if member is not None and member.id in here and is_stuck(lease, now, self._config):
                self._roster.failed(member, reason, now)  # else every round would wait for it
            await self._lose(lease, reason)

    def _closed(self, lease: OpenLease) -> None:
        """Once nobody else works any more, who is absent is waited for no longer."""
        self._absent.pop(lease.number, None)
        if self._absent and len(self._book.open) <= len(self._absent):
            for absent in self._absent.values():
                self._book.look(absent, self._clock.now())

    async def _sleep_until_look(self, asleep_at: float) -> float:
        """Sleep whole ticks until a lease may be lost or a quarantine ends; the time at which that should be over.

        Never for long against the heartbeats, so that it is noticed when this process stood still.
        """
        book, longest_s = self._book, self._longest_s
        while True:
            due_s = min(book.first_look(), self._roster.free_at) - asleep_at
            passed_s = self._clock.now() - asleep_at
            num_ticks = math.ceil(max(min(due_s, longest_s), passed_s, tick_s) / tick_s - 1e-6)
            planned = asleep_at + num_ticks * tick_s
            book.planned = planned
            book.sooner.clear()
            try:
                async with asyncio.timeout(max(planned - self._clock.now(), 0.0)):
                    await book.sooner.wait()
            except TimeoutError:
                book.planned = -math.inf
                return planned

    def look(self, lease: OpenLease) -> None:
        """Something about a lease changed: it may be lost sooner."""
        at = may_be_lost_at(lease, self._roster.members.get(lease.worker), self._config)
        if at < lease.look_at:
            self._book.look(lease, at)

    def reconsider(self, member: Member) -> None:
        """Something about a worker changed: what it holds may be lost sooner."""
        for lease in self._book.of(member.id):
            self._absent.pop(lease.number, None)
            self.look(lease)


def _barrier(lease: OpenLease) -> tuple[int, str]:
    """What waits for this work and for that of others: its round; of work begun ahead, the collect of its key; of
    floating work nothing, so that it shares this with none."""
    round, key = lease.message.round, lease.message.key
    return round, {FLOATING: key, AHEAD: key.partition("/")[0]}.get(round, "")
