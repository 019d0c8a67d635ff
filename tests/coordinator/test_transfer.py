"""Limits of transfers: from the recipe, and from an operator while the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from potluck.clock import InlineExecutor, Lanes, VirtualClock, run_virtual
from potluck.coordinator.admin import Admin
from potluck.coordinator.core import Coordinator
from potluck.coordinator.events import Event
from potluck.coordinator.service import CoordinatorService
from potluck.coordinator.transfer import TransferConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.transport import objects as transfers
from potluck.transport.connection import Peer
from potluck.transport.memory import MemoryNetwork
from potluck.transport.pace import Limits
from potluck.types.errors import Refused
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile

operator = Peer(id=WorkerId("me"), role="operator")
mbyte = 1 << 20


def with_run(
    folder: Path, config: TransferConfig, act: Callable[[Coordinator, list[Event]], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        problem, objects = Problem(), ObjectStore(folder / "objects")
        events: list[Event] = []
        served = objects.put(bytes(range(256)) * (4 * mbyte // 256))
        plan = replace(problem.plan(DiLoCo(DiLoCoConfig())), transfer=config, open_objects=(served,))
        run = await Coordinator.open(
            plan, folder, deck=problem.make_deck(objects), objects=objects, clock=VirtualClock(),
            lanes=Lanes.one(InlineExecutor()), on_event=events.append,
        )  # fmt: skip
        await run.recover()
        await act(run, events)
        await run.close()

    run_virtual(main())


def admin_of(run: Coordinator) -> Admin:
    nothing: Any = None
    return Admin(run, nothing, run.clock, run.lanes.ledger, link=nothing, drop=lambda _: None)


async def ask(admin: Admin, **limits: float) -> str:
    request = pb.AdminRequest(action="limit", limits=pb.RateLimits(**limits))
    return pb.AdminReply.FromString(await admin.handle(operator, request.SerializeToString())).message


def test_a_recipe_limits_what_workers_fetch_and_an_operator_changes_it_meanwhile(tmp_path: Path) -> None:
    config = TransferConfig(max_down_mbit=8 * 1.048576)  # 1 MiB/s

    async def act(run: Coordinator, events: list[Event]) -> None:
        network = MemoryNetwork(run.clock)
        run.roster.arrive(WorkerId("w1"), DeviceProfile(device="cpu"), 0.0)
        connection = await network.connect(CoordinatorService(run), Peer(id=WorkerId("w1")))
        (served,), begun = run.plan.open_objects, run.clock.now()
        for number, seconds in enumerate((3.0, 1.5)):  # the first chunk passes at once, the others at a second each
            store = ObjectStore(tmp_path / f"worker-{number}")
            await transfers.fetch(connection, served, store, InlineExecutor())
            assert run.clock.now() - begun == pytest.approx(seconds, rel=1e-3)
            await ask(admin_of(run), down=16 * 1.048576)
            await asyncio.sleep(10)
            begun = run.clock.now()
        await network.close()
        assert [e.text for e in events if e.kind == "limits"] == ["transfers are limited: down 16.7772 Mbit/s"]

    with_run(tmp_path, config, act)


def test_an_operator_sees_sets_and_lifts_limits_one_by_one(tmp_path: Path) -> None:
    async def act(run: Coordinator, events: list[Event]) -> None:
        admin = admin_of(run)
        assert await ask(admin) == "transfers have no limit"
        assert await ask(admin, up=20, down_per_worker=4) == (
            "transfers are limited: up 20 Mbit/s, down for each worker 4 Mbit/s"
        )
        assert await ask(admin, up=0) == "transfers are limited: down for each worker 4 Mbit/s"
        assert run.pacer.limits == Limits(down_per_worker=500_000.0)
        for nonsense in (-1.0, float("nan"), float("inf"), 1e308, 5e-324):
            with pytest.raises(Refused, match="is none; give 0"):
                await ask(admin, down=nonsense)
        assert [dict(e.detail)["up"] for e in events if e.kind == "limits"] == [2_500_000.0, 0.0]

    with_run(tmp_path, TransferConfig(), act)


def test_a_limit_that_would_take_hours_for_a_chunk_is_none() -> None:
    with pytest.raises(ValueError, match=r"1e-308 Mbit/s is too slow to be a limit; give 0 for none or 0\.001"):
        TransferConfig(max_up_mbit=1e-308)
