"""Joining a run from this machine: identity, device, data, and the agent that does the rest."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from potluck.clock import Clock, SystemClock, ThreadExecutor
from potluck.models.device import choose_device, describe
from potluck.storage.digest import digest_file
from potluck.storage.files import FolderLock
from potluck.strategies.registry import load_file
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Connection
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.security.enrol import obtain
from potluck.transport.security.identity import Identity, apply_renewal, renewal_request
from potluck.transport.security.link import read_link
from potluck.types.errors import ConnectionLost, DataError
from potluck.worker.agent import Agent, Introduction
from potluck.worker.equip import equip
from potluck.worker.link import Link
from potluck.worker.options import JoinOptions, Leaving
from potluck.worker.runner import Runner

Say = Callable[[str], None]
renewal_check_s = 3600.0


async def join(options: JoinOptions, *, on_line: Say, on_start: Callable[[Leaving], None] = lambda _: None) -> str:
    """Work for a run until it ends or this machine leaves; why it ended. PotluckError with what is wrong."""
    for path in options.data:
        if not path.exists() and not any(c in str(path) for c in "*?["):
            raise DataError(f"{path} does not exist; check the path given with --data")
    options.state_dir.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(options.state_dir)
    files, compute = ThreadExecutor(2, "files"), ThreadExecutor(1, "compute")
    try:
        return await _Joining(options, files, compute, on_line).work(on_start)
    finally:
        files.close()
        compute.close()
        lock.release()


class _Joining:
    """One call of `join`."""

    def __init__(self, options: JoinOptions, files: ThreadExecutor, compute: ThreadExecutor, say: Say) -> None:
        self.options, self.files, self.compute, self.say = options, files, compute, say
        self.clock: Clock = SystemClock()
        self._folder = options.state_dir / "identity"

    async def work(self, on_start: Callable[[Leaving], None]) -> str:
        options = self.options
        device = await self.files.run(choose_device, options.device)
        profile = await self.files.run(lambda: describe(device, options.num_threads or None))
        strategies = await self.files.run(_allowed, options.allow_strategies)
        identity = await obtain(
            read_link(options.link), name=options.name or socket.gethostname(), folder=self._folder,
            executor=self.files, now=self.clock.time(),
        )  # fmt: skip
        agent: Agent

        async def connect() -> Connection:
            nonlocal identity
            identity = await self._renewed(identity)
            return GrpcConnection(identity.address, identity)

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            return await equip(
                spec, link, folder=options.state_dir, device=str(device), clock=self.clock, compute=self.compute,
                files=self.files, note=agent.note, data=options.data, num_threads=options.num_threads or None,
                max_memory_bytes=options.max_memory_bytes,
            )  # fmt: skip

        agent = Agent(
            Introduction(id=identity.worker_id, profile=profile, strategies=strategies), connect=connect,
            equip=equipped, clock=self.clock, executor=self.files, told=self.say,
        )  # fmt: skip
        async def renew_in_time() -> None:
            nonlocal identity
            while True:
                await self.clock.sleep(renewal_check_s)
                before, identity = identity, await self._renewed(identity)
                if identity is not before:
                    agent.reconnect()  # with the new certificate

        on_start(agent)
        renewing = asyncio.create_task(renew_in_time())
        try:
            await agent.work()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        return agent.ended or "left"

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
