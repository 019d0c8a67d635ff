"""The worker's agent: keeps the connection to the coordinator up, listens to what is wanted and reports what is.

Control is level-triggered: each message states the whole situation, so after any break the next one repairs all.
Training never stops for a broken link; results wait until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from potluck.clock import Clock
from potluck.models.config import BaseFiles
from potluck.planner.link import differ
from potluck.protocol import check_version, parse, pb, version
from potluck.protocol.frames import unpack_data
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Channel, Connection
from potluck.transport.inline import Assembler, frames
from potluck.types.errors import ConnectionLost, CoordinatorUnreachable, CorruptError, OwnerRefused, Refused
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, LinkRates
from potluck.types.untrusted import printable
from potluck.worker.gate import Gate
from potluck.worker.link import Link
from potluck.worker.runner import Runner

first_wait_s = 0.5
longest_wait_s = 2.0
"""A coordinator that comes back is found again so soon."""
repeat_s = 60.0
"""Between two lines for people about the same trouble."""
MAX_RUN_JSON_BYTES = 1 << 26
MAX_SENTENCE_LENGTH = 500
MAX_HEARTBEAT_S = 3600.0
farewell_s = 0.2
"""So long the last message has to get out before its stream closes."""
least_sleep_s = 10.0
"""A gap in the worker's time from which on the machine is taken to have slept: its connection is not believed then."""


def read_welcome(data: bytes) -> RunSpec:
    """What the run is, from the coordinator's WelcomeReply. Refused where it cannot be read."""
    try:
        reply = parse(pb.WelcomeReply, data)
        check_version(reply.version, who="the coordinator")
        if len(reply.run_json) > MAX_RUN_JSON_BYTES:
            raise Refused("the coordinator's description of the run is too long to be true")
        return _read_spec(reply.run_json)
    except ValueError as error:
        raise Refused(
            f"the coordinator's description of the run cannot be read: {printable(str(error), 500)}"
        ) from error


@lru_cache(maxsize=4)
def _read_spec(run_json: str) -> RunSpec:
    """The same text is not read again at every connection. ValueError."""
    return RunSpec.model_validate_json(run_json)


def _check_base(before: BaseFiles | None, now: BaseFiles | None) -> None:
    """Refused where the model below the adapters is another one than this worker has loaded."""
    if before != now:
        names = [base.digest if base is not None else "none" for base in (before, now)]
        raise Refused(
            f"the coordinator now names the base model {names[1]} and this worker trains adapters on {names[0]}; ask "
            "whoever runs it, and join again if that is meant"
        )


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """How the worker introduces itself."""

    id: WorkerId
    profile: DeviceProfile
    strategies: tuple[tuple[str, str], ...] = ()  # (file name, digest) that the owner allows
    process: str = ""  # a name of this process, which no other has


