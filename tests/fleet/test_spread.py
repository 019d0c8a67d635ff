"""Bags of pieces over workers of the shipping code: on a virtual clock and over sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from potluck.clock import run_virtual
from potluck.contract.checks import Outcome, play
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.bag import Operand, Piece
from potluck.strategies.fleet import Fleet, Head, WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import Result, task
from potluck.transport.pieces import Arrival, PieceReply
from potluck.types.errors import InvalidUpdate, RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.vector import Vector
from potluck.worker.pieces import Pieces

lies: set[int] = set()
"""Rows that a device gets wrong, once each."""
calls: list[str] = []


@task("spread.row", kind="pure")
def row(_: object, *, a: Tensor, b: Tensor, number: int) -> Result:
    calls.append("with b")
    wrong = number in lies
    lies.discard(number)
    return Result({}, {}, {"c": (a @ b) + (1.0 if wrong else 0.0)})


@dataclass
class Rows:
    """One row of a product for each piece, to whoever has fewest on the way; checked against the truth."""

    a: Tensor
    b: Tensor
    done: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    at: dict[int, WorkerId] = field(default_factory=dict[int, WorkerId])
    losses: list[str] = field(default_factory=list[str])

    @property
    def is_done(self) -> bool:
        return len(self.done) == len(self.a)

    @property
    def needs_devices(self) -> bool:
        return True

    def issue(self, here: Sequence[WorkerInfo], now: float) -> list[tuple[WorkerId, Piece]]:
        found: list[tuple[WorkerId, Piece]] = []
        for number in range(len(self.a)):
            if number in self.done or number in self.at or not here:
                continue
            load = {w.id: sum(x == w.id for x in self.at.values()) for w in here}
            worker = min(load, key=lambda id: (load[id], id))
            if load[worker] >= 2:
                break
            self.at[number] = worker
            operands = {"a": Operand(self.a[number : number + 1]), "b": Operand(self.b, "b")}
            found.append((worker, Piece(task="spread.row", operands=operands, arguments={"number": number})))
        return found

    def look_at(self) -> float:
        return math.inf

    def take(self, worker: WorkerId, piece: Piece, reply: Mapping[str, Tensor], now: float) -> None:
        number = int(piece.arguments["number"])
        if not torch.allclose(reply["c"], self.a[number : number + 1] @ self.b):
            raise InvalidUpdate("row is wrong")
        self.done[number] = reply["c"]
        del self.at[number]

    def lose(self, worker: WorkerId, piece: Piece, reason: str, now: float) -> None:
        self.losses.append(reason)
        del self.at[int(piece.arguments["number"])]
        if len(self.losses) > 50:
            raise RoundFailed(f"hopeless: {reason}")

    def dropped(self) -> list[Piece]:
        return []


class NoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HeadOnly:
    """Every round one product on the devices; the parameters move by a number made of it."""

    Config: ClassVar[type[BaseModel]] = NoConfig
    State: ClassVar[type[State]] = State
    bags: ClassVar[list[Rows]] = []

    def __init__(self, config: NoConfig) -> None:
        pass

    def init(self, run: RunFacts) -> State:
        return State(params=run.initial)

    async def run_round(self, state: State, fleet: Fleet) -> State:
        def work(head: Head) -> Result:
            (tokens,) = list(head.batches())
            generator = torch.Generator().manual_seed(int(tokens.sum()))
            bag = Rows(torch.randn(24, 16, generator=generator), torch.randn(16, 8, generator=generator))
            HeadOnly.bags.append(bag)
            head.spread(bag)
            product = torch.cat([bag.done[i] for i in range(24)])
            assert torch.allclose(product, bag.a @ bag.b)
            moved = head.vector(state.params).tensor() + product.sum()
            return Result({"num_tokens": int(tokens[:, 1:].numel())}, {"params": Vector.of(moved)})

        got = await fleet.head(work, key="step", num_sequences=4)
        fleet.credit("step", {w.id: 8 for w in fleet.workers()})
        return replace(
            state, params=got.handles["params"], round=state.round + 1,
            tokens=state.tokens + got.scalars["num_tokens"], loss=1.0,
        )  # fmt: skip

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=0, down=0)


def played(
    folder: Path,
    disturb: Callable[[World], Awaitable[None]] | None = None,
    *,
    sockets: bool = False,
    rounds: int = 3,
    least: int = 3,
) -> Outcome:
    HeadOnly.bags.clear()
    problem = Problem(num_rounds=rounds, validate=False)
    playing = play(
        problem,
        lambda: HeadOnly(NoConfig()),
        folder,
        num_workers=3,
        min_workers=least,
        disturb=disturb,
        sockets=sockets,
    )
    if sockets:
        return asyncio.run(playing)
    return run_virtual(playing)


@pytest.mark.parametrize("sockets", [False, True])
def test_a_product_is_computed_by_devices(tmp_path: Path, sockets: bool) -> None:
    got = played(tmp_path, sockets=sockets)
    assert got.state.round == 3
    assert len(HeadOnly.bags) == 3
    assert all(bag.losses == [] for bag in HeadOnly.bags)
    assert got.state.tokens == 3 * 4 * 8


async def product_under_way(world: World, number: int, least: int = 2) -> Rows:
    """The bag of that round once so many rows of it are there."""
    while len(HeadOnly.bags) <= number or len(HeadOnly.bags[number].done) < least:
        await world.clock.sleep(0.005)
    return HeadOnly.bags[number]


def test_a_wrong_row_is_refused_and_done_again(tmp_path: Path) -> None:
    lies.update({3, 20})
    got = played(tmp_path, rounds=1)
    assert got.state.round == 1
    assert [("refused: row is wrong" in reason) for reason in HeadOnly.bags[0].losses] == [True, True]
    assert sum("refused: row is wrong" in text for _, text in got.trace) == 2
    assert not lies


def test_who_lies_again_and_again_gets_no_more_rows(tmp_path: Path) -> None:
    """Right rows in between do not make up for it."""
    seen: list[str] = []

    async def disturb(world: World) -> None:
        await product_under_way(world, 0)
        assert world.run is not None
        member = world.run.roster.members[WorkerId("w1")]
        for _ in range(world.run.config.quarantine_after):
            world.run.roster.refused(member, "row is wrong", world.clock.now())
        seen.append(member.quarantined)

    played(tmp_path, disturb, rounds=1)
    assert "3 refused results in a row" in seen[0]
    assert any("w1 is quarantined" in reason for reason in HeadOnly.bags[0].losses)


@pytest.mark.parametrize("end", ["dies", "rests", "leaves"])
def test_rows_of_a_worker_that_is_gone_are_done_by_others(tmp_path: Path, end: str) -> None:
    async def disturb(world: World) -> None:
        bag = await product_under_way(world, 0)
        while "w2" not in bag.at.values():
            await world.clock.sleep(0.001)
        agent = world.hosts[WorkerId("w2")].agent
        assert agent is not None
        if end == "dies":
            await world.crash("w2")
        elif end == "rests":
            agent.hold()
        else:
            agent.leave()

    got = played(tmp_path, disturb, rounds=2, least=2)
    assert got.state.round == 2
    assert HeadOnly.bags[0].losses
    reason = {"rests": "its owner needs", "leaves": "w2 is leaving"}.get(end, "the connection of w2 ended")
    assert any(reason in x or "w2 rests" in x for x in HeadOnly.bags[0].losses)


def test_after_a_restart_the_step_is_done_again_with_the_same_data(tmp_path: Path) -> None:
    calm = played(tmp_path / "calm", rounds=2)

    async def disturb(world: World) -> None:
        await product_under_way(world, 1)
        await world.crash_coordinator()
        await world.clock.sleep(1.0)
        await world.start()

    got = played(tmp_path / "disturbed", disturb, rounds=2)
    assert len(HeadOnly.bags) == 3
    assert torch.equal(HeadOnly.bags[1].a, HeadOnly.bags[2].a)
    assert torch.equal(got.params, calm.params)
    assert got.state.tokens == calm.state.tokens


def test_a_shard_that_was_dropped_is_sent_again(tmp_path: Path) -> None:
    async def disturb(world: World) -> None:
        await product_under_way(world, 0)
        for host in world.hosts.values():
            assert host.agent is not None
            assert host.agent.runner is not None
            assert host.agent.runner.pieces is not None
            host.agent.runner.pieces.room.clear()

    got = played(tmp_path, disturb, rounds=1)
    assert got.state.round == 1
    assert HeadOnly.bags[0].losses == []


@pytest.mark.parametrize("down", [(1 << 39, 5e-324), (1 << 39, 1e-290), (70_000, 1e-300), (1 << 30, 1e5)])
def test_what_a_device_says_of_its_link_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: tuple[int, float]
) -> None:
    perform = Pieces._perform  # pyright: ignore[reportPrivateUsage]

    def lie(self: Pieces, *given: Any) -> PieceReply:
        return replace(perform(self, *given), down=Arrival(*down))

    monkeypatch.setattr(Pieces, "_perform", lie)
    seen: list[float] = []

    async def disturb(world: World) -> None:
        await product_under_way(world, 0, least=20)
        assert world.run is not None
        seen.extend(w.profile.link.down_bytes_per_s for w in world.run.fleet.spreader.here())

    assert played(tmp_path, disturb, rounds=1).state.round == 1
    assert seen == [0.0, 0.0, 0.0]
