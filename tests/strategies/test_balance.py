"""Work balanced by speed, on the virtual clock: what it saves, what it trains, and that it changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from contract import references
from torch import Tensor, nn

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.contract import checks
from potluck.fleet.config import FleetConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.types.ids import WorkerId

num_inner_steps = 13


def diloco() -> Strategy:
    return DiLoCo(DiLoCoConfig(num_inner_steps=num_inner_steps, outer_lr=0.7, outer_momentum=0.6))


def sync_sgd() -> Strategy:
    return SyncSGD(SyncSGDConfig())


strategies = {"diloco": (diloco, 3), "sync_sgd": (sync_sgd, 8)}


@pytest.fixture(params=sorted(strategies))
def strategy(request: pytest.FixtureRequest) -> tuple[Callable[[], Strategy], int]:
    return strategies[request.param]


def problem(num_rounds: int, balance: str = "time") -> Problem:
    fleet = FleetConfig(no_progress_s=5000.0, balance=balance)  # pyright: ignore[reportArgumentType]
    return Problem(num_rounds=num_rounds, fleet=fleet)


def seconds_a_sequence(*each: float) -> Callable[[int], Callable[[pb.Lease], float]]:
    return lambda i: lambda lease: each[i] * lease.num_sequences


def test_equal_workers_train_the_same_bits(strategy: tuple[Callable[[], Strategy], int]) -> None:
    make, num_rounds = strategy
    on, off = (checks.run(problem(num_rounds, balance), make, num_workers=3) for balance in ("time", "none"))
    assert torch.equal(on.params, off.params)
    assert on.round_losses == off.round_losses
    assert [text for _, text in on.trace] == [text for _, text in off.trace]
    assert [at for at, _ in on.trace] == pytest.approx([at for at, _ in off.trace], abs=1e-3)  # leases say a bit more


def test_one_worker_equals_a_plain_loop(strategy: tuple[Callable[[], Strategy], int], tmp_path: Path) -> None:
    make, num_rounds = strategy
    given = problem(num_rounds)
    given.store_shards(tmp_path)

    def reference(of: Problem) -> Tensor:
        if make is sync_sgd:
            return references.sync_sgd(of)[0]
        return references.diloco(of, num_inner_steps=num_inner_steps, outer_lr=0.7, outer_momentum=0.6)

    checks.equals_reference(given, make, reference)


def test_a_restart_in_the_middle_of_a_round_keeps_its_plan(strategy: tuple[Callable[[], Strategy], int]) -> None:
    """What is measured meanwhile counts in the next round only, and what was measured before is not forgotten."""
    make, num_rounds = strategy
    plans: dict[int, dict[int, set[int]]] = {}

    def costs(i: int) -> Callable[[pb.Lease], float]:
        def cost_s(lease: pb.Lease) -> float:
            if lease.num_sequences:
                plans.setdefault(lease.round, {}).setdefault(i, set()).add(lease.num_sequences)
            return (0.25, 0.75)[i] * lease.num_sequences

        return cost_s

    async def disturb(world: World) -> None:
        for moment in range(12):
            await world.clock.sleep(1.3)
            if world.training_is_over:
                return
            await world.crash_coordinator()
            if moment % 2:
                await world.crash("w2")
                world.switch_on(WorkerId("w2"))
            await world.clock.sleep(1.0)
            await world.start()

    got = checks.run(problem(num_rounds), make, num_workers=2, costs=costs, disturb=disturb)
    assert got.state.round == num_rounds
    shares = [tuple(next(iter(plan[i])) for i in (0, 1)) for _, plan in sorted(plans.items())]
    assert all(len(each) == 1 for plan in plans.values() for each in plan.values())
    (first, *others), mean = shares, shares[0][0]
    assert first == (mean, mean)
    assert all(sum(each) == 2 * mean and each[0] > 2 * each[1] for each in others)


def fednova(of: Problem, rounds: Sequence[Sequence[int]]) -> Tensor:
    """Workers of these numbers of steps, merged as the paper says, and torch's own outer optimizer."""
    model = of.model()
    optimizers = [references.make_adamw(model, of) for _ in rounds[0]]
    theta = nn.Parameter(references.flat(model).clone())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.6, nesterov=True)
    batch = of.inner.batch_size
    asked = [[(f"w{i + 1}", steps * batch) for i, steps in enumerate(each)] for each in rounds]
    for round, (each, rows) in enumerate(zip(rounds, of.dealt(asked), strict=True)):
        start, stop = round / of.num_rounds, (round + 1) / of.num_rounds
        normalised = torch.zeros_like(theta)
        for i, steps in enumerate(each):
            nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
            for step, tokens in enumerate(rows[f"w{i + 1}"].split(batch)):
                progress = start + (stop - start) * step / steps
                references.train_step(model, optimizers[i], tokens, of, progress)
            normalised += (theta.detach() - references.flat(model)) / steps / len(each)
        theta.grad = sum(each) / len(each) * normalised
        outer.step()
    return theta.detach()


