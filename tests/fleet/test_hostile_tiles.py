# pyright: reportPrivateUsage=false
"""Hostile devices and a hostile coordinator of `sub_gemm`: what they send costs them, and nobody else."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from potluck.clock import InlineExecutor, SystemClock, VirtualClock, run_virtual
from potluck.codecs.bundle import pack_tensors, unpack_tensors
from potluck.contract import checks
from potluck.fleet import spread
from potluck.fleet.config import FleetConfig
from potluck.fleet.roster import Roster
from potluck.fleet.spread import Flight, Play, Spreader
from potluck.optim.inner import InnerConfig
from potluck.planner.link import LinkMeter
from potluck.protocol.frames import pack_data, unpack_data
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.bag import Piece
from potluck.strategies.sub_gemm.strategy import SubGEMM, SubGEMMConfig
from potluck.transport.memory import Link
from potluck.transport.pieces import PieceReply, PieceRequest, piece_frames, resting_frame
from potluck.types.errors import ConnectionLost, CorruptError, NotFinite, Refused, RoundFailed, RunStopped
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile
from potluck.worker.pieces import Pieces

Frames = Iterable[bytes]
Attack = Callable[[PieceReply], Frames]


def first_frame(reply: PieceReply, **others: Any) -> Frames:
    head = {"piece": reply.id, "offset": 0, "total": len(reply.bundle), **reply.head(), **others}
    yield pack_data(head, bytes(reply.bundle))


def says(**others: Any) -> Attack:
    return lambda reply: first_frame(reply, **others)


def down(seconds: float) -> Attack:
    return says(down=[1 << 39, seconds])


def bundle(**tensors: torch.Tensor) -> Attack:
    def attack(reply: PieceReply) -> Frames:
        return piece_frames(replace(reply, bundle=pack_tensors(tensors), missing=(), error=""))

    return attack


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    def attack(reply: PieceReply) -> Frames:
        if not reply.bundle:
            return piece_frames(reply)
        c = unpack_tensors(bytes(reply.bundle))["c"]
        return piece_frames(replace(reply, bundle=pack_tensors({"c": change(c)})))

    return attack


def twice(reply: PieceReply) -> Frames:
    return [*piece_frames(reply), *piece_frames(reply)]


def others(reply: PieceReply) -> Frames:
    return [f for id in range(reply.id - 3, reply.id + 4) for f in piece_frames(replace(reply, id=id))]


def missing(reply: PieceReply) -> Frames:
    return piece_frames(PieceReply(id=reply.id, missing=("a", "b")))


def claims(total: int) -> Attack:
    def attack(reply: PieceReply) -> Frames:
        yield pack_data({"piece": reply.id, "offset": 0, "total": total, "seconds": 0.1, "down": [0, 0.0]}, b"x" * 1000)

    return attack


def raw(**head: Any) -> Attack:
    return lambda reply: [pack_data({k: (reply.id if v == "ID" else v) for k, v in head.items()}, b"")]


def huge_shape(reply: PieceReply) -> Frames:
    rows = [["c", "float32", [0, 1 << 48, 1], "raw", [[0, 0]]]]
    from potluck.codecs.header import MAGIC, PREFIX, aligned

    text = json.dumps({"tensors": rows}).encode()
    text = text.ljust(aligned(PREFIX.size + len(text)) - PREFIX.size)
    return piece_frames(replace(reply, bundle=PREFIX.pack(MAGIC, len(text)) + text, missing=(), error=""))


attacks: dict[str, Attack] = {
    "down-denormal": down(5e-324), "down-tiny": down(1e-300), "down-slow": says(down=[65536, 9.9e5]),
    "seconds-999999": says(seconds=999999.0),
    "other-name": lambda r: bundle(d=torch.zeros(3))(r), "no-dims": bundle(c=torch.tensor(1.0)),
    "half": changed(lambda c: c.half()), "nan": changed(lambda c: c * torch.nan), "zeros": changed(lambda c: c * 0),
    "garbage": lambda r: piece_frames(replace(r, bundle=b"\xff" * 4096, missing=(), error="")),
    "huge-shape": huge_shape, "twice": twice, "others": others, "missing": missing,
    "declines": raw(piece="ID", offset=0, total=0, error="no", declined=True),
    "fails": raw(piece="ID", offset=0, total=0, error="no\x1b[2J\n" * 9000, declined=False),
    "claims-2GB": claims(1 << 31), "down-nan": says(down=[1 << 20, float("nan")]),
    "deep": lambda r: [pack_data({"piece": json.loads("[" * 900 + "]" * 900)}, b"")],
}  # fmt: skip
ends_itself = {"fails", "claims-2GB", "down-nan", "deep"}


def run(**options: Any) -> checks.Outcome:
    config = SubGEMMConfig(head_computes=False, least_side=4)
    return checks.run(Problem(num_rounds=2, validate=False), lambda: SubGEMM(config), **options)


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Losses where every device is honest."""
    return run(num_workers=3, min_workers=2).round_losses


