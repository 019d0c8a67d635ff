"""Joining a run from this machine: identity, device, data, and the agent that does the rest."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from potluck.clock import Clock, SystemClock, ThreadExecutor
from potluck.models.device import choose_device, describe
from potluck.protocol import pb, version
from potluck.storage.digest import digest_file
from potluck.storage.files import FolderLock
from potluck.strategies.registry import load_file
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Connection
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.pace import Limits, PacedConnection, Pacer
from potluck.transport.security.enrol import enter
from potluck.transport.security.identity import Identity, apply_renewal, renewal_request
from potluck.types.errors import ConnectionLost, CoordinatorUnreachable, DataError, OwnerRefused
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction, read_welcome
from potluck.worker.equip import equip
from potluck.worker.gate import Gate
from potluck.worker.link import Link
from potluck.worker.measure import measured
from potluck.worker.options import JoinOptions, Leaving
from potluck.worker.policy import Policy, load_policy
from potluck.worker.prospect import Prospect, prospect
from potluck.worker.receipts import FOLDER as RECEIPTS
from potluck.worker.receipts import ReceiptLog
from potluck.worker.runner import Runner
from potluck.worker.surroundings import Machine
from potluck.worker.terms import Stop, Terms, duty

Say = Callable[[str], None]
renewal_check_s = 3600.0
look_s = 1.0
"""Between two looks at the owner's terms."""
_no_digits = str.maketrans("", "", "0123456789")
"""A reason with other figures is the same one."""
leave_patience_s = 5.0
"""How long the coordinator may take to hear that the worker leaves."""


async def work(options: JoinOptions, *, told: Say, on_start: Callable[[Leaving], None] = lambda _: None) -> str:
    """Work for a run until it ends or this machine leaves; why it ended. PotluckError with what is wrong."""
    async with _joining(options, told) as joining:
        return await joining.work(on_start)


async def look(options: JoinOptions, *, told: Say) -> Prospect:
    """What `work` would do and what would leave this machine; nothing of it is done. PotluckError as there.

    A machine that is new to the coordinator is enrolled by this and keeps its certificate: no run counts it in yet.
    """
    async with _joining(options, told) as joining:
        return await joining.look()


