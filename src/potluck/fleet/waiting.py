"""Waiting for workers, and saying what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck.clock import Clock
from potluck.fleet.roster import Roster, decide
from potluck.fleet.watch import tick_s
from potluck.types.errors import RunStopped


class Hope:
    """That somebody comes who may work; it ends where for `no_progress_s` only quarantined workers were expected."""

    def __init__(self, roster: Roster, clock: Clock) -> None:
        self._roster, self._clock, self._held_at = roster, clock, clock.now()

    def check(self) -> None:
        """RunStopped where there is none left."""
        now = self._clock.now()
        if not (known := self._roster.expected(now)) or not all(member.quarantined for member in known):
            self._held_at = now
        if now - self._held_at > self._roster.config.no_progress_s:
            why_not = decide(self._roster.members.values(), now, self._roster.config)[1]
            raise RunStopped(f"every worker here is quarantined: {why_not}; mend the cause and go on with --resume")


async def until_here(roster: Roster, clock: Clock, num_workers: int, told: Callable[[str, bool], None]) -> None:
    """Wait until that many workers are here, never for a particular one; 0 for the recipe's `min_workers`.

    `told` hears what is waited for, and whether that is news. RunStopped when for `no_progress_s` all that are expected
    were quarantined: a bad worker that comes first must not end a run that others are about to join.
    """
    said, hope = ("", -1), Hope(roster, clock)
    while True:
        now = clock.now()
        here, why_not = decide(roster.members.values(), now, roster.config)
        needed = num_workers or roster.config.min_workers  # an operator may change it meanwhile
        if len(here) >= needed:
            return
        names = ", ".join(w.id for w in here) or "none"
        text = f"waiting for workers: {len(here)} of {needed} here ({names})"
        hope.check()
        is_news = said != (said := (names, sum(bool(m.quarantined) for m in roster.members.values())))
        told(f"{text}; {why_not}" if why_not else text, is_news)
        await a_little(roster)
        while roster.num_connected < needed and clock.now() - now < tick_s:
            await a_little(roster)  # each of a thousand who come is no reason to look at all of them


async def a_little(roster: Roster, *, until: float | None = None, clock: Clock | None = None) -> None:
    """Until something about the members changes, or a tick has passed, or it is `until` by that clock."""
    longest_s = tick_s
    if until is not None and clock is not None:
        longest_s = min(max(until - clock.now(), 0.0), tick_s)
    try:
        async with asyncio.timeout(longest_s):  # not wait_for, which before Python 3.12 may swallow a cancellation
            await roster.change()
    except TimeoutError:
        return
