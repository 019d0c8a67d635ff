"""What the coordinator answers on the network: the `Service` behind both transports."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size, pack_tensors, unpack_tensors
from potluck.coordinator.core import Coordinator
from potluck.coordinator.status import snapshot
from potluck.coordinator.twins import Twins
from potluck.fleet.leases import OpenLease
from potluck.fleet.roster import Member, missed_heartbeats
from potluck.fleet.spread import Lane
from potluck.fleet.watch import tick_s
from potluck.protocol import check_version, parse, pb, upload_purpose, version
from potluck.protocol.frames import unpack_data
from potluck.storage.digest import check_digest
from potluck.transport import objects
from potluck.transport.connection import Channel, Peer
from potluck.transport.inline import Assembler, frames
from potluck.transport.pace import PacedChannel
from potluck.types.disk import full_disk_named
from potluck.types.errors import ConnectionLost, CorruptError, Refused, ResourceError
from potluck.types.ids import Digest, LeaseId, WorkerId
from potluck.types.profile import DeviceProfile
from potluck.types.untrusted import printable

MAX_STRATEGY_FILES = 64
MAX_PROCESS_NAME = 64
MAX_ERROR_LENGTH = 500
MAX_REPORTS = 100  # of one worker between two heartbeats; more wait, and their sender with them
MAX_REPORTS_S = 10.0
REPORT_BYTES = 64 << 10
"""A longer report counts as so many more: reading 4 MiB of small things takes a quarter of a second."""
MAX_INLINE_BYTES = 256 << 20  # of results that one worker sends inline and has not completed
arrival_interval_s = 0.5
"""A worker that says Welcome, or opens Control, more often is made to wait."""
CONTROLS_AT_ONCE = 4  # a link that breaks again and again is taken up without delay so often
MAX_ARRIVAL_WAIT_S = 10.0
MAX_UPLOADS = 4  # for one task: a worker that was restarted may have another result
MAX_TRANSFERS = 8
"""Object streams of one worker at once. It needs one; those of a link that broke take a while to end."""
upload_slack = 1.25
"""An upload may be this many times the size that the run's codec gives."""

Unary = Callable[[Peer, bytes], Awaitable[bytes]]