@pytest.mark.parametrize("name", list(attacks))
def test_a_hostile_device_costs_nobody_else(name: str, plain: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    attack, seen, num_sent = attacks[name], list[Pieces](), 0
    send = Pieces.send

    async def evil(pieces: Pieces, to: Callable[[bytes], Awaitable[None]]) -> None:
        nonlocal num_sent
        seen.append(pieces)
        if pieces is not seen[0]:
            return await send(pieces, to)
        while True:
            pieces._to_send.clear()
            while pieces._replies:
                num_sent += 1
                for frame in attack(pieces._replies.popleft()):
                    await to(frame)
                pieces._changed.set()
            await pieces._to_send.wait()

    monkeypatch.setattr(Pieces, "send", evil)
    try:
        got = run(num_workers=3, min_workers=2)
    except Refused:  # it ended the device that sent it, and nobody else
        assert name in ends_itself
        return
    assert num_sent, "the attack never took place"
    assert got.round_losses == pytest.approx(plain, abs=1e-5)


Send = Callable[[bytes], Awaitable[None]]


async def toggles(pieces: Pieces, to: Send) -> None:
    while True:
        await to(resting_frame(True))
        await to(resting_frame(False))
        await asyncio.sleep(0.01)


async def answers(pieces: Pieces, to: Send, frames: Callable[[PieceReply], Frames], pause_s: float = 0.0) -> None:
    while True:
        pieces._to_send.clear()
        while pieces._replies:
            for frame in frames(pieces._replies.popleft()):
                await to(frame)
                await asyncio.sleep(pause_s)
            pieces._changed.set()
        await pieces._to_send.wait()


async def declines(pieces: Pieces, to: Send) -> None:
    await answers(pieces, to, lambda reply: piece_frames(PieceReply(id=reply.id, error="no", declined=True)))


async def keeps_back(pieces: Pieces, to: Send) -> None:
    turns = itertools.cycle((True, True, True, False))
    await answers(pieces, to, lambda reply: piece_frames(reply) if next(turns) else ())


async def drips(pieces: Pieces, to: Send) -> None:
    def frames(reply: PieceReply) -> Frames:
        head = reply.head()
        for offset in range(len(reply.bundle)):
            byte = bytes(reply.bundle[offset : offset + 1])
            yield pack_data({"piece": reply.id, "offset": offset, "total": len(reply.bundle), **head}, byte)
            head = {}

    await answers(pieces, to, frames, pause_s=0.1)


def rounds_with(
    attack: Callable[[Pieces, Send], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[str]]:
    """Seconds of the third round and on where the first device does that, and what people were told."""
    send, seen = Pieces.send, list[Pieces]()

    async def evil(pieces: Pieces, to: Send) -> None:
        seen.append(pieces)
        await (attack if pieces is seen[0] else send)(pieces, to)

    monkeypatch.setattr(Pieces, "send", evil)
    config = SubGEMMConfig(head_computes=False, least_side=4)
    got = checks.run(Problem(num_rounds=5, validate=False), lambda: SubGEMM(config), num_workers=3, min_workers=2)
    ends = [at for at, text in got.trace if text.startswith("round ")]
    assert got.state.round == 5
    return ends[-1] - ends[1], [text for _, text in got.trace]


@pytest.fixture(scope="module")
def plain_s() -> float:
    with pytest.MonkeyPatch.context() as nothing:
        return rounds_with(Pieces.send, nothing)[0]


@pytest.mark.parametrize("attack", [toggles, declines, keeps_back])
def test_who_takes_pieces_and_gives_none_costs_ever_less(
    attack: Callable[[Pieces, Send], Awaitable[None]], plain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s, told = rounds_with(attack, monkeypatch)
    assert took_s < 1.25 * plain_s
    assert any("gets no piece for" in text or "gets none for" in text for text in told)


def test_a_drip_of_bytes_ends_who_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="no more than 1 bytes"):
        rounds_with(drips, monkeypatch)


async def lies_and_hangs_up(pieces: Pieces, to: Send) -> None:
    while not pieces._replies:
        pieces._to_send.clear()
        await pieces._to_send.wait()
    for frame in changed(lambda c: c + 1)(pieces._replies.popleft()):
        await to(frame)
    raise ConnectionLost("it hangs up, and dials again")


def test_nobody_takes_a_wrong_tile_back_by_hanging_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a tile takes a while, and the stream has ended before it is over."""
    send, seen = Pieces.send, list[Pieces]()

    async def evil(pieces: Pieces, to: Send) -> None:
        seen.append(pieces)
        await (lies_and_hangs_up if pieces is seen[0] else send)(pieces, to)

    monkeypatch.setattr(Pieces, "send", evil)
    problem = Problem(num_rounds=2, validate=False, fleet=FleetConfig(min_workers=2))

    def slow_checks() -> InlineExecutor:
        return InlineExecutor(lambda fn: 0.02 if fn is spread._take else 0.0)

    async def play() -> World:
        strategy = SubGEMM(SubGEMMConfig(head_computes=False, least_side=4))
        world = World(
            problem.plan(strategy), problem.make_deck, tmp_path, clock=VirtualClock(), make_executor=slow_checks
        )
        for name in ("w1", "w2"):
            world.add(name, link=Link(up_bytes_per_s=2e5, down_bytes_per_s=1e6, rtt_s=0.005), cost_s=checks.cost_s)
        await world.clock.sleep(1.0)
        await world.start()
        await world.finish()
        return world

    world = run_virtual(play())
    assert world.last is not None
    honest, liar = sorted(m.num_quarantines for m in world.last.roster.members.values())
    assert (honest, liar > 0) == (0, True)


async def rounds(world: World, number: int) -> None:
    while sum(event.kind == "round" for event in world.events) < number:
        await world.clock.sleep(0.01)


@pytest.mark.parametrize("rest_s", [60.0, 7200.0])
def test_the_only_device_rests(rest_s: float) -> None:
    """Its owner needs the machine, as `--hours` and `pause` do: the run waits as long, and no work is lost."""
    phases: list[str] = []

    async def disturb(world: World) -> None:
        await rounds(world, 1)
        agent = world.hosts[WorkerId("w1")].agent
        assert agent is not None and agent.runner is not None and agent.runner.pieces is not None
        num_done = agent.runner.pieces.num_done
        while agent.runner.pieces.num_done < num_done + 3:  # in the middle of a step
            await world.clock.sleep(0.001)
        agent.hold()
        await world.clock.sleep(rest_s)
        assert world.run is not None
        phases.append(world.run.fleet.phase)
        agent.release()

    got = run(num_workers=1, min_workers=1, disturb=disturb)
    assert got.state.round == 2
    assert phases == ["waiting for a device that can take a piece; w1 rests"]
    assert not any("discarded" in text for _, text in got.trace)
    assert sum("waiting for a device" in text for _, text in got.trace) == 1


def whole(**others: Any) -> dict[str, Any]:
    return {"piece": 1, "offset": 0, "total": 0, **others}


malformed: dict[str, dict[str, Any]] = {
    "nothing": {}, "no-offset": {"piece": 1, "total": 0}, "list-for-number": {**whole(), "piece": [1]},
    "text-for-total": {**whole(), "total": "8"}, "negative": {**whole(), "offset": -1, "total": -1},
    "neither": whole(), "missing-nothing": whole(missing=[]), "missing-lists": whole(missing=[[1]]),
    "error-list": whole(error=["no"], declined=False), "declined-text": whole(error="no", declined="yes"),
    "seconds-text": {**whole(seconds="1", down=[0, 0.0]), "total": 64},
    "seconds-huge": {**whole(seconds=10**400, down=[0, 0.0]), "total": 64},
    "down-short": {**whole(seconds=1, down=[0]), "total": 64},
    "down-infinite": {**whole(seconds=1, down=[0, math.inf]), "total": 64},
    "too-large": {**whole(seconds=1, down=[0, 0.0]), "total": 1 << 40},
}  # fmt: skip


@pytest.mark.parametrize("name", list(malformed))
def test_a_malformed_reply_is_one_kind_of_error_and_counts_against_its_worker(name: str) -> None:
    head = malformed[name]
    data = memoryview(bytes(64)) if head.get("total") == 64 else memoryview(b"")
    clock, roster, told = VirtualClock(), Roster(FleetConfig()), list[str]()
    spreader = Spreader(roster, clock, InlineExecutor())
    spreader.refused = lambda _, reason: told.append(reason)

    async def script() -> None:
        member = roster.arrive(WorkerId("w1"), DeviceProfile(device="cpu"), clock.now())
        for number in range(1, 4):  # as often as it comes back
            with spreader.stream(member) as lane:
                play = Play(cast(Any, None), "1")
                lane.flights[1] = Flight(1, Piece(task="x", operands={}), play, lane)
                with pytest.raises(Refused):
                    await spreader.read(lane, spreader.joiner(lane), head, data)
            assert member.strikes == number
        assert "3 refused results in a row" in member.quarantined

    run_virtual(script())
    assert len(told) == 3 and all(text.startswith("w1 sent what cannot be read: ") for text in told)


# A coordinator against a device of 1 MB


def device(limit_bytes: int = 1 << 20) -> tuple[Pieces, list[tuple[dict[str, Any], memoryview]]]:
    sent: list[tuple[dict[str, Any], memoryview]] = []
    return Pieces(compute=InlineExecutor(), clock=SystemClock(), limit_bytes=limit_bytes, note=lambda _: None), sent


async def serve(pieces: Pieces, sent: list[Any], requests: Iterable[PieceRequest], num_replies: int) -> None:
    async def send(frame: bytes) -> None:
        sent.append(unpack_data(frame))

    serving = [asyncio.ensure_future(c) for c in pieces.serve(send)]
    try:
        async with asyncio.timeout(10):
            for request in requests:
                for frame in piece_frames(request):
                    await pieces.take(*unpack_data(frame))
            while sum("piece" in head and head["offset"] == 0 for head, _ in sent) < num_replies:
                await asyncio.sleep(0.001)
    finally:
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def outer(id: int, side: int, memory_bytes: int) -> PieceRequest:
    return PieceRequest(
        id=id, task="sub_gemm.tile", operands={"a": "", "b": ""}, kept=frozenset(), memory_bytes=memory_bytes,
        arguments={"wire": "fp32", "is_a_transposed": False, "is_b_transposed": False},
        bundle=pack_tensors({"a/values": torch.ones(side, 1), "b/values": torch.ones(1, side)}),
    )  # fmt: skip


def test_a_piece_whose_result_is_larger_than_it_says_is_refused() -> None:
    """16 kB come, 16 MB are made, and the owner gives 1 MB."""
    pieces, sent = device()
    asyncio.run(serve(pieces, sent, [outer(1, 2000, 20_000)], 1))
    assert "error" in sent[0][0], "16 MB were computed within a limit of 1 MB"


def test_the_limit_holds_after_any_number_of_pieces_that_are_too_large() -> None:
    pieces, sent = device()
    asyncio.run(serve(pieces, sent, [outer(id, 4, 1 << 40) for id in range(80)], 80))
    assert sum("error" in head for head, _ in sent) == 80


def test_operands_that_cannot_be_names_are_corrupt() -> None:
    pieces, _ = device()
    head = {"piece": 1, "offset": 0, "total": 0, "task": "x", "arguments": {}, "operands": {"a": ""}, "memory": 0}
    with pytest.raises(CorruptError):
        asyncio.run(pieces.take({**head, "kept": [[1]]}, memoryview(b"")))


def test_a_link_of_no_time_is_no_link() -> None:
    meter = LinkMeter()
    meter.received(1 << 39, 5e-324)
    assert meter.rates.down_bytes_per_s < math.inf


def test_factors_that_are_not_finite_are_no_fault_of_a_device() -> None:
    """On an int8 wire as on fp32: the run ends with the reason, the workers do not end for it."""
    problem = Problem(num_rounds=3, validate=False, inner=InnerConfig(lr=1e30, batch_size=4, warmup=0.0))
    config = SubGEMMConfig(head_computes=False, least_side=4, wire="int8")
    with pytest.raises((NotFinite, RunStopped, RoundFailed)):
        checks.run(problem, lambda: SubGEMM(config), num_workers=2, min_workers=2)
