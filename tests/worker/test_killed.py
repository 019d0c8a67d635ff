"""Workers that are killed in the middle of their work, in a whole run: nothing that was done is done again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.clock import InlineExecutor, SystemClock, VirtualClock, run_virtual
from potluck.contract.checks import PacedThreads
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.transport import objects
from potluck.transport.memory import Link
from potluck.types.ids import WorkerId

num_inner_steps = 8
step_s = 1.0
chunk_bytes = 512
w1 = WorkerId("w1")


def problem_of(*, every_steps: int = 0, up: str = "fp32", **fleet: Any) -> Problem:
    problem = Problem(num_rounds=3, validate=False, up_codec=up, inner=InnerConfig(lr=3e-3, batch_size=4, warmup=0.1))
    problem.fleet = problem.fleet.model_copy(
        update={"min_workers": 2, "reconnect_s": 20.0, "snapshot_every_steps": every_steps, **fleet}
    )
    return problem


def diloco() -> DiLoCo:
    return DiLoCo(DiLoCoConfig(num_inner_steps=num_inner_steps, outer_momentum=0.6))


class Watched(World):
    """A world that counts the steps that each worker really takes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_steps: dict[str, int] = {}

    def switch_on(self, id: WorkerId) -> None:
        super().switch_on(id)
        host = self.hosts[id]
        assert host.agent is not None
        equip = host.agent._equip

        async def counted(*arguments: Any) -> Any:
            runner = await equip(*arguments)
            replica = runner.trainer._replica
            told = replica.on_step

            def stepped(info: Any) -> None:
                self.num_steps[id] = self.num_steps.get(id, 0) + 1
                told(info)

            replica.on_step = stepped
            return runner

        host.agent._equip = counted


Disturb = Callable[[Watched], Coroutine[Any, Any, None]]


def play(
    folder: Path, problem: Problem, disturb: Disturb | None = None, *, up_bytes_per_s: float = 1e6,
    make: Callable[[], Any] = diloco, threads: bool = False,
) -> tuple[torch.Tensor, float, Watched]:  # fmt: skip
    """The last parameters, how long the run took, and the world."""

    def cost_s(lease: pb.Lease) -> float:
        return step_s * lease.num_sequences / problem.inner.sequences_per_step

    async def main() -> tuple[torch.Tensor, float, Watched]:
        world = Watched(
            problem.plan(make()), problem.make_deck, folder, clock=SystemClock() if threads else VirtualClock(),
            make_executor=PacedThreads if threads else InlineExecutor,
        )  # fmt: skip
        for name in ("w1", "w2"):
            world.add(name, link=Link(up_bytes_per_s=up_bytes_per_s, down_bytes_per_s=1e6, rtt_s=0.02), cost_s=cost_s)
        await world.start()
        begun = world.clock.now()
        if disturb is not None:
            await disturb(world)
        state = await world.finish()
        assert world.last is not None
        return world.last.params.read(state.params), world.clock.now() - begun, world

    return asyncio.run(main()) if threads else run_virtual(main())


async def until(world: World, condition: Callable[[], bool]) -> None:
    begun = world.clock.now()
    while not condition():
        await world.clock.sleep(0.01)
        assert world.clock.now() < begun + 100.0, "it does not come to that"


def round_is(world: World, number: int) -> bool:
    return world.run is not None and world.run.state is not None and world.run.state.round == number


async def at_step(world: Watched, number: int) -> None:
    """Until w1 is that far in the second round: its clock time, since modelled steps are taken in pieces."""
    await until(world, lambda: round_is(world, 1))
    await world.clock.sleep(number * step_s)


def restarting(world: Watched, away_s: float) -> Coroutine[Any, Any, None]:
    async def main() -> None:
        await world.crash("w1")
        await world.clock.sleep(away_s)
        world.switch_on(w1)

    return main()


def snapshots(world: Watched) -> list[Path]:
    return list((world.disk("w1") / "runs" / "contract").glob("snapshot*"))


