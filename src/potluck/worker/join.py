"""Joining a run from this machine: identity, device, data, and the agent that does the rest."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from potluck.clock import Clock, SystemClock, ThreadExecutor
from potluck.models.device import choose_device, describe
from potluck.storage.digest import digest_file
from potluck.storage.files import FolderLock
from potluck.strategies.registry import load_file
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Connection
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.security.enrol import enter
from potluck.transport.security.identity import Identity, apply_renewal, renewal_request
from potluck.types.errors import ConnectionLost, DataError
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction
from potluck.worker.equip import equip
from potluck.worker.link import Link
from potluck.worker.measure import measured
from potluck.worker.options import JoinOptions, Leaving
from potluck.worker.runner import Runner

Say = Callable[[str], None]
renewal_check_s = 3600.0


async def work(options: JoinOptions, *, told: Say, on_start: Callable[[Leaving], None] = lambda _: None) -> str:
    """Work for a run until it ends or this machine leaves; why it ended. PotluckError with what is wrong."""
    for path in options.data:
        if not path.exists() and not any(c in str(path) for c in "*?["):
            raise DataError(f"{path} does not exist; check the path given with --data")
    options.state_dir.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(options.state_dir)
    files, compute = ThreadExecutor(2, "files"), ThreadExecutor(1, "compute")
    try:
        return await _Joining(options, files, compute, told).work(on_start)
    finally:
        files.close()
        compute.close()
        lock.release()


class _Joining:
    """One call of `work`."""

    def __init__(self, options: JoinOptions, files: ThreadExecutor, compute: ThreadExecutor, say: Say) -> None:
        self.options, self.files, self.compute, self.say = options, files, compute, say
        self.clock: Clock = SystemClock()
        self._folder = options.state_dir / "identity"
        self._leaving = asyncio.Event()
        self._shifting: tuple[Agent, asyncio.Task[None]] | None = None
        self._profile: DeviceProfile | None = None

    async def work(self, on_start: Callable[[Leaving], None]) -> str:
        options = self.options
        self._device = str(await self.files.run(choose_device, options.device))
        self._strategies = await self.files.run(_allowed, options.allow_strategies)
        self._identity = await enter(
            options.link, name=options.name or socket.gethostname(), folder=self._folder,
            executor=self.files, now=self.clock.time(),
        )  # fmt: skip
        if self._identity.role == "operator":
            return f"this machine may operate the run; ask it with: potluck status {options.state_dir}"
        on_start(self)
        while True:
            if (wait_s := seconds_until_open(options.hours, self.clock.time())) > 0:
                self.say(f"outside the hours {options.hours}; waiting {wait_s / 3600:.1f} h")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._leaving.wait()
            if self._profile is None and not self._leaving.is_set():  # within the owner's hours only
                self._profile = await self._measured()
            if self._profile is None or self._leaving.is_set():
                return "left"
            agent = self._agent(self._profile)
            if await self._shift(agent):
                return agent.ended or "left"

    def leave(self) -> None:
        """Go in good order: with a word to the coordinator once there is work, at once before that."""
        self._leaving.set()
        if self._shifting is not None:
            agent, serving = self._shifting
            if agent.runner is not None:
                agent.leave()
            else:
                serving.cancel()

    async def _measured(self) -> DeviceProfile:
        """What this machine is and gives: measured the first time, on the owner's terms."""
        options = self.options
        loop = asyncio.get_running_loop()

        def look() -> DeviceProfile:
            profile = describe(self._device, options.num_threads or None)
            free = min(profile.free_memory_bytes, options.max_memory_bytes or profile.free_memory_bytes)
            profile = replace(profile, free_memory_bytes=free, duty=duty(options.hours))
            return measured(
                profile, options.state_dir, now=self.clock.time(), num_threads=options.num_threads,
                told=lambda text: _later(loop, self.say, text),
            )  # fmt: skip

        return await self.compute.run(look)

    def _agent(self, profile: DeviceProfile) -> Agent:
        options = self.options
        agent: Agent

        async def connect() -> Connection:
            self._identity = await self._renewed(self._identity)
            return GrpcConnection(self._identity.address, self._identity)

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            runner = await equip(
                spec, link, folder=options.state_dir, device=self._device, clock=self.clock, compute=self.compute,
                files=self.files, note=agent.note, told=self.say, data=options.data,
                num_threads=options.num_threads or None,
                max_memory_bytes=options.max_memory_bytes, share_dir=options.share_dir,
            )  # fmt: skip
            gc.freeze()  # what imports made is no garbage: to look through it again would hold the event loop up
            return runner

        agent = Agent(
            Introduction(id=self._identity.worker_id, profile=profile, strategies=self._strategies),
            connect=connect, equip=equipped, clock=self.clock, told=self.say,
        )  # fmt: skip
        return agent

    async def _shift(self, agent: Agent) -> bool:
        """Work until the end of the run or of the owner's hours; whether it is over for good."""
        serving = asyncio.create_task(agent.work())
        self._shifting = (agent, serving)
        renewing = asyncio.create_task(self._renew_in_time(agent))
        open_s = seconds_until_closed(self.options.hours, self.clock.time())
        try:
            done, _ = await asyncio.wait([serving], timeout=open_s)
            if not done:
                agent.leave()
            if self._leaving.is_set():
                await asyncio.wait([serving])
                if serving.cancelled():  # by `leave`
                    return True
            await serving
            return bool(done)
        finally:
            self._shifting = None
            for task in (serving, renewing):
                task.cancel()
            await asyncio.gather(serving, renewing, return_exceptions=True)

    async def _renew_in_time(self, agent: Agent) -> None:
        while True:
            await self.clock.sleep(renewal_check_s)
            before, self._identity = self._identity, await self._renewed(self._identity)
            if self._identity is not before:
                agent.reconnect()  # with the new certificate

    async def _renewed(self, identity: Identity) -> Identity:
        """The identity, with a new certificate where it is time for one."""
        if not identity.needs_renewal(self.clock.time()):
            return identity
        renewal = await self.files.run(renewal_request, identity)
        connection = GrpcConnection(identity.address, identity)
        try:
            reply = await connection.call("Renew", renewal.request)
        except ConnectionLost:
            return identity  # there is a third of its life left to try again
        finally:
            await connection.close()
        renewed = await self.files.run(apply_renewal, identity, renewal, reply)
        await self.files.run(renewed.save, self._folder)
        return renewed


