"""Two processes with one certificate, and honest cases that look alike."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from worlds import virtual_world

from potluck.clock import InlineExecutor, run_virtual
from potluck.coordinator.status import snapshot
from potluck.coordinator.twins import Twins, window_s
from potluck.simulator.exact.modelled import ModelledRunner
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Connection, Peer
from potluck.transport.memory import Link as NetworkLink
from potluck.types.errors import NotAdmitted
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction
from potluck.worker.equip import equip
from potluck.worker.link import Link
from potluck.worker.runner import Runner

w1 = WorkerId("w1")


def test_the_older_of_two_is_sent_away_once_it_is_proven() -> None:
    told: list[str] = []
    twins = Twins(lambda worker, text: told.append(text))
    for i, name in enumerate(["old", "new", "old", "new"]):
        twins.welcome(w1, name, 1.0 * i)
    assert not told
    with pytest.raises(NotAdmitted, match="another process, started later, works with the certificate of w1"):
        twins.welcome(w1, "old", 5.0)
    twins.welcome(w1, "new", 6.0)
    with pytest.raises(NotAdmitted):
        twins.welcome(w1, "old", 1e6)
    assert len(told) == 1 and "two processes work with the certificate of w1" in told[0]


def test_the_younger_one_is_let_in_when_it_is_the_one_that_comes_back() -> None:
    told: list[str] = []
    twins = Twins(lambda worker, text: told.append(text))
    for name in ("a", "b", "a", "c", "b", "c"):
        assert not told
        twins.welcome(w1, name, 0.0)
    assert len(told) == 1
    with pytest.raises(NotAdmitted):
        twins.welcome(w1, "b", 1.0)
    twins.welcome(w1, "c", 1.0)


def test_a_link_that_breaks_and_a_worker_that_is_started_again_are_no_twins() -> None:
    told: list[str] = []
    twins = Twins(lambda worker, text: told.append(text))
    for start in range(100):
        for _ in range(10):
            twins.welcome(w1, f"process-{start}", 0.1 * start)
    for i in range(20):  # two that are each away most of the time
        twins.welcome(WorkerId("w2"), "ab"[i % 2], i * window_s)
        twins.welcome(WorkerId("of an earlier version"), "", 0.0)
    assert not told


def test_a_copied_worker_works_on_and_the_first_one_is_told(tmp_path: Path) -> None:
    notes: list[str] = []

    async def main() -> None:
        world = virtual_world(
            Problem(num_rounds=200, validate=False), DiLoCo(DiLoCoConfig(num_inner_steps=2)), tmp_path
        )
        world.add("w1", cost_s=lambda _: 5.0)
        await world.start()
        await world.clock.sleep(1.0)

        async def connect() -> Connection:
            return await world.network.connect(Peer(id=w1), NetworkLink())

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            executor = InlineExecutor()
            return await equip(
                spec, link, folder=tmp_path / "copy", device="cpu", clock=world.clock, compute=executor,
                files=executor, note=copy.note, make=partial(ModelledRunner, cost_s=lambda _: 2.0),
            )  # fmt: skip

        copy = Agent(
            Introduction(id=w1, profile=DeviceProfile(device="cpu"), process="copy"), connect=connect, equip=equipped,
            clock=world.clock, told=notes.append,
        )  # fmt: skip
        copying, first = asyncio.create_task(copy.work()), world.hosts[w1].task
        assert first is not None
        await asyncio.wait([first], timeout=60.0)
        with pytest.raises(NotAdmitted, match="so its folder is a copy or was copied; stop one of the two"):
            first.result()
        assert not copying.done() and world.run is not None
        (row,) = snapshot(world.run)["workers"]
        assert row["connected"] and "two processes work with the certificate of w1" in row["note"]
        world.kill("w1")
        assert world.run.state is not None
        before = world.run.state.round
        await world.clock.sleep(10.0)
        assert world.run.state.round > before
        told = [e.text for e in world.events if e.kind == "note" and "two processes" in e.text]
        assert len(told) == 1
        copying.cancel()
        await asyncio.wait([copying])
        await world.shut_down()

    run_virtual(main())