@contextlib.asynccontextmanager
async def _joining(options: JoinOptions, told: Say) -> AsyncIterator[_Joining]:
    for path in options.data:
        if not path.exists() and not any(c in str(path) for c in "*?["):
            raise DataError(f"{path} does not exist; check the path given with --data")
    options.state_dir.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(options.state_dir)
    files, compute = ThreadExecutor(2, "files"), ThreadExecutor(1, "compute")
    try:
        joining = _Joining(options, files, compute, told)
        try:
            yield joining
        finally:
            await joining.close()
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
        self._process = secrets.token_hex(8)
        self._leaving = asyncio.Event()
        self._receipts: ReceiptLog | None = None
        self._profile: DeviceProfile | None = None
        self._terms = Terms(options.state_dir, Machine(), hours=options.hours, only_when=options.only_when)
        self._pacer = Pacer(self.clock, Limits(up=options.max_upload_bytes_per_s))

    async def work(self, on_start: Callable[[Leaving], None]) -> str:
        await self._enter()
        if self._identity.role == "operator":
            return f"this machine may operate the run; ask it with: potluck status {self.options.state_dir}"
        on_start(self)
        return await self._work()

    async def close(self) -> None:
        """List what was counted of what left, and close the receipts. ResourceError if the disk is full."""
        if self._receipts is not None:
            try:
                await self._gate.close()
            finally:
                self._receipts.close()

    async def look(self) -> Prospect:
        """Ask what the run is, as one who does not join it."""
        options = self.options
        await self._enter()
        connection = GrpcConnection(self._identity.address, self._identity)
        try:
            request = pb.WelcomeRequest(version=version(), is_look=True)
            spec = read_welcome(await connection.call("Welcome", request.SerializeToString()))
        except ConnectionLost as lost:
            raise CoordinatorUnreachable(f"no coordinator answers ({lost}); check that `potluck host` runs") from lost
        finally:
            await connection.close()
        objections = await self._gate.objections(spec)
        if spec.strategy_digest and spec.strategy_digest not in (digest for _, digest in self._strategies):
            objections.append(f"the run uses {spec.strategy}; read it and allow your copy of it with --allow-strategy")
        return await self.compute.run(
            lambda: prospect(
                spec, self._gate.tasks_of(spec), policy=self._gate.policy, device=self._device,
                max_memory_bytes=options.max_memory_bytes, data=options.data, objections=objections,
            )
        )  # fmt: skip

    async def _enter(self) -> None:
        """Read the owner's policy, then be known to the coordinator."""
        options = self.options
        policy = await self.files.run(load_policy, options.policy) if options.policy is not None else None
        allowed = await self.files.run(_allowed, options.allow_strategies, policy)
        self._strategies = tuple((name, digest) for name, digest, _ in allowed)
        self._receipts = await self.files.run(ReceiptLog, options.state_dir / RECEIPTS)
        modules = {digest: module for _, digest, module in allowed}
        folders = {options.state_dir.absolute(): "STATE", Path(os.path.expanduser("~")): "~"}
        self._gate = Gate(
            clock=self.clock, files=self.files, policy=policy, receipts=self._receipts, modules=modules,
            hidden={path: name for path, name in folders.items() if path != path.parent},
        )  # fmt: skip
        self._device = str(await self.files.run(choose_device, options.device))
        own_name = socket.gethostname() if self._gate.policy.tells("host_name") else "worker"
        self._identity = await enter(
            options.link, name=options.name or own_name, folder=self._folder, executor=self.files,
            now=self.clock.time(), asking=self._gate.introduce,
        )  # fmt: skip

    async def _work(self) -> str:
        is_back = False
        while True:
            await self._wait_for_terms()
            if self._profile is None and not self._leaving.is_set():  # on the owner's terms only
                self._profile = await self._measured()
            if self._profile is None or self._leaving.is_set():
                return "left"
            if is_back:  # the model of the time before goes before there is another
                gc.unfreeze()
                gc.collect()
            agent = self._agent(self._profile)
            if await self._shift(agent):
                return agent.ended or "left"
            del agent
            is_back = True

    def leave(self) -> None:
        """Go in good order: with a word to the coordinator once there is work, at once before that."""
        self._leaving.set()

    async def _wait_for_terms(self) -> None:
        """Until the worker may work, or leaves. Says why not, and again where that becomes another thing."""
        said = ""
        while not self._leaving.is_set() and (stop := await self._look()) is not None:
            if (reason := stop.reason.translate(_no_digits)) != said:
                self.say(stop.reason)
            said = reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._leaving.wait()

    async def _look(self) -> Stop | None:
        """Why the worker may not work now."""
        now, wall = self.clock.now(), self.clock.time()
        return await self.files.run(lambda: self._terms.stop(now=now, wall=wall))

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
            connection = GrpcConnection(self._identity.address, self._identity)
            if not options.max_upload_bytes_per_s:
                return connection
            return PacedConnection(connection, self._pacer, self._identity.worker_id)

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            runner = await equip(
                spec, link, folder=options.state_dir, device=self._device, clock=self.clock, compute=self.compute,
                files=self.files, note=agent.note, told=self.say, data=options.data,
                num_threads=options.num_threads or None,
                max_memory_bytes=options.max_memory_bytes, piece_memory_bytes=profile.free_memory_bytes,
                share_dir=options.share_dir, base_share_dir=options.base_share_dir, gate=self._gate,
            )  # fmt: skip
            gc.freeze()  # what imports made is no garbage: to look through it again would hold the event loop up
            return runner

        agent = Agent(
            Introduction(
                id=self._identity.worker_id, profile=profile, strategies=self._strategies, process=self._process
            ),
            connect=connect, equip=equipped, clock=self.clock, told=self.say, gate=self._gate,
        )  # fmt: skip
        return agent

    async def _shift(self, agent: Agent) -> bool:
        """Work until the end of the run or of the owner's terms; whether it is over for good."""
        serving = asyncio.create_task(agent.work())
        renewing, minding = (asyncio.create_task(c) for c in (self._renew_in_time(agent), self._mind(agent)))
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([serving, minding, leaving], return_when=asyncio.FIRST_COMPLETED)
            is_over = serving.done() or self._leaving.is_set()
            if minding.done():
                minding.result()
            if not serving.done():
                await self._take_leave(agent, serving)
            if not serving.cancelled():
                serving.result()
            return is_over
        finally:
            tasks = (serving, renewing, minding, leaving)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_leave(self, agent: Agent, serving: asyncio.Task[None]) -> None:
        """End `serving`: in good order if there is someone to tell."""
        if agent.runner is not None:
            agent.leave()
            await asyncio.wait([serving], timeout=leave_patience_s)
        serving.cancel()
        await asyncio.wait([serving])

    async def _mind(self, agent: Agent) -> None:
        """Hold the worker while the owner's terms are not met; returns when it is to hand its work back."""
        held_at: float | None = None
        while True:
            stop, now = await self._look(), self.clock.now()
            if stop is None:
                if held_at is not None:
                    self.say("going on")
                    agent.release()
                held_at = None
            else:
                if held_at is None:
                    self.say(f"{stop.reason}; stopping after the step under way")
                    held_at = now
                agent.hold()  # again: it may have got ready for its work meanwhile
                if now - held_at >= stop.keep_s:
                    self.say("handing the work back until it may go on")
                    return
            await self.clock.sleep(look_s)

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


def _allowed(files: tuple[Path, ...], policy: Policy | None) -> list[tuple[str, str, Any]]:
    """Load the strategy files that the owner allows: the name and digest of each, which go to the coordinator, and
    what it defines. OwnerRefused for one that the policy does not allow, before any of it runs.
    """
    found: list[tuple[str, str, Any]] = []
    for path in files:
        digest = digest_file(path) if path.is_file() else ""
        if digest and policy is not None and not policy.allows_strategy(digest):
            raise OwnerRefused(
                f"{path} is {digest}, which is not among the policy's strategies; add it, or leave it out"
            )
        found.append((path.name, digest, load_file(path)))
    return found


def _later(loop: asyncio.AbstractEventLoop, say: Say, text: str) -> None:
    """From any thread."""
    loop.call_soon_threadsafe(say, text)
