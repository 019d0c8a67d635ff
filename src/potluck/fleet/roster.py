"""Who is here: members as they come, go, fall silent and misbehave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from potluck.fleet.config import FleetConfig
from potluck.protocol import pb
from potluck.strategies.fleet import WorkerInfo
from potluck.types.back_off import BackOff
from potluck.types.ids import LeaseId, WorkerId
from potluck.types.profile import DeviceProfile

missed_heartbeats = 3
most_reports_per_s = 150.0
"""Of all workers together: a larger fleet is asked for fewer signs of life from each."""
history_length = 16


@dataclass(kw_only=True)
class Member:
    """What the coordinator knows of one worker. Times are the clock's seconds."""

    id: WorkerId
    profile: DeviceProfile
    connected: bool = False
    last_seen: float = 0.0
    away_since: float = 0.0
    leaving: bool = False
    strikes: int = 0  # results in a row that were refused, or tasks that failed
    failing: bool = False  # its last task failed there
    refused_update: bool = False  # and none was accepted since
    quarantined: str = ""  # the reason, "" for none
    free_at: float = math.inf  # when its quarantine ends
    num_quarantines: int = 0
    progress: pb.Progress | None = None
    seconds_per_unit: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # by task name
    seconds_in_all: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # from lease to result
    verdicts: dict[LeaseId, pb.Verdict] = field(default_factory=dict[LeaseId, pb.Verdict])
    heartbeat_s: float = 0.0  # how often it has to be heard
    told_heartbeat_s: float = 0.0  # the same, as it was last told
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # something new to tell it
    data_changed: asyncio.Event = field(default_factory=asyncio.Event)  # new operands to send it
    connection: int = 0  # which of its connections is the current one
    is_vouched_for: bool = False  # its network would know if it fell silent: while connected it counts as heard
    turned_down: BackOff = field(default_factory=BackOff)  # pieces that it was given and did not want
    note: str = ""
    noted_at: float = -math.inf

    def observe(self, task: str, seconds: float, units: float, *, in_all_s: float = math.inf) -> None:
        """Remember how long a finished task took, and how long it was until its result was here."""
        for past, took in ((self.seconds_per_unit, seconds / max(units, 1.0)), (self.seconds_in_all, in_all_s)):
            past.setdefault(task, []).append(took)
            del past[task][:-history_length]

    def longest_s(self, task: str) -> float:
        """What its results took in all at most, by the coordinator's own clock; inf while there is none."""
        return max(self.seconds_in_all.get(task, []), default=math.inf)

    def forget(self, task: str) -> None:
        """A machine that became slower for good would otherwise miss every deadline from then on."""
        self.seconds_per_unit.pop(task, None)

    @property
    def up_bytes_per_s(self) -> float:
        """What its transfers showed, as it says; 0 for not known yet."""
        return self.profile.link.up_bytes_per_s

    @property
    def down_bytes_per_s(self) -> float:
        return self.profile.link.down_bytes_per_s

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(id=self.id, profile=self.profile)


def absence(member: Member, now: float, config: FleetConfig) -> str:
    """Why a worker counts as gone, "" while it does not. A broken link is forgiven for `reconnect_s`."""
    if member.leaving:
        return f"{member.id} left"
    if not member.connected:
        away_s = now - member.away_since
        return f"{member.id} has been away for {away_s:.0f} s" if away_s >= config.reconnect_s else ""
    return silence(member, now, config)


def silence(member: Member, now: float, config: FleetConfig) -> str:
    """Whether it has missed its heartbeats, connected or not, in words."""
    if now > heard_until(member, config):
        return f"{member.id} has not been heard for {now - member.last_seen:.0f} s"
    return ""


def heard_until(member: Member, config: FleetConfig) -> float:
    """How long a worker counts as heard if nothing more is heard of it."""
    if member.is_vouched_for and member.connected:
        return math.inf
    seen = member.away_since if member.is_vouched_for else member.last_seen
    return seen + missed_heartbeats * max(member.heartbeat_s, config.heartbeat_s)


def decide(members: Iterable[Member], now: float, config: FleetConfig) -> tuple[tuple[WorkerInfo, ...], str]:
    """Who gets work, in the order of ids, and in words why not the others."""
    here: list[WorkerInfo] = []
    reasons: list[str] = []
    for member in sorted(members, key=lambda m: m.id):
        if member.quarantined:
            reasons.append(f"{member.id} is quarantined: {member.quarantined}")
        elif gone := absence(member, now, config) or ("" if member.connected else f"{member.id} is away"):
            reasons.append(gone)
        else:
            here.append(member.info)
    return tuple(here), "; ".join(reasons)


