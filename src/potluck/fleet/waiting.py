"""Waiting for workers, and saying what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck.clock import Clock
from potluck.fleet.roster import Roster, decide
from potluck.fleet.watch import tick_s
from potluck.types.errors import RunStopped


async def until_here(roster: Roster, clock: Clock, num_workers: int, told: Callable[[str, bool], None]) -> None:
    """Wait until that many workers are here, never for a particular one; 0 for the recipe's `min_workers`.

    `told` hears what is waited for, and whether that is news. RunStopped when for `no_progress_s` all that are expected
    were quarantined: a bad worker that comes first must not end a run that others are about to join.
    """
    said, hopeful_at = ("", -1), clock.now()
    while True:
        now = clock.now()
        here, why_not = decide(roster.members.values(), now, roster.config)
        needed = num_workers or roster.config.min_workers  # an operator may change it meanwhile
        if len(here) >= needed:
            return
        names = ", ".join(w.id for w in here) or "none"
        text = f"waiting for workers: {len(here)} of {needed} here ({names})"
        if not (known := roster.expected(now)) or not all(member.quarantined for member in known):
            hopeful_at = now
        if now - hopeful_at > roster.config.no_progress_s:
            raise RunStopped(f"every worker here is quarantined: {why_not}; mend the cause and go on with --resume")
        is_news = said != (said := (names, sum(bool(m.quarantined) for m in roster.members.values())))
        told(f"{text}; {why_not}" if why_not else text, is_news)
        await a_little(roster)
        while roster.num_connected < needed and clock.now() - now < tick_s:
            await a_little(roster)  # each of a thousand who come is no reason to look at all of them


async def a_little(roster: Roster) -> None:
    """Until something about the members changes, or a tick has passed."""
    try:
        async with asyncio.timeout(tick_s):  # not wait_for, which before Python 3.12 may swallow a cancellation
            await roster.change()
    except TimeoutError:
        return