def test_a_worker_killed_in_mid_task_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    """The round takes its time, the time away, and the steps since the last snapshot."""
    expected, took_s, plain = play(tmp_path / "a", problem_of())
    smooth, smooth_s, careful = play(tmp_path / "b", problem_of(every_steps=2))
    assert torch.equal(smooth, expected)
    assert smooth_s == pytest.approx(took_s, abs=0.5)

    async def kill(world: Watched) -> None:
        await at_step(world, 5.5)
        await restarting(world, 4.0)

    got, killed_s, world = play(tmp_path / "c", problem_of(every_steps=2), kill)
    assert torch.equal(got, expected)
    assert killed_s == pytest.approx(took_s + 4.0 + 1.5, abs=1.0)
    assert world.num_steps["w1"] == 3 * num_inner_steps
    afresh, afresh_s, careless = play(tmp_path / "d", problem_of(), kill)
    assert torch.equal(afresh, expected)
    assert afresh_s == pytest.approx(took_s + 4.0 + 5.5, abs=1.0)
    for each in (plain, careful, world, careless):
        assert not snapshots(each)


def test_and_with_real_threads(tmp_path: Path) -> None:
    expected, _, _ = play(tmp_path / "a", problem_of())

    async def kill(world: Watched) -> None:
        await until(world, lambda: round_is(world, 1))
        done = world.num_steps["w1"]
        await until(world, lambda: world.num_steps["w1"] >= done + 4)
        await restarting(world, 0.1)

    got, _, world = play(tmp_path / "b", problem_of(every_steps=1), kill, threads=True)
    assert torch.equal(got, expected)
    assert world.num_steps["w1"] == 3 * num_inner_steps


def test_a_lease_that_was_given_up_meanwhile_is_not_gone_on_with(tmp_path: Path) -> None:
    async def kill(world: Watched) -> None:
        await at_step(world, 5.5)
        await restarting(world, 15.0)

    _, _, world = play(tmp_path, problem_of(every_steps=2, reconnect_s=1.0), kill)
    assert [len(e.detail["workers"]) for e in world.events if e.kind == "round"] == [2, 1, 2]
    assert not snapshots(world)


def test_a_worker_may_come_back_as_long_as_others_are_at_work(tmp_path: Path) -> None:
    """Nobody waits for it, however short `reconnect_s` is: the round has to wait for the others anyway."""
    expected, _, _ = play(tmp_path / "a", problem_of())

    async def kill(world: Watched) -> None:
        await at_step(world, 2.5)
        await restarting(world, 4.0)

    got, _, world = play(tmp_path / "b", problem_of(every_steps=2, reconnect_s=1.0), kill)
    assert torch.equal(got, expected)
    assert world.num_steps["w1"] == 3 * num_inner_steps


@pytest.mark.parametrize("up", ["fp32", "int4+ef"])
@pytest.mark.parametrize("make", [diloco, lambda: SyncSGD(SyncSGDConfig())], ids=["diloco", "sync_sgd"])
def test_a_finished_update_is_sent_on_and_not_computed_again(
    tmp_path: Path, up: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice in mid-upload: no step again, no byte that the coordinator has sent again, no mass lost."""
    monkeypatch.setattr(objects, "CHUNK_BYTES", chunk_bytes)
    slow = {"up_bytes_per_s": 2e3, "make": make}
    expected, _, smooth = play(tmp_path / "a", problem_of(up=up), **slow)
    num_bytes = smooth.object_bytes_up["w1"]
    at_restart: list[int] = []

    def arrived(world: World) -> int:
        assert world.run is not None
        partials = list(world.run.objects._partials.values())
        return max((p.offset for p in partials if world.run.uploads.lease_of(p.digest)[2].endswith("/w1")), default=0)

    async def kill(world: Watched) -> None:
        await until(world, lambda: round_is(world, 1))
        for share in (0.2, 0.6):
            await until(world, lambda share=share: arrived(world) > share * num_bytes / 3)
            steps = world.num_steps["w1"]
            await restarting(world, 3.0)
            assert world.num_steps["w1"] == steps
            at_restart[:] = [arrived(world), world.object_bytes_up["w1"]]

    got, _, world = play(tmp_path / "b", problem_of(up=up), kill, **slow)
    assert torch.equal(got, expected)
    assert world.num_steps == smooth.num_steps
    safe_bytes, sent_bytes = at_restart
    assert safe_bytes > 0.6 * num_bytes / 3
    assert world.object_bytes_up["w1"] - sent_bytes == 2 * num_bytes / 3 - safe_bytes  # this round's rest and the last