class CoordinatorService:
    """Serves one run. A host adds to `unary` the calls that only a real network has (Renew, Admin)."""

    def __init__(self, run: Coordinator) -> None:
        self.run = run
        self.unary: dict[str, Unary] = {"Welcome": self._welcome, "Status": self._status}
        run_size = flat_size("params", run.plan.layout, codec("fp32"))
        self._turns: dict[tuple[str, WorkerId], float] = {}  # when its next arrival of a kind has its turn
        self._num_transfers: Counter[WorkerId] = Counter()
        self._data_over: dict[WorkerId, asyncio.Event] = {}  # ends the Data stream that it has now
        self._twins = Twins(self._tell_of_twins)
        self._run_json = run.plan.spec.model_dump_json()
        self._max_upload_bytes = int(run_size * upload_slack) + (1 << 20)

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes:
        handler = self.unary.get(method)
        if handler is None:
            raise Refused(f"this coordinator does not know the call {method}")
        with self._own_faults():
            return await handler(peer, request)

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        await self.run.recovered.wait()
        member = self.run.roster.members.get(peer.id)
        if member is None:
            raise ConnectionLost(
                f"{peer.id} has not said Welcome since the coordinator started"
            )  # it will, and try again
        match method:
            case "Control":
                await self._control(member, channel)
            case "Data":
                await self._data(member, channel)
            case "GetObject" | "PutObject":
                with self._transfer_of(member.id), self._own_faults():
                    await self._transfer(member, method, channel)
            case _:
                raise Refused(f"this coordinator does not know the stream {method}")

    @contextmanager
    def _own_faults(self) -> Generator[None, None, None]:
        """A full disk of this machine ends the run. Its workers cannot mend that: they keep what they have and wait."""
        try:
            with full_disk_named(self.run.folder):
                yield
        except ResourceError as error:
            self.run.fail(error)
            raise ConnectionLost("the coordinator's machine has no room; it has to be mended there") from error

    # Unary calls

    async def _welcome(self, peer: Peer, data: bytes) -> bytes:
        request = parse(pb.WelcomeRequest, data)
        await self.run.recovered.wait()
        check_version(request.version, who=f"worker {peer.id}")
        if peer.role != "worker":
            raise Refused(f"{peer.id} has the role {peer.role} and only workers join a run")
        spec = self.run.plan.spec
        reply = pb.WelcomeReply(version=version(), run_id=spec.run_id, run_json=self._run_json).SerializeToString()
        if request.is_look:
            await self._turn_of("Welcome", peer.id)
            if request.declines:
                self._declined(peer.id, printable(request.declines, MAX_ERROR_LENGTH))
            return reply
        allowed = {f.digest for f in request.strategies[:MAX_STRATEGY_FILES]}
        if spec.strategy_digest and spec.strategy_digest not in allowed:
            raise Refused(
                f"this run uses the strategy file {spec.strategy} ({spec.strategy_digest}), which {peer.id} does not "
                "allow; read it and start the worker with --allow-strategy and an equal copy of it"
            )
        try:
            profile = DeviceProfile.parse(request.profile_json)
        except ValueError as error:
            raise Refused(f"the profile of {peer.id} is refused: {error}") from error
        await self._turn_of("Welcome", peer.id)
        self._twins.welcome(peer.id, request.process[:MAX_PROCESS_NAME], self.run.clock.now())
        await self.run.lanes.ledger.run(self.run.seen, peer.id)
        known = peer.id in self.run.roster.members
        self.run.roster.arrive(peer.id, profile, self.run.clock.now())
        self.run.tell("joined", f"{peer.id} {'is back' if known else 'joined'} ({profile.device})", worker=peer.id)
        return reply

    def _declined(self, worker: WorkerId, why: str) -> None:
        """Its owner does not let it take part. It never opens Control, so no round has counted it in."""
        self.run.tell("declined", f"{worker} does not take part: {why}", worker=worker, reason=why)
        member = self.run.roster.members.get(worker)
        if member is not None:
            self.run.roster.leave(member)

    def _tell_of_twins(self, worker: WorkerId, text: str) -> None:
        self.run.told_of[worker] = text
        self.run.tell("note", text, worker=worker)

    async def _turn_of(self, kind: str, worker: WorkerId, *, at_once_s: float = 0.0) -> None:
        """Each arrival costs a line in the log, a Welcome also a write to the disk: one worker has so many of them."""
        now = self.run.clock.now()
        at = max(now, self._turns.get((kind, worker), now))
        if at - now > MAX_ARRIVAL_WAIT_S:
            raise Refused(f"{worker} says {kind} more than {1 / arrival_interval_s:.0f} times a second; start it again")
        self._turns[kind, worker] = at + arrival_interval_s
        if (wait_s := at - now - at_once_s) > 0:
            await self.run.clock.sleep(wait_s)

    async def _status(self, peer: Peer, data: bytes) -> bytes:
        return pb.StatusReply(status_json=json.dumps(snapshot(self.run))).SerializeToString()

    # Control

    async def _control(self, member: Member, channel: Channel) -> None:
        """Reports in, desired situations out, until either side ends."""
        await self._turn_of("Control", member.id, at_once_s=CONTROLS_AT_ONCE * arrival_interval_s)
        roster, clock = self.run.roster, self.run.clock
        connection = roster.connect(member, clock.now())
        member.changed.set()
        try:
            await first_of(self._read_reports(member, channel), self._write_desired(member, connection, channel))
        finally:
            roster.disconnect(member, connection, clock.now())
            if member.connection == connection:
                reason = "left" if member.leaving else "its connection ended"
                self.run.tell("left", f"{member.id} {reason}", worker=member.id, reason=reason)
            if member.leaving:
                self.run.deck.release(member.id)

    async def _read_reports(self, member: Member, channel: Channel) -> None:
        clock = self.run.clock
        heartbeat_s = min(self.run.config.heartbeat_s, MAX_REPORTS_S)  # none is due where the network vouches for all
        num_reports, since = 0, clock.now()
        while True:
            if num_reports >= MAX_REPORTS:
                await clock.sleep(max(0.0, since + heartbeat_s - clock.now()))
                num_reports, since = 0, clock.now()
            message = await self._next_report(member, channel)
            if message is None:
                return
            self.run.roster.heard(member)
            num_reports += 1 + len(message) // REPORT_BYTES
            self.run.intake.report(member, parse(pb.Report, message))

    async def _next_report(self, member: Member, channel: Channel) -> bytes | None:
        """TimeoutError when none came in time: not in that of this process, which may have stood still meanwhile."""
        while True:
            limit_s = missed_heartbeats * member.heartbeat_s
            due = self.run.clock.now() + limit_s
            try:
                async with asyncio.timeout(limit_s):
                    return await channel.receive()
            except TimeoutError:
                if self.run.clock.now() - due < tick_s:
                    raise

    async def _write_desired(self, member: Member, connection: int, channel: Channel) -> None:
        sequence = 0
        while True:
            await member.changed.wait()
            if member.connection != connection:
                return  # without clearing: the stream that took this one's place has to see it
            member.changed.clear()
            sequence += 1
            desired = self.desired(member, sequence)
            await channel.send(desired.SerializeToString())
            if desired.stopping and not desired.leases:
                await self.run.clock.sleep(self.run.config.heartbeat_s)  # time for the worker to read and go

    def desired(self, member: Member, sequence: int) -> pb.Desired:
        """Everything this worker should hold and do now."""
        run = self.run
        leases = [] if member.quarantined else run.fleet.book.of(member.id)
        state = run.state
        return pb.Desired(
            sequence=sequence,
            leases=[x.told for x in leases],
            adopted_version=run.fleet.adopted_version(member.id),
            held_versions=run.fleet.held_versions(member.id),
            verdicts=list(member.verdicts.values()),
            phase=member.quarantined or run.fleet.phase,
            stopping=bool(run.stop_reason),
            stop_reason=run.stop_reason,
            inputs=self._inputs(leases),
            round=state.round if state else 0,
            heartbeat_s=run.roster.tell_heartbeat(member),
        )

    def _inputs(self, leases: Sequence[OpenLease]) -> list[pb.SessionInput]:
        """What the sessions among them have not taken yet."""
        return [i for x in leases if x.message.kind == "session" for i in self.run.fleet.inputs(x.message.key)]

    # Inline tensors

    async def _data(self, member: Member, channel: Channel) -> None:
        """Until the worker opens another: it has one, and what a stream holds unfinished is bounded."""
        if (before := self._data_over.get(member.id)) is not None:
            before.set()
        over, sending = asyncio.Event(), asyncio.Lock()
        self._data_over[member.id] = over

        async def send(frame: bytes) -> None:
            async with sending:
                await channel.send(frame)

        spreader = self.run.fleet.spreader
        with spreader.stream(member) as lane:
            await first_of(
                self._read_data(member, channel, lane), self._write_data(member, send), spreader.write(lane, send),
                spreader.judge(lane), over.wait(),
            )  # fmt: skip

    async def _read_data(self, member: Member, channel: Channel, lane: Lane) -> None:
        held = self.run.fleet.book.open
        assembler = Assembler(
            MAX_INLINE_BYTES, wanted=lambda name: (lease := held.get(name)) is not None and lease.worker == member.id
        )
        joiner = self.run.fleet.spreader.joiner(lane)
        while (frame := await channel.receive()) is not None:
            try:
                head, data = unpack_data(frame)
                if "lease" not in head:
                    await self.run.fleet.spreader.read(lane, joiner, head, data)
                    continue
                if (done := assembler.join(head, data)) is None:
                    continue
                name, bundle = done
                tensors = await self.run.lanes.transfers.run(unpack_tensors, bundle, MAX_INLINE_BYTES)
            except CorruptError as error:
                raise self.run.fleet.spreader.malformed(lane, error) from error
            lease = self.run.fleet.book.open.get(name)
            if lease is not None and lease.worker == member.id:
                self.run.intake.inline[(member.id, name)] = tensors

    async def _write_data(self, member: Member, send: Callable[[bytes], Awaitable[None]]) -> None:
        sent: set[LeaseId] = set()
        while True:
            member.data_changed.clear()  # before looking: what comes while this sends is seen next time
            leases = self.run.fleet.book.of(member.id)
            sent &= {lease.id for lease in leases}
            for lease in leases:
                operands = self.run.fleet.operands.get(lease.id)
                if operands is None or lease.id in sent:
                    continue
                sent.add(lease.id)
                named = {str(i): tensor for i, tensor in enumerate(operands)}
                bundle = await self.run.lanes.transfers.run(pack_tensors, named)
                for frame in frames(lease.id, bundle):
                    await send(frame)
            await member.data_changed.wait()

    # Objects

    @contextmanager
    def _transfer_of(self, worker: WorkerId) -> Iterator[None]:
        """All transfers share what may be on its way, so one worker must not have any number of them."""
        if self._num_transfers[worker] >= MAX_TRANSFERS:
            raise ConnectionLost(f"{worker} has {MAX_TRANSFERS} transfers under way; end one or wait")
        self._num_transfers[worker] += 1
        try:
            yield
        finally:
            self._num_transfers[worker] -= 1

    async def _transfer(self, member: Member, method: str, channel: Channel) -> None:
        run = self.run
        paced = PacedChannel(channel, run.pacer, member.id, patience_s=run.config.no_progress_s)
        if method == "GetObject":
            await objects.serve_get(paced, run.objects, run.lanes.transfers, self.may_fetch(member))
        else:
            await objects.serve_put(paced, run.objects, run.lanes.transfers, self.may_store(member))

    def may_fetch(self, member: Member) -> Callable[[Digest], bool]:
        """What its leases name, and what every member of the run may have."""

        def allow(digest: Digest) -> bool:
            if digest in self.run.plan.open_objects:
                return True
            leases = self.run.fleet.book.of(member.id)
            named = (x.message for x in leases)
            return any(digest in x.objects or any(digest == d.delta for d in x.deltas) for x in named) or any(
                digest in given.objects for given in self._inputs(leases)
            )

        return allow

    def may_store(self, member: Member) -> Callable[[pb.ObjectInfo], None]:
        """A result of work it holds, no larger than such a result can be."""

        def admit(info: pb.ObjectInfo) -> None:
            digest = check_digest(info.digest)
            held = (x for x in self.run.fleet.book.of(member.id) if info.purpose == upload_purpose(*x.id))
            if (lease := next(held, None)) is None:
                raise Refused(f"nobody waits for the upload {info.purpose[:100]!r} any more")
            if not 0 < info.size <= self._max_upload_bytes:
                raise Refused(f"an upload of {info.size} bytes is not in 1 to {self._max_upload_bytes}")
            others = self.run.uploads.others(digest, lease.id)
            if lease.message.kind != "session" and others >= MAX_UPLOADS:
                raise Refused(f"{lease.message.task} has one result, and {others} others were uploaded for it")
            self.run.uploads.add(digest, lease.id)

        return admit


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all until the first one ends, then end the others; a lost link is an ordinary end."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, ConnectionLost | TimeoutError):
            raise result
