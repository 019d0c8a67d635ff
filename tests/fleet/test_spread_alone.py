"""The spreader by itself: what a reply costs in a large fleet, and replies that come while one is judged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.codecs.bundle import pack_tensors
from potluck.fleet import spread
from potluck.fleet.config import FleetConfig
from potluck.fleet.roster import Roster
from potluck.fleet.spread import Lane, Spreader
from potluck.strategies.bag import Piece
from potluck.strategies.fleet import WorkerInfo
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile


class Taken:
    """Gives everybody pieces at once, and is done when all came back."""

    needs_devices = True

    def __init__(self, per_worker: int) -> None:
        self.per_worker, self.left = per_worker, -1
        self.taken: list[tuple[WorkerId, float]] = []
        self.doomed: list[Piece] = []

    @property
    def is_done(self) -> bool:
        return self.left == 0

    def issue(self, here: Sequence[WorkerInfo], now: float) -> list[tuple[WorkerId, Piece]]:
        if self.left >= 0:
            return []
        self.left = self.per_worker * len(here)
        return [(w.id, Piece(task="x", operands={})) for w in here for _ in range(self.per_worker)]

    def look_at(self) -> float:
        return 1e9

    def take(self, worker: WorkerId, piece: Piece, reply: Mapping[str, Tensor], now: float) -> None:
        self.taken.append((worker, now))
        self.left -= 1

    def lose(self, worker: WorkerId, piece: Piece, reason: str, now: float) -> None:
        raise AssertionError(reason)

    def dropped(self) -> list[Piece]:
        doomed, self.doomed = self.doomed, []
        self.left -= len(doomed)
        return doomed


def reply(lane: Lane, id: int) -> tuple[dict[str, Any], memoryview]:
    bundle = pack_tensors({"c": torch.ones(2, 2)})
    head = {"piece": id, "offset": 0, "total": len(bundle), "seconds": 0.1, "down": [0, 0.0]}
    return head, memoryview(bundle)


def worker(roster: Roster, number: int, clock: VirtualClock) -> Any:
    member = roster.arrive(WorkerId(f"w{number:04d}"), DeviceProfile(device="cpu"), clock.now())
    roster.connect(member, clock.now())
    return member


async def answer(spreader: Spreader, lane: Lane, id: int) -> None:
    await spreader.read(lane, spreader.joiner(lane), *reply(lane, id))


def test_what_a_reply_costs_does_not_grow_with_the_fleet() -> None:
    looks: dict[int, int] = {}

    async def script(num_workers: int) -> None:
        clock, roster = VirtualClock(), Roster(FleetConfig())
        spreader, bag, count = Spreader(roster, clock, InlineExecutor()), Taken(4), 0
        why_lost = spreader._why_lost  # pyright: ignore[reportPrivateUsage]

        def counted(lane: Lane, now: float) -> str:
            nonlocal count
            count += 1
            return why_lost(lane, now)

        spreader._why_lost = counted  # pyright: ignore[reportPrivateUsage]
        members = [worker(roster, i, clock) for i in range(num_workers)]
        streams = [spreader.stream(member) for member in members]
        lanes = [stream.__enter__() for stream in streams]
        spreading = asyncio.ensure_future(spreader.spread(bag, scope="1"))
        judging = asyncio.ensure_future(spreader.judge(lanes[0]))
        while not all(lane.flights for lane in lanes):
            await asyncio.sleep(0)
        await clock.sleep(0.1)
        count = 0
        for id in list(lanes[0].flights):
            await answer(spreader, lanes[0], id)
            await clock.sleep(0.01)
        assert len(bag.taken) == 4
        looks[num_workers] = count
        bag.doomed = [flight.piece for lane in lanes for flight in lane.flights.values()]
        spreader._wake_all()  # pyright: ignore[reportPrivateUsage]
        await spreading
        judging.cancel()
        for stream in streams:
            stream.__exit__(None, None, None)

    for number in (2, 200):
        run_virtual(script(number))
    assert looks[200] == looks[2]


def test_replies_are_read_while_one_is_judged_and_a_second_one_for_a_piece_is_not() -> None:
    async def script() -> None:
        clock, roster = VirtualClock(), Roster(FleetConfig())
        spreader, bag = Spreader(roster, clock, InlineExecutor(lambda _: 1.0)), Taken(2)  # a check takes a second
        with spreader.stream(worker(roster, 1, clock)) as lane:
            spreading = asyncio.ensure_future(spreader.spread(bag, scope="1"))
            judging = asyncio.ensure_future(spreader.judge(lane))
            while not lane.flights:
                await asyncio.sleep(0)
            first, second = lane.flights
            began = clock.now()
            for at, id in ((0.0, first), (0.1, second), (0.2, first), (0.3, second), (0.4, second)):
                await clock.sleep(began + at - clock.now())
                await answer(spreader, lane, id)
            assert clock.now() - began < 0.5 and not bag.taken  # none has waited for a check
            assert len(lane.replies) == 2  # one of each
            await spreading
            judging.cancel()
        assert [round(at - began, 6) for _, at in bag.taken] == [0.0, 0.1]  # as they came, however long checks take

    run_virtual(script())


def test_replies_that_wait_for_their_check_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there is room for is held, and the stream is read no further until one was judged."""
    monkeypatch.setattr(spread, "most_unjudged_bytes", 1)

    async def script() -> None:
        clock, roster = VirtualClock(), Roster(FleetConfig())
        spreader, bag = Spreader(roster, clock, InlineExecutor(lambda _: 1.0)), Taken(3)
        with spreader.stream(worker(roster, 1, clock)) as lane:
            spreading = asyncio.ensure_future(spreader.spread(bag, scope="1"))
            judging = asyncio.ensure_future(spreader.judge(lane))
            while not lane.flights:
                await asyncio.sleep(0)
            began = clock.now()
            for id in list(lane.flights):
                await answer(spreader, lane, id)
                assert len(lane.replies) <= 1
            assert clock.now() - began >= 2.0
            await spreading
            judging.cancel()
        assert len(bag.taken) == 3

    run_virtual(script())


def test_a_stream_that_ends_gives_the_room_of_its_replies_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "most_unjudged_bytes", 1)

    async def script() -> None:
        clock, roster = VirtualClock(), Roster(FleetConfig())
        spreader, bag = Spreader(roster, clock, InlineExecutor()), Taken(1)
        other = spreader.stream(worker(roster, 2, clock))
        with other as stays:
            with spreader.stream(worker(roster, 1, clock)) as gone:
                spreading = asyncio.ensure_future(spreader.spread(bag, scope="1"))
                while not (gone.flights and stays.flights):
                    await asyncio.sleep(0)
                first = asyncio.ensure_future(answer(spreader, gone, next(iter(gone.flights))))
                second = asyncio.ensure_future(answer(spreader, stays, next(iter(stays.flights))))
                await clock.sleep(0.1)
                assert not first.done() and not second.done()
                spreading.cancel()
            judging = asyncio.ensure_future(spreader.judge(stays))
            await second
            judging.cancel()
            first.cancel()

    run_virtual(script())