class Roster:
    """All members of a run by id, and a signal that something about them changed."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.members: dict[WorkerId, Member] = {}
        self.disturbed: Callable[[Member], None] = lambda _member: None  # hears who came, went or may get no more work
        self.free_at = math.inf  # no quarantine ends before
        self.vouches_for_new = False  # the network knows how its workers are: a modelled one does
        self._changed = asyncio.Event()
        self._num_connected = 0

    def arrive(self, id: WorkerId, profile: DeviceProfile, now: float) -> Member:
        """A worker said hello: new, or back under its old name with its record kept."""
        member = self.members.get(id)
        if member is None:
            member = self.members[id] = Member(id=id, profile=profile, is_vouched_for=self.vouches_for_new)
        member.profile = profile
        member.leaving = False
        if member.quarantined and member.failing:  # started again: its owner may have mended it
            self._release(member, strikes=0)
        member.away_since = member.last_seen = now
        return member

    def connect(self, member: Member, now: float) -> int:
        """Its control stream opened; a stream it had before is void. Returns the number of this connection."""
        member.connection += 1
        self._num_connected += not member.connected
        member.connected = True
        member.heartbeat_s = member.told_heartbeat_s = self.config.heartbeat_s
        member.leaving = False
        member.last_seen = now
        self.disturbed(member)
        self.signal()
        return member.connection

    def leave(self, member: Member) -> None:
        """It said that it goes."""
        member.leaving = True
        self.disturbed(member)
        self.signal()

    def heard(self, member: Member) -> None:
        """It has read what it was last told, and is told again once the fleet has grown or shrunk much."""
        member.heartbeat_s = member.told_heartbeat_s
        if not 0.8 <= self._heartbeat_s / member.heartbeat_s <= 1.25:
            member.changed.set()

    def tell_heartbeat(self, member: Member) -> float:
        """How often it has to report from now on. Until it has read so, the longer time counts."""
        member.told_heartbeat_s = self._heartbeat_s
        member.heartbeat_s = max(member.heartbeat_s, member.told_heartbeat_s)
        return member.told_heartbeat_s

    @property
    def _heartbeat_s(self) -> float:
        return max(self.config.heartbeat_s, self._num_connected / most_reports_per_s)

    def disconnect(self, member: Member, connection: int, now: float) -> None:
        if member.connection == connection:
            was_silent = now >= heard_until(member, self.config)
            self._num_connected -= member.connected
            member.connected = False
            member.away_since = member.last_seen if was_silent else now
            member.progress = None
            self.disturbed(member)
            self.signal()

    def failed(self, member: Member, reason: str, now: float) -> None:
        """A task failed there. It is held against the worker unless most of those here fail too."""
        member.failing = True
        here = [m for m in self.members.values() if m.connected and not m.quarantined]
        if len(here) == 1 or 2 * sum(m.failing for m in here) <= len(here):
            self._strike(member, "failed tasks", reason, now)
        self.signal()

    def refused(self, member: Member, reason: str, now: float, *, is_update: bool = False) -> None:
        """A result of it was refused."""
        member.failing = False
        member.refused_update |= is_update
        self._strike(member, "refused results", reason, now)
        self.signal()

    def succeeded(self, member: Member, *, is_update: bool = True) -> None:
        """A result of it counts. For an update that was refused only an update makes up: numbers are easily right."""
        member.failing = False
        member.refused_update &= not is_update
        if not member.refused_update:
            member.strikes = 0

    def _strike(self, member: Member, what: str, reason: str, now: float) -> None:
        """Too many in a row and the worker gets no work for a while, each time for twice as long."""
        member.strikes += 1
        if member.strikes >= self.config.quarantine_after:
            member.quarantined = f"{member.strikes} {what} in a row, the last: {reason}"
            member.free_at = now + self.config.quarantine_s * 2**member.num_quarantines
            member.num_quarantines += 1
            self.free_at = min(self.free_at, member.free_at)
            self.disturbed(member)

    def release(self, now: float) -> None:
        """End the quarantines that are over. One more strike and the worker is back in it."""
        if now < self.free_at:
            return
        self.free_at = min((m.free_at for m in self.members.values() if m.free_at > now), default=math.inf)
        for member in self.members.values():
            if member.quarantined and now >= member.free_at:
                self._release(member, strikes=self.config.quarantine_after - 1)
                self.signal()

    def forgive(self, paused_s: float) -> None:
        """This process stood still (a paused machine, swapping): what came meanwhile is yet to be read."""
        for member in self.members.values():
            member.last_seen += paused_s
            member.away_since += paused_s

    def _release(self, member: Member, *, strikes: int) -> None:
        member.quarantined, member.strikes, member.free_at = "", strikes, math.inf
        member.changed.set()

    @property
    def num_connected(self) -> int:
        return self._num_connected

    def here(self, now: float) -> tuple[WorkerInfo, ...]:
        return decide(self.members.values(), now, self.config)[0]

    def expected(self, now: float) -> list[Member]:
        """Who is connected, or may well be soon: a worker prepares data and model between Welcome and Control."""
        patience_s = self.config.no_progress_s
        return [m for m in self.members.values() if m.connected or now - m.away_since < patience_s]

    def signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def change(self) -> Coroutine[Any, Any, Any]:
        """Wait until something about the members changes after this call."""
        return self._changed.wait()