class Agent:
    """One worker of one run.

    `connect` makes a new connection; `equip` builds the runner for a run once its spec is known, and `told` hears
    one line for people at a time.
    """

    def __init__(
        self, introduction: Introduction, *, connect: Callable[[], Awaitable[Connection]],
        equip: Callable[[RunSpec, Link], Awaitable[Runner]], clock: Clock, told: Callable[[str], None],
        patience_s: float = 60.0, link: Link | None = None, least_heartbeat_s: float = 0.0, gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self.introduction = introduction
        self._connect, self._equip, self._clock, self._told = connect, equip, clock, told
        self._patience_s, self._gate = patience_s, gate or Gate()
        self._random = random.Random(introduction.id)
        self._leaving = asyncio.Event()
        self._note = ""
        self.link = link or Link(clock)
        self.runner: Runner | None = None
        self.spec: RunSpec | None = None
        self._reconnect = asyncio.Event()
        self._unreached = ("", 0.0)  # what was last told of a coordinator that cannot be reached, and when
        self._heartbeat_s = 0.0  # as the coordinator last said; 0 for as the run's description says
        self._least_heartbeat_s = least_heartbeat_s  # where the network itself knows that this worker is well
        self.ended = ""  # why the run ended, as the coordinator said it

    async def work(self) -> None:
        """Until the run ends, the worker leaves, or the coordinator refuses it (Refused)."""
        running: asyncio.Task[None] | None = None
        wait_s, first_try = first_wait_s, self._clock.now()
        try:
            while not self.ended and not self._leaving.is_set():
                try:
                    connection = await self._connect()
                    try:
                        await self._join(connection)
                        wait_s, self._unreached = first_wait_s, ("", 0.0)
                        assert self.runner is not None
                        if running is None:
                            running = asyncio.create_task(self.runner.run())
                        await self._serve(connection, running)
                    finally:
                        self.link.set(None)
                        await connection.close()
                except ConnectionLost as lost:
                    if self.spec is None and self._clock.now() - first_try > self._patience_s:
                        raise CoordinatorUnreachable(
                            f"no coordinator answers ({lost}); check the address and that `potluck host` runs there"
                        ) from lost
                    self._tell_unreached(f"the coordinator cannot be reached ({lost}); trying again until it can")
                if not self.ended:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s * self._random.uniform(0.5, 1.0)):
                            await self._leaving.wait()
                    wait_s = min(wait_s * 2, longest_wait_s)
        finally:
            if running is not None:
                if self.runner is not None:
                    self.runner.cancel()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            if self.runner is not None:
                self.runner.folder.objects.spares.clear()

    def _tell_unreached(self, text: str) -> None:
        """Once, and again each minute or when it is for another reason: it is tried many times a minute."""
        now = self._clock.now()
        if text != self._unreached[0] or now - self._unreached[1] >= repeat_s:
            self._told(text)
            self._unreached = (text, now)

    def leave(self) -> None:
        """Hand everything back and go; the coordinator is told first if it can be reached."""
        self._leaving.set()
        if self.runner is not None:
            self.runner.changed.set()

    def hold(self) -> None:
        """Stop between two steps and keep what is done and what is to be done, until `release`."""
        if self.runner is not None:
            self.runner.hold()

    def release(self) -> None:
        if self.runner is not None:
            self.runner.release()

    @property
    def profile(self) -> DeviceProfile:
        """With what its transfers have shown of the link so far."""
        rank = self.runner.trainer.adapter_rank if self.runner is not None else 0
        return replace(self.introduction.profile, link=self.link.meter.rates, adapter_rank=rank)

    def reconnect(self) -> None:
        """Give the present connection up for a new one."""
        self._reconnect.set()

    def note(self, text: str) -> None:
        """A sentence for people on this machine and for the run's log."""
        self._told("\n".join(printable(line, 2000) for line in text.splitlines()))  # it may quote the coordinator
        self._note = printable(text, MAX_SENTENCE_LENGTH)

    async def _join(self, connection: Connection) -> None:
        """Welcome: learn what the run is, and get ready for it the first time."""
        request = pb.WelcomeRequest(
            version=version(),
            profile_json=json.dumps(self._gate.told_of(self.profile)),
            strategies=[pb.StrategyFile(name=n, digest=d) for n, d in self.introduction.strategies],
            process=self.introduction.process,
        )
        await self._gate.pass_welcome(request)
        spec = read_welcome(await connection.call("Welcome", request.SerializeToString()))
        if self.spec is not None and spec.run_id != self.spec.run_id:
            raise Refused(f"the coordinator now serves run {spec.run_id} and this worker joined {self.spec.run_id}")
        if self.spec is not None:
            _check_base(self.spec.base, spec.base)
        allowed = {digest for _, digest in self.introduction.strategies}
        if spec.strategy_digest and spec.strategy_digest not in allowed:
            raise Refused(
                f"the run uses {spec.strategy}, which is not among the files of --allow-strategy; nothing ran"
            )
        try:
            await self._gate.admit(spec)
            self.spec = spec
            self.link.set(connection)
            if self.runner is None:
                self._told(f"joined run {printable(spec.name, 200)} ({spec.run_id}) as {self.introduction.id}")
                self.runner = await self._equip(spec, self.link)
        except OwnerRefused as refused:
            with contextlib.suppress(ConnectionLost):
                await self._decline(connection, refused)
            raise

    async def _decline(self, connection: Connection, refused: OwnerRefused) -> None:
        """Tell the coordinator that this worker takes no part."""
        request = pb.WelcomeRequest(
            version=version(), is_look=True, declines=printable(str(refused), MAX_SENTENCE_LENGTH)
        )
        await self._gate.pass_welcome(request)
        await connection.call("Welcome", request.SerializeToString())

    async def _serve(self, connection: Connection, running: asyncio.Task[None]) -> None:
        """Control and Data until the link breaks or the run ends."""
        self._reconnect.clear()
        control = await connection.open("Control")
        data = await connection.open("Data")
        self.runner_ready().changed.set()
        pieces, sending = self.runner_ready().pieces, asyncio.Lock()

        async def send_data(frame: bytes) -> None:
            async with sending:
                await data.send(frame)

        parts = [
            asyncio.ensure_future(c)
            for c in (
                self._read_desired(control),
                self._write_reports(control),
                self._send_emissions(),
                self._read_data(data),
                self._write_data(send_data),
                *(pieces.serve(self._gate.passing_pieces(send_data)) if pieces is not None else ()),
                self._reconnect.wait(),
            )
        ]
        try:
            await asyncio.wait([*parts, running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            results = await asyncio.gather(*parts, return_exceptions=True)
            await data.close()
            await control.close()
        if running.done():
            running.result()  # an error in the runner itself is ours: let it show
        for result in results:
            if isinstance(result, Exception):
                raise result

    def runner_ready(self) -> Runner:
        assert self.runner is not None, "the runner is built at Welcome"
        return self.runner

    async def _read_desired(self, control: Channel) -> None:
        runner = self.runner_ready()
        while (message := await control.receive()) is not None:
            desired = parse(pb.Desired, message)
            if 0.0 <= desired.heartbeat_s <= MAX_HEARTBEAT_S:
                self._heartbeat_s = desired.heartbeat_s
            await runner.desire(desired)
            if desired.stopping:
                self.ended = printable(desired.stop_reason, MAX_SENTENCE_LENGTH) or "the run ended"
                return
        raise ConnectionLost("the coordinator ended the stream")

    async def _write_reports(self, control: Channel) -> None:
        runner = self.runner_ready()
        assert self.spec is not None
        sequence, told, told_rank, offset_s = 0, LinkRates(), 0, self._clock.time() - self._clock.now()
        while True:
            sequence += 1
            runner.changed.clear()
            rates, rank = self.link.meter.rates, runner.trainer.adapter_rank
            is_news = differ(rates, told) or rank != told_rank
            told, told_rank = (rates, rank) if is_news else (told, told_rank)
            withdraws = runner.withdraws
            report = pb.Report(
                sequence=sequence,
                results=list(runner.results.values()),
                progress=runner.progress(),
                input_acks=runner.input_acks(),
                leaving=self._leaving.is_set() or bool(withdraws) or self._gate.refusal is not None,
                note=printable(withdraws, MAX_SENTENCE_LENGTH) or self._note,
                profile_json=json.dumps(self._gate.told_of(self.profile)) if is_news else "",
            )
            await self._gate.pass_report(report)
            await control.send(report.SerializeToString())
            if report.leaving:
                await self._clock.sleep(farewell_s)
                if self._gate.refusal is not None:
                    raise self._gate.refusal
                self.ended = self.ended or withdraws
                return
            heartbeat_s = max(self._heartbeat_s or self.spec.heartbeat_s, self._least_heartbeat_s)
            waits_from = self._clock.now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await runner.changed.wait()
            # While a machine sleeps the monotonic clock stands still on some systems and goes on on others.
            before_s, offset_s = offset_s, self._clock.time() - self._clock.now()
            slept_s = max(offset_s - before_s, self._clock.now() - waits_from - heartbeat_s)
            if slept_s > least_sleep_s:
                self._told(f"this machine slept for {slept_s:.0f} s; joining again")
                self.reconnect()

    async def _send_emissions(self) -> None:
        runner = self.runner_ready()
        while True:
            runner.emitted.clear()
            await runner.deliver_emissions()
            await runner.emitted.wait()

    async def _read_data(self, data: Channel) -> None:
        assembler, runner = Assembler(), self.runner_ready()
        while (frame := await data.receive()) is not None:
            try:
                head, part = unpack_data(frame)
                if "lease" not in head and runner.pieces is not None:
                    await runner.pieces.take(head, part)
                elif (done := assembler.join(head, part)) is not None:
                    await runner.take_operands(*done)
            except CorruptError as error:
                raise ConnectionLost(str(error)) from error  # sent again on the next stream
        await asyncio.Event().wait()  # no more inline tensors: the control stream decides when this ends

    async def _write_data(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        runner = self.runner_ready()
        sent: set[tuple[int, int, str]] = set()
        while True:
            runner.inline_changed.clear()  # before looking: what comes while this sends is seen next time
            sent &= runner.inline_results.keys()
            for id, bundle in list(runner.inline_results.items()):
                if id not in sent:
                    sent.add(id)
                    for frame in frames(id, bundle):
                        await send(frame)
            await runner.inline_changed.wait()
