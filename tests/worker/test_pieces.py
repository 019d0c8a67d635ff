"""Pieces on a device: within its owner's memory, one after the other, and nothing of a stream that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from torch import Tensor

from potluck.clock import InlineExecutor, SystemClock
from potluck.codecs.bundle import pack_tensors, tensors_in
from potluck.protocol.frames import unpack_data
from potluck.strategies.task import Result, task
from potluck.transport.pieces import PieceJoiner, PieceReply, PieceRequest, piece_frames, withdraw_frame
from potluck.worker.pieces import Pieces, least_limit_bytes


@task("pieces.double", kind="pure")
def double(_: object, *, a: Tensor) -> Result:
    return Result({}, inline={"c": 2 * a})


@task("pieces.fails", kind="pure")
def fails(_: object, *, a: Tensor) -> Result:
    raise ValueError("cannot")


class Device:
    """A device and the head's end of its stream."""

    def __init__(self, limit_bytes: int = least_limit_bytes) -> None:
        self.notes: list[str] = []
        self.pieces = Pieces(
            compute=InlineExecutor(), clock=SystemClock(), limit_bytes=limit_bytes, note=self.notes.append
        )
        self.replies: dict[int, PieceReply] = {}
        self.heads: list[dict[str, object]] = []
        self._joiner = PieceJoiner(lambda _: 1 << 30, lambda: 0.0)

    async def _sent(self, frame: bytes) -> None:
        head, data = unpack_data(frame)
        if "piece" not in head:
            self.heads.append(head)
        elif (done := self._joiner.add(head, data)) is not None:
            self.replies[done.id] = PieceReply.read(done)

    async def play(self, script: Callable[[], Awaitable[None]]) -> None:
        serving = [asyncio.ensure_future(c) for c in self.pieces.serve(self._sent)]
        try:
            async with asyncio.timeout(10):
                await script()
        finally:
            for each in serving:
                each.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def give(self, id: int, values: Tensor | None, *, name: str = "", task: str = "pieces.double") -> None:
        bundle = bytearray() if values is None else pack_tensors({"a/values": values})
        kept = frozenset({"a"}) if values is None else frozenset[str]()
        request = PieceRequest(
            id=id, task=task, arguments={}, operands={"a": name}, kept=kept, bundle=bundle,
            memory_bytes=0 if values is None else 2 * values.nbytes,
        )  # fmt: skip
        for frame in piece_frames(request):
            await self.pieces.take(*unpack_data(frame))

    async def reply(self, id: int) -> PieceReply:
        while id not in self.replies:
            await asyncio.sleep(0.001)
        return self.replies.pop(id)


def play(device: Device, script: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(device.play(script))


def values(kilobytes: int = 1) -> Tensor:
    return torch.arange(kilobytes * 256.0).reshape(-1, 16)


def test_a_shard_is_kept_by_its_name() -> None:
    device = Device()

    async def script() -> None:
        await device.give(1, values(), name="w@1")
        assert torch.equal(tensors_in(bytearray((await device.reply(1)).bundle))["c"], 2 * values())
        await device.give(2, None, name="w@1")
        assert torch.equal(tensors_in(bytearray((await device.reply(2)).bundle))["c"], 2 * values())
        await device.give(3, None, name="w@2")
        assert (await device.reply(3)).missing == ("a",)

    play(device, script)


def test_kept_shards_make_room() -> None:
    device = Device()

    async def script() -> None:
        for id in range(8):  # 8 shards of 256 kB within 1 MB
            await device.give(id, values(256), name=f"w{id}@1")
            await device.reply(id)
            assert device.pieces.room.shard_bytes <= least_limit_bytes
        await device.give(8, None, name="w0@1")
        assert (await device.reply(8)).missing == ("a",)
        await device.give(9, None, name="w7@1")
        assert not (await device.reply(9)).missing

    play(device, script)


def test_what_stays_is_given_up_after_what_passes() -> None:
    device = Device()

    async def script() -> None:
        await device.give(0, values(256), name="stays:w@1")
        await device.reply(0)
        for id in range(1, 6):
            await device.give(id, values(256), name=f"x{id}@1")
            await device.reply(id)
        await device.give(6, None, name="x1@1")
        assert (await device.reply(6)).missing == ("a",)
        await device.give(7, None, name="stays:w@1")
        assert not (await device.reply(7)).missing
        for id in range(8, 12):  # nothing that passes is left to give up
            await device.give(id, values(256), name=f"stays:w{id}@1")
            await device.reply(id)
            assert device.pieces.room.shard_bytes <= least_limit_bytes
        await device.give(12, None, name="stays:w8@1")
        assert (await device.reply(12)).missing == ("a",)

    play(device, script)


def test_a_piece_beyond_the_limit_is_refused_and_the_stream_goes_on() -> None:
    device = Device()

    async def script() -> None:
        await device.give(1, values(2048))
        assert "see --max-memory" in (await device.reply(1)).error
        await device.give(2, values(4))
        assert not (await device.reply(2)).error

    play(device, script)


def test_the_stream_waits_while_there_is_no_room() -> None:
    device = Device()

    async def script() -> None:
        for id in range(6):  # 6 of 300 kB within 1 MB
            await device.give(id, values(300))
            assert device.pieces.room.taken_bytes <= least_limit_bytes
        for id in range(6):
            await device.reply(id)

    play(device, script)


@pytest.mark.parametrize(("name", "said"), [("pieces.fails", "ValueError: cannot"), ("no.such", "no pure task named")])
def test_a_piece_that_fails_costs_that_piece(name: str, said: str) -> None:
    device = Device()

    async def script() -> None:
        await device.give(1, values(), task=name)
        assert said in (await device.reply(1)).error
        await device.give(2, values())
        assert not (await device.reply(2)).error

    play(device, script)
    assert said in device.notes[0]


def test_its_owner_needs_the_machine() -> None:
    device = Device()

    async def script() -> None:
        device.pieces.hold()
        await device.give(1, values())
        assert (await device.reply(1)).declined
        device.pieces.release()
        await device.give(2, values())
        assert not (await device.reply(2)).error

    play(device, script)
    assert device.heads[0] == {"resting": True}
    assert device.heads[-1] == {"resting": False}


def test_what_was_withdrawn_is_not_done() -> None:
    device = Device()

    async def script() -> None:
        frames = list(piece_frames(PieceRequest(
            id=1, task="pieces.double", arguments={}, operands={"a": ""}, kept=frozenset(),
            bundle=pack_tensors({"a/values": values(300)}),
        )))  # fmt: skip
        await device.pieces.take(*unpack_data(frames[0]))
        await device.pieces.take(*unpack_data(withdraw_frame([1])))
        await device.give(2, values())
        await device.reply(2)
        assert device.pieces.num_done == 1

    play(device, script)
