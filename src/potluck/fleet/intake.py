"""What workers report, checked before it changes anything.

A result is believed when it answers an open lease of that very worker, its update has arrived and is whole, has the
run's layout, is finite and within the norm limit, and its counts are possible. Anything else is refused with a reason
that goes back to the sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from potluck.clock import Clock, Lanes
from potluck.fleet.data import num_trained
from potluck.fleet.leases import OpenLease
from potluck.fleet.live import LiveFleet
from potluck.fleet.roster import Member
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.strategies.task import installed
from potluck.types.errors import CorruptError, Refused
from potluck.types.ids import LeaseId, WorkerId
from potluck.types.profile import DeviceProfile
from potluck.types.untrusted import printable

MAX_SCALARS_BYTES = 65536
MAX_RESULTS = 256
MAX_ERROR_LENGTH = 500
MAX_ACTIVITY_LENGTH = 40
note_interval_s = 1.0
"""A worker's remarks are heard no more often; it repeats the last one with each report."""
longest_claim_s = 1e6
"""Of work that was handed out before this process began."""
MAX_MAGNITUDE = 1e30
"""Of a scalar: sums of such numbers and their quotients are finite."""
MAX_OWN_TOKENS = 1 << 40
"""In the text that a worker holds out itself."""
MAX_EMISSIONS = 256
"""Of one session, in wait for the round that uses them."""


