"""Bags of pieces over the fleet: requests on each worker's Data stream, replies back to their bag.

A piece is lost when its worker's stream ends, falls silent, is quarantined, declines or fails; the bag then decides
what becomes of it. A reply that a bag refuses counts against the worker as any refused result does, and it takes
hundreds of good ones to make up for it: a wrong tile is no accident. Nothing here is written down.

Which shards a worker keeps is believed until it says `missing`, and for as long as its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from potluck.clock import Clock, Executor
from potluck.codecs.bundle import Packing, tensors_in
from potluck.codecs.factors import encoded_rows
from potluck.fleet.roster import Member, Roster, heard_until, silence
from potluck.fleet.waiting import Hope, a_little
from potluck.fleet.watch import tick_s
from potluck.planner.link import LinkMeter
from potluck.strategies.bag import Bag, Piece
from potluck.strategies.fleet import WorkerInfo
from potluck.transport.pieces import (
    FRAME_BYTES,
    PieceJoiner,
    PieceReply,
    PieceRequest,
    frames_of,
    withdraw_frame,
)
from potluck.types.errors import CorruptError, InvalidUpdate, Refused
from potluck.types.ids import WorkerId
from potluck.types.untrusted import printable

head_room_bytes = 1 << 16
"""Of a reply, beyond the memory that its piece was planned with."""
max_reply_bytes = 1 << 31
least_heard_bytes, most_bytes_per_s = 1 << 16, 1e11
"""Fewer tell more of the noise than of the link."""
packed_bytes, most_packed_bytes = 1 << 20, 256 << 20
"""Of a request at a time, and of those to all workers: what is not sent yet is nowhere twice."""
most_unjudged_bytes = 256 << 20
"""Of replies that wait for their check; with more nothing is read, and the links hold back."""
MAX_ERROR_LENGTH = 300
MAX_REASONS = 3
good_in_a_row = 256
"""Replies that make up for a fault."""
least_rest_s = 0.05
"""Between two changes of a worker's mind that are heard."""


def most_reply_bytes(piece: Piece) -> int:
    return piece.memory_bytes + head_room_bytes if piece.memory_bytes else max_reply_bytes


@dataclass(eq=False)
class Flight:
    """A piece in one worker's hands."""

    id: int
    piece: Piece
    play: Play
    lane: Lane
    sent_at: float = 0.0  # when all of it was on its way, 0 for not yet
    begun_at: float = 0.0  # when it began to be sent, 0 for not yet
    num_bytes: int = 0  # of its operands that were sent
    sends_all: bool = False  # a shard that it was thought to keep is missing there
    is_answered: bool = False  # its reply is here, and nothing more of it is read


@dataclass(eq=False)
class Lane:
    """One Data stream of a worker."""

    member: Member
    outbox: deque[Flight] = field(default_factory=deque[Flight])
    flights: dict[int, Flight] = field(default_factory=dict[int, Flight])
    replies: deque[_Answer] = field(default_factory=deque["_Answer"])  # to be judged, one of a flight at most
    withdrawn: list[int] = field(default_factory=list[int])
    kept: set[str] = field(default_factory=set[str])  # in `scope`: names of another one are not asked for again
    scope: str = ""
    resting: bool = False
    rests_since: float = -math.inf  # or rested no more
    num_good: int = 0  # replies since one was refused
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False  # no more replies will come

    def most_bytes(self, id: int) -> int:
        """That the reply to a piece may take; 0 where nobody waits for it."""
        flight = self.flights.get(id)
        return most_reply_bytes(flight.piece) if flight is not None and not flight.is_answered else 0


@dataclass(frozen=True, eq=False)
class _Answer:
    flight: Flight
    reply: PieceReply
    at: float  # when all of it was here


@dataclass(eq=False)
class Play:
    """A bag that is being handed out."""

    bag: Bag
    scope: str  # what names of values hold for
    flights: dict[Piece, Flight] = field(default_factory=dict[Piece, Flight])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    look_over_at: float = -math.inf  # its flights: a worker may be gone, or silent by then
    error: BaseException | None = None


