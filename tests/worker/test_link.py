"""What a worker learns of its link, and what the coordinator hears of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import virtual_world

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.status import snapshot
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.transport import objects
from potluck.transport.connection import Connection
from potluck.transport.memory import Link as NetworkLink
from potluck.types.errors import ConnectionLost
from potluck.types.ids import Digest, WorkerId
from potluck.types.profile import DeviceProfile, LinkRates
from potluck.worker.link import Link


class Transfers:
    """Stands for `transport.objects`: steps of (seconds, bytes at the receiver), then the end or a lost link."""

    def __init__(self, *tries: list[tuple[float, int]]) -> None:
        self._tries = list(tries)

    async def __call__(self, *arguments: Any) -> None:
        told: objects.Progress = arguments[-1]
        for seconds, num_bytes in self._tries.pop(0):
            await asyncio.sleep(seconds)
            told(num_bytes)
        if self._tries:
            raise ConnectionLost("the cable was pulled")


class Nothing:
    """A connection that nobody uses."""


async def fetch(link: Link, folder: Path) -> list[int]:
    told: list[int] = []
    link.set(Nothing())  # pyright: ignore[reportArgumentType]
    await link.fetch(Digest("sha256:0"), ObjectStore(folder), InlineExecutor(), told.append)
    return told


def test_a_transfer_counts_the_bytes_that_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        # 3,000 bytes were here: the first try brings 1,000 and is cut, the second one the last 4,000 in 2 s.
        cut, rest = [(0.5, 3000), (9.0, 4000)], [(0.4, 4000), (0.6, 6000), (1.0, 8000)]
        monkeypatch.setattr(objects, "fetch", Transfers(cut, rest))
        link = Link(VirtualClock())
        assert await fetch(link, tmp_path) == [3000, 4000, 4000, 6000, 8000]
        # Both sides of the fit are known by hand: 4,000 bytes in 2.0 s of which 0.4 s went by before the first word.
        assert link.meter.rates == LinkRates(down_bytes_per_s=pytest.approx(4000 / 1.6), rtt_s=pytest.approx(0.4))

    run_virtual(main())


def test_what_was_here_already_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(objects, "fetch", Transfers([]))
        link = Link(VirtualClock())
        await fetch(link, tmp_path)
        assert link.meter.rates == LinkRates()
        monkeypatch.setattr(objects, "push", Transfers([(1.0, 500)]))  # the coordinator had it
        connection: Connection = Nothing()  # pyright: ignore[reportAssignmentType]
        await link.push(connection, Digest("sha256:0"), tmp_path, "purpose", InlineExecutor())
        assert link.meter.rates == LinkRates(rtt_s=1.0)

    run_virtual(main())


def run_world(folder: Path, **links: NetworkLink) -> tuple[World, dict[str, Any]]:
    problem = Problem(num_rounds=4, validate=False)
    problem.fleet = problem.fleet.model_copy(update={"min_workers": len(links)})

    async def main() -> tuple[World, dict[str, Any]]:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=1)), folder)
        for name, link in links.items():
            world.add(name, link=link)
        await world.start()
        await world.finish()
        assert world.last is not None
        return world, {row["id"]: row for row in snapshot(world.last)["workers"]}

    return run_virtual(main())


def test_the_coordinator_knows_each_worker_s_link_by_its_transfers(tmp_path: Path) -> None:
    slow = NetworkLink(up_bytes_per_s=20_000, down_bytes_per_s=80_000, rtt_s=0.1)
    world, rows = run_world(tmp_path, slow=slow, fast=NetworkLink(up_bytes_per_s=1e6, down_bytes_per_s=2e6, rtt_s=0.01))
    assert world.last is not None
    member = world.last.roster.members[WorkerId("slow")]
    assert member.up_bytes_per_s == pytest.approx(20_000, rel=0.15)
    assert member.down_bytes_per_s == pytest.approx(80_000, rel=0.15)
    assert member.profile.link.rtt_s == pytest.approx(0.1, rel=0.2)
    assert rows["slow"]["up_bytes_per_s"] == member.up_bytes_per_s
    assert rows["fast"]["up_bytes_per_s"] == pytest.approx(1e6, rel=0.5)
    assert rows["fast"]["down_bytes_per_s"] > rows["fast"]["up_bytes_per_s"] > 10 * rows["slow"]["up_bytes_per_s"]


def test_a_link_that_takes_no_time_is_not_known(tmp_path: Path) -> None:
    _, rows = run_world(tmp_path, w1=NetworkLink())
    assert (rows["w1"]["up_bytes_per_s"], rows["w1"]["down_bytes_per_s"], rows["w1"]["rtt_s"]) == (0.0, 0.0, 0.0)


def test_a_profile_in_a_report_takes_the_place_of_the_one_before_and_nonsense_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        problem = Problem(num_rounds=1, validate=False)
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=1)), tmp_path)
        await world.start()
        assert world.run is not None
        await world.run.recovered.wait()
        known = DeviceProfile(device="cpu", link=LinkRates(up_bytes_per_s=5.0))
        member = world.run.roster.arrive(WorkerId("w"), known, 0.0)
        for text in ("", "{", '{"num_threads": "many"}', " " * 70_000):
            world.run.intake.report(member, pb.Report(profile_json=text))
            assert member.profile == known
        news = replace(known, link=LinkRates(up_bytes_per_s=7.0))
        world.run.intake.report(member, pb.Report(profile_json=json.dumps(news.to_json())))
        assert (member.profile, member.up_bytes_per_s) == (news, 7.0)
        await world.crash_coordinator()

    run_virtual(main())


def test_a_coordinator_that_cannot_be_reached_is_told_of_once_a_minute(tmp_path: Path) -> None:
    async def main() -> list[str]:
        world = virtual_world(Problem(num_rounds=50), DiLoCo(DiLoCoConfig(num_inner_steps=2)), tmp_path)
        world.add("w1", cost_s=lambda _: 1.0)
        await world.start()
        await world.clock.sleep(3.0)
        await world.crash_coordinator()
        await world.clock.sleep(150.0)
        await world.start()
        await world.clock.sleep(10.0)
        notes = list(world.hosts[WorkerId("w1")].notes)
        await world.finish()
        return notes

    notes = [note for note in run_virtual(main()) if "cannot be reached" in note]
    assert 3 <= len(notes) <= 5