def is_number(value: object) -> bool:
    """A finite number that can be reckoned with; neither true nor false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE


class Intake:
    """Judges results, each in a task of its own: a large update never keeps its sender's heartbeats waiting."""

    def __init__(self, fleet: LiveFleet, clock: Clock, lanes: Lanes) -> None:
        self._fleet, self._clock, self._lanes = fleet, clock, lanes
        self._judging: set[asyncio.Task[None]] = set()
        fleet.claimed = self._claimed
        self.failed: Callable[[BaseException], None] = lambda _error: None  # hears what is wrong on this machine
        self.noted: Callable[[WorkerId, str], None] = lambda _worker, _text: None  # hears what workers remark
        self.inline: dict[tuple[str, LeaseId], dict[str, Tensor]] = {}  # what came on Data, until its result does

    def report(self, member: Member, report: pb.Report) -> None:
        """Take one report in. Never raises for what a worker says."""
        now = self._clock.now()
        member.last_seen = now
        note = printable(report.note, MAX_ERROR_LENGTH)
        if note and note != member.note and now - member.noted_at >= note_interval_s:
            member.note, member.noted_at = note, now
            self.noted(member.id, note)
        if report.profile_json:
            with contextlib.suppress(ValueError):  # the one it said Welcome with stands
                member.profile = DeviceProfile.parse(report.profile_json)
        if report.leaving and not member.leaving:
            self._fleet.roster.leave(member)
        member.progress = report.progress[0] if report.progress else None
        if member.progress is not None:
            member.progress.activity = printable(member.progress.activity, MAX_ACTIVITY_LENGTH)
            if not math.isfinite(member.progress.tokens_per_s):
                member.progress.tokens_per_s = 0.0
        self._note_progress(member, report, now)
        for ack in report.input_acks[:MAX_RESULTS]:
            key, _, step = ack.rpartition("/")
            if step.isdecimal() and len(step) < 20 and self._holds_session(member, key):
                self._fleet.sessions.acknowledge_input(key, int(step))
        reported: set[LeaseId] = set()
        for result in report.results[:MAX_RESULTS]:
            id = (result.round, result.attempt, result.key)
            reported.add(id)
            lease = self._fleet.book.open.get((result.round, result.attempt, result.key.partition("@")[0]))
            if lease is None or lease.worker != member.id:
                if id not in member.verdicts:
                    self._verdict(member, id, "dropped", "nobody waits for it any more")
            elif "@" in result.key and not self._may_emit(lease, result):
                self._verdict(member, id, "dropped", "no session of this worker can have emitted it")
            elif not lease.claimed:
                lease.early = result
            elif not lease.checking:
                self._take(member, lease, result)
        for id in [i for i in member.verdicts if i not in reported]:
            del member.verdicts[id]  # the worker has read it
        for name in [n for n in self.inline if n[0] == member.id and n[1] not in self._fleet.book.open]:
            del self.inline[name]  # of work that was given up

    def _claimed(self, lease: OpenLease) -> None:
        """Take at once what was reported while the round was being run again up to there."""
        result, lease.early = lease.early, None
        member = self._fleet.roster.members.get(lease.worker)
        if result is not None and member is not None and not lease.checking:
            self._take(member, lease, result)

    def _holds_session(self, member: Member, key: str) -> bool:
        rows = self._fleet.floating.leases.get(key)
        return bool(rows) and rows[-1].worker == member.id

    def _may_emit(self, lease: OpenLease, result: pb.TaskResult) -> bool:
        """Whether a result named `key@step` is one that its session may send now."""
        waiting = sum(key.startswith(f"{lease.message.key}@") for key in self._fleet.floating.replies)
        is_its_step = result.key == f"{lease.message.key}@{result.step}"
        return lease.message.kind == "session" and is_its_step and waiting < MAX_EMISSIONS

    def _note_progress(self, member: Member, report: pb.Report, now: float) -> None:
        leases = self._fleet.book.of(member.id)
        for progress in report.progress[:MAX_RESULTS]:
            at_work = [x for x in leases if (x.message.key, x.message.attempt) == (progress.key, progress.attempt)]
            for lease in at_work:
                if lease.seen(progress, now):
                    self._fleet.watching.look(lease)
            for lease in leases:
                if at_work and lease not in at_work and not lease.started_at:
                    lease.progress_at = now  # it waits behind the one at work

    def _take(self, member: Member, lease: OpenLease, result: pb.TaskResult) -> None:
        """Begin to judge a result, once all of it is here."""
        inline = self.inline.get((member.id, lease.id), {})
        if result.error:
            judge = self._failed(member, lease, result)
        elif result.object and not self._has(result.object):
            # It was here when the worker was told so: this machine has lost it since.
            self._verdict(member, (result.round, result.attempt, result.key), "missing", "send it again")
            return
        elif len(inline) < result.num_inline:
            return  # announced before it is here: the rest is on its way
        else:
            judge = self._judge(member, lease, result, inline)
        lease.checking = True  # until the answer is in the ledger: nobody else takes it or gives it up meanwhile
        task = asyncio.ensure_future(judge)
        self._judging.add(task)
        task.add_done_callback(lambda done: self._judged(done, lease))

    def _judged(self, task: asyncio.Task[None], lease: OpenLease) -> None:
        self._judging.discard(task)
        lease.checking = False
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    async def close(self) -> None:
        """End what is being judged: it is judged again after a restart."""
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)

    async def _failed(self, member: Member, lease: OpenLease, result: pb.TaskResult) -> None:
        reason = f"{member.id} could not do {lease.message.task}: {printable(result.error, MAX_ERROR_LENGTH)}"
        if result.not_finite:
            self._fleet.overflowed.add(member.id)
        self._verdict(member, lease.id, "dropped", "the task failed")
        if result.lacks_state and lease.id in self._fleet.book.open:
            await self._fleet.ahead.lacks_state(member.id)
        if lease.id not in self._fleet.book.open:
            return  # it follows work that was lost meanwhile, and could not be done without that
        await self._fleet.fail(lease, reason)
        if result.lacks_state and not member.failing:  # its disk is gone, or another one: once that is no fault
            member.failing = True
        else:
            self._fleet.roster.failed(member, reason, self._clock.now())

    async def _judge(self, member: Member, lease: OpenLease, result: pb.TaskResult, inline: dict[str, Tensor]) -> None:
        """Believe a result that is here whole, or refuse it."""
        try:
            scalars = self._scalars(lease, result)
            if result.object:
                await self._lanes.compute.run(self._check_object, lease, result.object)
            elif lease.expects is not None:
                raise Refused(f"the result of {lease.message.task} has no {lease.expects.name}")
        except Refused as refused:
            is_lost = bool(result.object) and await self._lanes.compute.run(self._is_lost, result.object)
            if lease.id not in self._fleet.book.open:  # the round ended, and what was sent may be gone since
                self._verdict(member, lease.id, "dropped", "nobody waits for it any more")
                return
            if is_lost:
                self._verdict(member, (result.round, result.attempt, result.key), "missing", "send it again")
                return
            fault = printable(str(refused), MAX_ERROR_LENGTH)  # it may quote what was sent
            reason = f"{member.id} sent a result that was refused: {fault}"
            self._verdict(member, lease.id, "refused", fault)
            await self._fleet.fail(lease, reason)
            self._fleet.roster.refused(member, reason, self._clock.now(), is_update=lease.expects is not None)
            return
        if lease.id not in self._fleet.book.open:
            self._verdict(member, lease.id, "dropped", "nobody waits for it any more")
            return
        self.inline.pop((member.id, lease.id), None)
        self._fleet.roster.succeeded(member, is_update=lease.expects is not None)
        is_first = True
        if "@" in result.key:
            await self._fleet.sessions.emitted(lease, result.step, scalars, result.object)
        else:
            seconds, in_all_s = self._seconds(lease, result), self._clock.now() - lease.issued_at
            trained = num_trained(lease.message, scalars)
            member.observe(lease.message.task, seconds, trained or lease.units, in_all_s=in_all_s)
            self._fleet.paces.observe(member.id, seconds, trained)
            self._fleet.watching.reconsider(member)
            if stale := self._fleet.arrivals.too_stale(lease):
                self._verdict(member, lease.id, "dropped", stale)
                await self._fleet.lose(lease, stale)
                return
            is_first = await self._fleet.accept(lease, scalars, result.object, inline)
        verdict = ("accepted", "") if is_first else ("dropped", "another worker was first")
        self._verdict(member, (result.round, result.attempt, result.key), *verdict)

    def _seconds(self, lease: OpenLease, result: pb.TaskResult) -> float:
        """How long it took: as the worker says, but no longer than it had the lease. Deadlines are made of it."""
        had_s = longest_claim_s if lease.is_taken_over else self._clock.now() - lease.issued_at
        return min(result.seconds, had_s) if result.seconds >= 0.0 else had_s

    def _has(self, digest: str) -> bool:
        try:
            return self._fleet.objects.has(check_digest(digest))
        except Refused:
            return False  # not even a digest: nothing of that name will ever come

    def _scalars(self, lease: OpenLease, result: pb.TaskResult) -> dict[str, Any]:
        """The numbers of a result: finite, and no more tokens than the data dealt for it holds."""
        if len(result.scalars_json) > MAX_SCALARS_BYTES:
            raise Refused(f"its scalars take {len(result.scalars_json)} bytes and {MAX_SCALARS_BYTES} are allowed")
        try:
            value: Any = json.loads(result.scalars_json or "{}")
        except (ValueError, RecursionError) as error:
            raise Refused("its scalars are not JSON") from error
        if not isinstance(value, Mapping):
            raise Refused("its scalars are not an object")
        scalars: dict[str, Any] = {str(k): v for k, v in value.items()}
        for name, item in scalars.items():
            if not isinstance(item, str) and not is_number(item):
                raise Refused(f"its {name} is {item}, not a number of at most {MAX_MAGNITUDE:g}")
        function = installed(lease.message.task)
        needed = {*(function.numbers if function else ()), *([lease.expects.weight] if lease.expects else ())} - {""}
        for name in sorted(needed):
            if not is_number(scalars.get(name)):
                raise Refused(f"its {name} is {scalars.get(name)!r} and must be a number")
        for name in function.texts if function else ():
            if not isinstance(scalars.get(name), str):
                raise Refused(f"its {name} is {scalars.get(name)!r} and must be text")
        if (weight := lease.expects.weight if lease.expects else "") and not scalars[weight] > 0:
            raise Refused(f"its weight {weight} is {scalars[weight]}, not a positive number")
        self._check_tokens(lease.message, scalars.get("num_tokens", 0), int(lease.units))
        if lease.message.sequences_per_step:
            self._check_steps(lease.message, scalars)
        return scalars

    def _check_steps(self, lease: pb.Lease, scalars: Mapping[str, Any]) -> None:
        """At least one step and no more than were granted, and the tokens of just these: its data goes by them."""
        num_steps, most = scalars.get("num_steps"), lease.num_sequences // lease.sequences_per_step
        if not isinstance(num_steps, int) or not 1 <= num_steps <= most:
            raise Refused(f"it claims {num_steps} steps where 1 to {most} are possible")
        least, most = self._fleet.run.predicted_tokens(num_steps * lease.sequences_per_step)
        if not least <= scalars.get("num_tokens", 0) <= most:
            needed = str(least) if least == most else f"{least} to {most}"
            raise Refused(f"it claims {scalars.get('num_tokens')} tokens and {num_steps} steps, which have {needed}")

    def _check_tokens(self, lease: pb.Lease, num_tokens: Any, num_sequences: int) -> None:
        """Those of the data that it was given, all of which it has used up; what it weighs goes by them.

        Only emissions of a session and what is cut short have a part of them. How much text a worker holds out itself
        nobody else knows; it may be none.
        """
        if not lease.held_out and not lease.num_sequences:
            return
        least, most = 0, MAX_OWN_TOKENS
        if lease.spans or lease.num_sequences:
            least, most = self._fleet.run.predicted_tokens(num_sequences)
            least = 1 if lease.kind == "session" or lease.sequences_per_step else least
        if not isinstance(num_tokens, int) or not least <= num_tokens <= most:
            possible = f"{least} to {most} are" if least < most else f"only {most} are"
            raise Refused(f"it claims {num_tokens} tokens where {possible} possible")

    def _check_object(self, lease: OpenLease, digest: str) -> None:
        object = check_digest(digest)
        if lease.expects is not None:
            limit = self._fleet.config.max_update_norm or math.inf
            self._fleet.updates.check(object, lease.expects.name, limit, lease.message.part)

    def _is_lost(self, digest: str) -> bool:
        """Whether this machine's disk has spoilt an object since it came; it is removed then."""
        try:
            self._fleet.objects.verify(check_digest(digest))
        except (CorruptError, FileNotFoundError):
            return True
        return False

    def _verdict(self, member: Member, id: LeaseId, verdict: str, reason: str) -> None:
        round, attempt, key = id
        member.verdicts[id] = pb.Verdict(round=round, attempt=attempt, key=key, verdict=verdict, reason=reason)
        member.changed.set()