class Spreader:
    """`transfers` is where bundles are packed and replies are checked."""

    def __init__(self, roster: Roster, clock: Clock, transfers: Executor) -> None:
        self._roster, self._clock, self._transfers = roster, clock, transfers
        self._streams: dict[WorkerId, Lane] = {}
        self._plays: set[Play] = set()
        self._ids = itertools.count(1)
        self.meters: dict[WorkerId, LinkMeter] = {}
        self.waits: Callable[[str], None] = lambda _text: None  # hears what is waited for, and "" when that is over
        self._cached: tuple[WorkerInfo, ...] | None = None  # who is here, until somebody comes, goes or changes
        self._cached_until = math.inf  # or is no longer left alone
        self._unjudged_bytes = 0
        self._judged = asyncio.Event()
        self.refused: Callable[[WorkerId, str], None] = lambda _worker, _reason: None  # hears of faults of a worker

    # What a strategy asks

    async def spread(self, bag: Bag, *, scope: str) -> None:
        """Hand out the pieces of a bag until it is done. RoundFailed where the bag raises it."""
        play = Play(bag, scope)
        self._plays.add(play)
        self._forget()  # links are looked at anew for each bag
        watching = asyncio.ensure_future(self._watch_roster(play))
        hope: Hope | None = None
        try:
            while True:
                play.changed.clear()
                self._step(play)
                if play.error is not None:
                    raise play.error
                if bag.is_done:
                    return
                if bag.needs_devices and not self.here():
                    hope = hope or self._waits_for_somebody()
                    hope.check()
                elif hope is not None:
                    hope = None
                    self.waits("")
                await self._pause(play, self._clock.now() + tick_s if hope else self._look_at(play))
        finally:
            if hope is not None:
                self.waits("")
            watching.cancel()
            self._plays.discard(play)
            for flight in list(play.flights.values()):
                self._withdraw(flight)

    def _step(self, play: Play) -> None:
        """Its work grows with what happened, not with the fleet."""
        now = self._clock.now()
        if now >= play.look_over_at:
            self._look_over(play, now)
        if play.error is not None or play.bag.is_done:
            return
        here = self.here()
        if play.bag.needs_devices and not here:
            return
        issued = play.bag.issue(here, now)
        for piece in play.bag.dropped():
            if piece in play.flights:
                self._withdraw(play.flights[piece])
        for worker, piece in issued:
            lane = self._streams.get(worker)
            if lane is None:
                play.bag.lose(worker, piece, f"{worker} has gone", now)
                play.changed.set()
                continue
            flight = Flight(next(self._ids), piece, play, lane)
            play.flights[piece] = flight
            play.look_over_at = min(play.look_over_at, heard_until(lane.member, self._roster.config))
            lane.flights[flight.id] = flight
            lane.outbox.append(flight)
            lane.ready.set()

    def _look_over(self, play: Play, now: float) -> None:
        """Lose what workers have that are gone or silent, and note when the next one may have fallen silent.

        What is answered is here, whoever is gone: it is judged.
        """
        play.look_over_at = math.inf
        for flight in [flight for flight in play.flights.values() if not flight.is_answered]:
            if reason := self._why_lost(flight.lane, now):
                self._lose(flight, reason, now)
        lanes = {flight.lane for flight in play.flights.values() if not flight.is_answered}
        heard = (heard_until(lane.member, self._roster.config) for lane in lanes)
        play.look_over_at = min(heard, default=math.inf)

    def _look_at(self, play: Play) -> float:
        """When a worker that has a piece may have fallen silent, or the bag wants to be asked."""
        return min(self._cached_until, play.bag.look_at(), play.look_over_at)

    def _forget(self) -> None:
        """Who is here, and whether they still have what they were given."""
        self._cached = None
        for play in self._plays:
            play.look_over_at = -math.inf

    async def _pause(self, play: Play, until: float) -> None:
        """Until something happens, or that time."""
        left_s = max(until - self._clock.now(), 0.0) + 1e-3
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s if left_s < math.inf else None):
                await play.changed.wait()

    async def _watch_roster(self, play: Play) -> None:
        while True:
            await self._roster.change()
            self._forget()
            play.changed.set()

    async def somebody(self) -> None:
        """Wait for a device that can do pieces: one that is here may rest, or not have opened its stream yet.

        RunStopped where only quarantined ones are left.
        """
        if self.looked():
            return
        hope = self._waits_for_somebody()
        while not self.looked():
            hope.check()
            await a_little(self._roster)
        self.waits("")

    def _waits_for_somebody(self) -> Hope:
        now = self._clock.now()
        why_not = [why for lane in self._streams.values() if (why := self._why_not(lane, now))]
        self.waits("; ".join(["waiting for a device that can take a piece", *why_not[:MAX_REASONS]]))
        return Hope(self._roster, self._clock)

    def looked(self) -> tuple[WorkerInfo, ...]:
        """`here`, looked at anew: nobody watches the roster between two bags."""
        self._cached = None
        return self.here()

    def here(self) -> tuple[WorkerInfo, ...]:
        """Who could do a piece at this moment."""
        now = self._clock.now()
        if self._cached is not None and now < self._cached_until:
            return self._cached
        self._cached = tuple(
            self._measured(info)
            for info in self._roster.here(now)
            if (lane := self._streams.get(info.id)) is not None and not self._why_not(lane, now)
        )
        left_alone = (lane.member.turned_down.until for lane in self._streams.values())
        self._cached_until = min((until for until in left_alone if until > now), default=math.inf)
        return self._cached

    def _measured(self, info: WorkerInfo) -> WorkerInfo:
        """With what pieces have shown of its link."""
        meter = self.meters.get(info.id)
        if meter is None:
            return info
        known = {name: value for name, value in asdict(meter.rates).items() if value}
        return replace(info, profile=replace(info.profile, link=replace(info.profile.link, **known)))

    def _why_not(self, lane: Lane, now: float) -> str:
        """Why a worker is given no piece, "" where it is."""
        if not lane.member.turned_down.is_over(now):
            left_s = lane.member.turned_down.until - now
            return f"{lane.member.id} has turned down too many and is left alone for {left_s:.0f} s more"
        return self._why_lost(lane, now)

    def _why_lost(self, lane: Lane, now: float) -> str:
        member = lane.member
        if self._streams.get(member.id) is not lane:
            return f"the connection of {member.id} ended"
        if member.quarantined:
            return f"{member.id} is quarantined: {member.quarantined}"
        if member.leaving:
            return f"{member.id} is leaving"
        if lane.resting:
            return f"{member.id} rests"
        return silence(member, now, self._roster.config)

    def _lose(self, flight: Flight, reason: str, now: float) -> None:
        self._forget()  # it may have fallen silent
        self._withdraw(flight)
        try:
            flight.play.bag.lose(flight.lane.member.id, flight.piece, reason, now)
        except Exception as error:
            flight.play.error = error
        flight.play.changed.set()

    def _withdraw(self, flight: Flight) -> None:
        lane = flight.lane
        flight.play.flights.pop(flight.piece, None)
        if lane.flights.pop(flight.id, None) is not None and flight.begun_at:
            lane.withdrawn.append(flight.id)
            lane.ready.set()

    # What a Data stream does

    @contextlib.contextmanager
    def stream(self, member: Member) -> Any:
        """One Data stream of a worker, for as long as it lasts; it takes the place of an earlier one."""
        lane = Lane(member)
        self._streams[member.id] = lane
        self._wake_all()
        try:
            yield lane
        finally:
            while lane.replies:
                self._forget_reply(lane)
            if self._streams.get(member.id) is lane:
                del self._streams[member.id]
            self._wake_all()

    def _wake_all(self) -> None:
        self._forget()
        for play in self._plays:
            play.changed.set()

    async def write(self, lane: Lane, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send what is to be sent, for as long as the stream lasts."""
        while True:
            lane.ready.clear()
            while lane.withdrawn or lane.outbox:
                if lane.withdrawn:  # before the next piece: a device holds few that are here in part
                    ids, lane.withdrawn = lane.withdrawn, []
                    await send(withdraw_frame(ids))
                    continue
                flight = lane.outbox.popleft()
                if lane.flights.get(flight.id) is flight:
                    await self._send(lane, flight, send)
            await lane.ready.wait()

    async def _send(self, lane: Lane, flight: Flight, send: Callable[[bytes], Awaitable[None]]) -> None:
        piece = flight.piece
        if flight.play.scope != lane.scope:
            lane.scope, lane.kept = flight.play.scope, set()
        names = {
            key: f"{operand.name}@{flight.play.scope}" if operand.name else ""
            for key, operand in piece.operands.items()
        }
        kept = frozenset(key for key, name in names.items() if name and name in lane.kept and not flight.sends_all)
        flight.begun_at = self._clock.now()
        sent = {key: operand.values for key, operand in piece.operands.items() if key not in kept}
        bundle = _packing(sent, piece.wire)
        flight.num_bytes = len(bundle)
        request = PieceRequest(
            id=flight.id,
            task=piece.task,
            arguments=piece.arguments,
            operands=names,
            kept=kept,
            memory_bytes=piece.memory_bytes,
        )
        share = most_packed_bytes // max(len(self._streams), 1)
        part_bytes = min(packed_bytes, max(share // FRAME_BYTES, 1) * FRAME_BYTES)
        for start in range(0, max(len(bundle), 1), part_bytes):
            try:
                part = await self._transfers.run(_part, bundle, start, part_bytes)
            except Exception as error:  # of this machine's own numbers: no fault of the worker's
                flight.play.error = error
                flight.play.changed.set()
                return
            for frame in frames_of(request, part, start, len(bundle)):
                if lane.flights.get(flight.id) is not flight:
                    return  # withdrawn: the rest would only be in the way
                await send(frame)
        flight.sent_at = self._clock.now()
        lane.kept.update(name for name in names.values() if name)

    def joiner(self, lane: Lane) -> PieceJoiner:
        """For the replies of one stream."""
        return PieceJoiner(lane.most_bytes, self._clock.now)

    async def read(self, lane: Lane, joiner: PieceJoiner, head: Mapping[str, Any], data: memoryview) -> None:
        """Take one frame of the stream in. Refused if it is nonsense."""
        if "resting" in head:
            await self._rest(lane, head["resting"] is True)
            return
        try:
            if (done := joiner.add(head, data)) is None:
                return
            reply = PieceReply.read(done)
        except CorruptError as error:
            raise self.malformed(lane, error) from error
        flight = lane.flights.get(reply.id)
        if flight is not None:
            flight.is_answered = True
            lane.replies.append(_Answer(flight, reply, self._clock.now()))
            lane.answered.set()
            self._unjudged_bytes += len(reply.bundle)
            while self._unjudged_bytes > most_unjudged_bytes:
                self._judged.clear()
                await self._judged.wait()

    async def judge(self, lane: Lane) -> None:
        """Judge replies as they come, for as long as the stream lasts. Beside `read`: frames are timed as they come, so
        reading must not wait for a check. Cancelled, it ends when all that came is judged: nobody takes a wrong result
        back by hanging up."""
        judging = asyncio.ensure_future(self._judge_all(lane))
        try:
            await asyncio.shield(judging)
        except asyncio.CancelledError:
            lane.has_ended = True
            lane.answered.set()
            await judging
            raise

    async def _judge_all(self, lane: Lane) -> None:
        while True:
            lane.answered.clear()
            while lane.replies:
                answer = lane.replies[0]
                if lane.flights.get(answer.flight.id) is answer.flight:
                    await self._judge(lane, answer.flight, answer.reply, answer.at)
                self._forget_reply(lane)
            if lane.has_ended:
                return
            await lane.answered.wait()

    def _forget_reply(self, lane: Lane) -> None:
        self._unjudged_bytes -= len(lane.replies.popleft().reply.bundle)
        self._judged.set()

    def malformed(self, lane: Lane, error: CorruptError) -> Refused:
        """What came on its stream cannot be read: a fault of the worker as a wrong result is, and its stream ends."""
        self._blame(lane.member, str(error), f"{lane.member.id} sent what cannot be read: {error}")
        return Refused(str(error))

    def _blame(self, member: Member, error: str, reason: str) -> None:
        self._roster.refused(member, error, self._clock.now())
        self.refused(member.id, reason)

    async def _rest(self, lane: Lane, resting: bool) -> None:
        """Its owner needs it, or no longer. Whoever says so all the time is left alone for longer than that."""
        now = self._clock.now()
        if resting == lane.resting:
            return
        if (early_s := lane.rests_since + least_rest_s - now) > 0:
            await self._clock.sleep(early_s)
        lane.resting, lane.rests_since = resting, self._clock.now()
        if resting and lane.member.turned_down.is_over(now):
            self._turned_down(lane.member, "rested", now)
            self._wake_all()
        elif resting or lane.member.turned_down.is_over(now):
            self._wake_all()

    def _turned_down(self, member: Member, what: str, now: float) -> None:
        if length_s := member.turned_down.fault(now):
            self._forget()
            times = member.turned_down.num_faults
            self.refused(
                member.id, f"{member.id} {what} once more ({times} times) and gets no piece for {length_s:.0f} s"
            )

    async def _judge(self, lane: Lane, flight: Flight, reply: PieceReply, now: float) -> None:
        member, play = lane.member, flight.play
        if reply.missing and not flight.sends_all:
            lane.kept.difference_update(f"{o.name}@{play.scope}" for o in flight.piece.operands.values())
            flight.sends_all, flight.is_answered = True, False
            lane.outbox.append(flight)
            lane.ready.set()
            return
        if reply.missing or reply.error:
            why = printable(reply.error, MAX_ERROR_LENGTH) or "it keeps nothing of what it is sent"
            reason = f"{member.id} could not do {flight.piece.task}: {why}"
            self._over(flight)
            if not reply.declined:
                self._roster.failed(member, why, now)
                self.refused(member.id, reason)
            elif not lane.resting:
                self._turned_down(member, "declined a piece", now)
            self._lose(flight, reason, now)
            return
        try:
            await self._transfers.run(_take, flight, reply, member.id, now)
        except (InvalidUpdate, CorruptError) as error:
            reason = f"{member.id} sent a result of {flight.piece.task} that was refused: {error}"
            self._over(flight)
            self._lose(flight, reason, now)
            lane.num_good = 0
            self._blame(member, str(error), reason)
            return
        except Exception as error:  # of this machine's own: it says nothing about the worker
            play.error = error
            self._over(flight)
            play.changed.set()
            return
        member.failing = False
        member.turned_down.good()
        lane.num_good += 1
        if lane.num_good % good_in_a_row == 0:
            self._roster.succeeded(member)
        self._learn(flight, reply, now)
        self._over(flight)
        play.changed.set()

    def _learn(self, flight: Flight, reply: PieceReply, now: float) -> None:
        """What the link gives, by how the bytes of request and reply came."""
        meter = self.meters.setdefault(flight.lane.member.id, LinkMeter())
        took_s = now - flight.begun_at
        ways = ((reply.down, flight.num_bytes, meter.received), (reply.arrival, len(reply.bundle), meter.sent))
        for arrival, most_bytes, heard in ways:
            least_s = arrival.num_bytes / most_bytes_per_s
            if least_heard_bytes <= arrival.num_bytes <= most_bytes and least_s < arrival.seconds <= took_s:
                heard(arrival.num_bytes, arrival.seconds)
        if flight.sent_at and (rtt_s := now - flight.sent_at - reply.seconds - reply.arrival.seconds) > 0:
            meter.answered(rtt_s)

    def _over(self, flight: Flight) -> None:
        """Its worker has nothing to do with it any more."""
        flight.lane.flights.pop(flight.id, None)
        flight.play.flights.pop(flight.piece, None)


def _part(bundle: Packing | bytes, start: int, num_bytes: int) -> bytes | bytearray:
    return bundle[start : start + num_bytes]


def _packing(tensors: Mapping[str, Tensor], wire: str) -> Packing | bytes:
    """Each operand in the parts that its wire type has: "a/values", "a/scales"."""
    parts = {f"{key}/{part}": x for key, value in tensors.items() for part, x in encoded_rows(value, wire).items()}
    return Packing(parts) if parts else b""


def _take(flight: Flight, reply: PieceReply, worker: WorkerId, now: float) -> None:
    assert isinstance(reply.bundle, bytearray), "as it was read"
    try:
        tensors = tensors_in(reply.bundle)
    except CorruptError:
        raise
    except Exception as error:
        raise CorruptError(f"it cannot be read: {type(error).__name__}") from error
    flight.play.bag.take(worker, flight.piece, tensors, now)