def test_unequal_steps_merge_as_in_fednova(tmp_path: Path) -> None:
    given = problem(3)
    given.store_shards(tmp_path)
    asked: list[list[int]] = []

    def costs(i: int) -> Callable[[pb.Lease], float]:
        def cost_s(lease: pb.Lease) -> float:
            if lease.num_sequences:
                asked.append([i, lease.num_sequences // given.inner.batch_size])
            return (1.0, 2.0, 8.0)[i] * lease.num_sequences

        return cost_s

    got = checks.run(given, diloco, num_workers=3, costs=costs)
    rounds = [[n for _, n in sorted(asked[at : at + 3])] for at in range(0, len(asked), 3)]
    assert rounds == [[13, 13, 13]] + [[24, 12, 3]] * 2
    expected = fednova(given, rounds)
    start = references.flat(given.model())
    assert (expected - start).abs().max() > 1e-2
    assert (got.params - expected).abs().max() < 1e-5


def test_who_is_lost_leaves_the_merge_and_the_others_shares_add_up_again(tmp_path: Path) -> None:
    """The middle one of three vanishes in the second round."""
    given = problem(2)
    given.store_shards(tmp_path / "shards")
    given.fleet = given.fleet.model_copy(update={"min_workers": 3})

    async def main() -> Tensor:
        world = World(
            given.plan(diloco()), given.make_deck, tmp_path, clock=VirtualClock(), make_executor=InlineExecutor
        )
        for i in range(3):
            world.add(f"w{i + 1}", cost_s=seconds_a_sequence(1.0, 2.0, 8.0)(i))
        await world.start()
        while world.run is None or world.run.state is None or world.run.state.round < 1:
            await world.clock.sleep(0.1)
        await world.clock.sleep(5.0)
        await world.crash("w2")
        state = await world.finish()
        assert world.last is not None
        assert [e.detail["workers"] for e in world.events if e.kind == "round"][1] == ["w1", "w3"]
        return world.last.params.read(state.params)

    got = run_virtual(main())
    model, of = given.model(), given
    # As in `fednova`, the second round without w2.
    optimizers = [references.make_adamw(model, of) for _ in range(3)]
    theta = nn.Parameter(references.flat(model).clone())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.6, nesterov=True)
    steps = [[13, 13, 13], [24, 12, 3]]
    asked = [[(f"w{i + 1}", n * of.inner.batch_size) for i, n in enumerate(each)] for each in steps]
    for round, (rows, counted) in enumerate(zip(of.dealt(asked), ((0, 1, 2), (0, 2)), strict=True)):
        normalised = torch.zeros_like(theta)
        for i in counted:
            nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
            for step, tokens in enumerate(rows[f"w{i + 1}"].split(of.inner.batch_size)):
                references.train_step(model, optimizers[i], tokens, of, (round + step / steps[round][i]) / 2)
            normalised += (theta.detach() - references.flat(model)) / steps[round][i] / len(counted)
        theta.grad = sum(steps[round][i] for i in counted) / len(counted) * normalised
        outer.step()
    assert (got - theta.detach()).abs().max() < 1e-5


@pytest.mark.parametrize("name", sorted(strategies))
def test_devices_of_speeds_1_2_and_8_finish_together(name: str) -> None:
    """Round time, share of it that workers idle, and the loss at the same moment, with and without."""
    make, num_rounds = strategies[name]
    slowness = (0.25, 0.5, 2.0)
    figures = {}
    for balance, rounds in (("time", 3 * num_rounds), ("none", num_rounds)):
        worked = [0.0, 0.0, 0.0]

        def costs(i: int, worked: list[float] = worked) -> Callable[[pb.Lease], float]:
            def cost_s(lease: pb.Lease) -> float:
                worked[i] += slowness[i] * lease.num_sequences
                return slowness[i] * lease.num_sequences

            return cost_s

        given = problem(rounds, balance)
        given.inner = given.inner.model_copy(update={"batch_size": 8, "schedule": "constant"})
        got = checks.run(given, make, num_workers=3, costs=costs)
        took_s = got.state.seconds
        figures[balance] = (took_s, took_s / rounds, [1 - each / took_s for each in worked], got.losses[rounds])
    balanced_s, balanced_round_s, idle, loss = figures["time"]
    plain_s, plain_round_s, plain_idle, plain_loss = figures["none"]
    assert balanced_round_s < 0.4 * plain_round_s  # the first round, when nothing is known, included
    assert sum(idle) < 0.6 * sum(plain_idle)
    assert balanced_s < plain_s and loss < plain_loss - 0.2  # three times as many rounds
