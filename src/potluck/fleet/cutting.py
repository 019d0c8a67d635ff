"""Late work is cut short: a round waits for nobody who takes longer than its past says while all others are done.

    late_i:  now > b_i + s_i n_i      b_i: when work on it was seen to begin, n_i its units of work
                                      s_i: median seconds that its worker took for one before (planner/deadline.py)

Once enough of a `call` is answered and every lease that is open is late, each of their workers is told to end after
the step it is at and to deliver what it has. Who died and came back goes on from its snapshot and is told at once. Work
that has not begun, or of a worker whose past is not known, is never late. A coordinator that is started again decides
anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial

from potluck.clock import Clock
from potluck.fleet.leases import OpenLease, Outcome
from potluck.fleet.roster import Roster
from potluck.planner.deadline import predict_s
from potluck.storage.ledger import ReplyRow
from potluck.types.ids import WorkerId

_same_time_s = 1e-6
"""Times that differ by less are one."""


class Cutting:
    """The open leases of one call, by key. `num_missing` more replies must come before any is cut short; `notify` has
    a worker told anew."""

    def __init__(
        self, leases: Mapping[str, OpenLease], *, num_missing: int, roster: Roster, clock: Clock,
        notify: Callable[[WorkerId], None],
    ) -> None:  # fmt: skip
        self._leases, self._num_missing, self._roster = leases, num_missing, roster
        self._clock, self._notify = clock, notify
        self._open = {lease.number: lease for lease in leases.values()}
        self._predicted_s: dict[int, float] = {}
        self._changed = asyncio.Event()

    async def outcomes(self) -> dict[str, Outcome]:
        """Wait for all of them."""
        watching = asyncio.create_task(self._watch())
        try:
            found = {key: await lease.outcome for key, lease in self._leases.items()}
        except asyncio.CancelledError:
            watching.cancel()
            raise
        if watching.done():
            watching.result()  # an error in it is ours: let it show
        watching.cancel()
        return found

    async def _watch(self) -> None:
        """Until everyone has answered or was told."""
        if not all(lease.message.sequences_per_step for lease in self._open.values()):
            return
        for lease in self._open.values():
            lease.outcome.add_done_callback(partial(self._answered, lease))
            lease.began = self._changed.set
        while self._open:
            self._changed.clear()
            late_s = self._all_late_at() - self._clock.now()
            if late_s <= _same_time_s:
                for lease in self._open.values():
                    lease.is_cut_short = True
                    self._notify(lease.worker)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(late_s if late_s < math.inf else None):
                    await self._changed.wait()

    def _answered(self, lease: OpenLease, outcome: asyncio.Future[Outcome]) -> None:
        self._open.pop(lease.number)
        self._num_missing -= not outcome.cancelled() and isinstance(outcome.result(), ReplyRow)
        self._changed.set()

    def _all_late_at(self) -> float:
        """From when on all that are open are late; inf where that is not to be foreseen."""
        if self._num_missing > 0:
            return math.inf
        return max(map(self._late_at, self._open.values()))

    def _late_at(self, lease: OpenLease) -> float:
        if not lease.started_at:
            return math.inf
        if lease.number not in self._predicted_s:
            member = self._roster.members.get(lease.worker)
            past = member.seconds_per_unit.get(lease.message.task, []) if member is not None else []
            predicted_s = predict_s(past, lease.units)
            self._predicted_s[lease.number] = math.inf if predicted_s is None else predicted_s
        return lease.started_at + self._predicted_s[lease.number]
