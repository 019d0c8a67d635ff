"""What a coordinator tells its workers, stream by stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

from potluck.clock import InlineExecutor, Lanes, VirtualClock, run_virtual
from potluck.coordinator.core import Coordinator
from potluck.coordinator.service import CoordinatorService
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.transport.connection import Peer
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile

peer = Peer(id=WorkerId("w1"))


class Stream:
    """A channel that stays open and silent and keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[pb.Desired] = []

    async def send(self, message: bytes) -> None:
        self.sent.append(pb.Desired.FromString(message))

    async def receive(self) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def close(self) -> None:
        pass


def test_a_second_stream_is_told_the_situation_though_the_first_one_still_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        problem, objects = Problem(), ObjectStore(tmp_path / "objects")
        run = await Coordinator.open(
            problem.plan(DiLoCo(DiLoCoConfig())), tmp_path, deck=problem.make_deck(objects), objects=objects,
            clock=VirtualClock(), lanes=Lanes.one(InlineExecutor()), on_event=lambda _: None,
        )  # fmt: skip
        await run.recover()
        run.roster.arrive(peer.id, DeviceProfile(device="cpu"), 0.0)
        service, old, new = CoordinatorService(run), Stream(), Stream()
        first = asyncio.create_task(service.open(peer, "Control", old))
        await asyncio.sleep(0.1)
        assert len(old.sent) == 1
        second = asyncio.create_task(service.open(peer, "Control", new))
        await asyncio.sleep(0.1)
        assert len(old.sent) == 1
        assert len(new.sent) == 1
        assert run.roster.members[peer.id].connected
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await run.close()

    run_virtual(main())