def _allowed(files: tuple[Path, ...]) -> tuple[tuple[str, str], ...]:
    """Load the strategy files that the owner allows; their names and digests go to the coordinator."""
    for path in files:
        load_file(path)
    return tuple((path.name, digest_file(path)) for path in files)


def seconds_until_open(hours: tuple[int, int] | None, now: float) -> float:
    """How long until the owner's hours begin; 0 within them. `hours` is (from, to) of the local day."""
    if hours is None or _is_open(hours, now):
        return 0.0
    return _seconds_to_hour(hours[0], now)


def seconds_until_closed(hours: tuple[int, int] | None, now: float) -> float | None:
    """How long until the owner's hours end; None if they never do."""
    return None if hours is None or hours[0] % 24 == hours[1] % 24 else _seconds_to_hour(hours[1], now)


def _later(loop: asyncio.AbstractEventLoop, say: Say, text: str) -> None:
    """From any thread."""
    loop.call_soon_threadsafe(say, text)


def duty(hours: tuple[int, int] | None) -> float:
    """The share of the day that the owner's hours leave to the run."""
    return 1.0 if hours is None else ((hours[1] - hours[0]) % 24 or 24) / 24


def _is_open(hours: tuple[int, int], now: float) -> bool:
    start, stop = hours[0] % 24, hours[1] % 24
    hour = time.localtime(now).tm_hour
    return start == stop or (start <= hour < stop if start < stop else hour >= start or hour < stop)


def _seconds_to_hour(hour: int, now: float) -> float:
    local = time.localtime(now)
    passed_s = local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec
    return float((hour * 3600 - passed_s) % 86400 or 86400)
