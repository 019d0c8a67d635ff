"""Late work ends early: what that saves, and that it is merged and accounted as what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contract import references
from torch import Tensor, nn

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.events import Event
from potluck.data.dealer import Dealer, DealState
from potluck.data.epoch import epoch_order
from potluck.data.shards import Shard, Span
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.fuzz import case_of, play_seed
from potluck.simulator.exact.invariants import Witness
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.transport.memory import Link
from potluck.types.ids import WorkerId

num_inner_steps = 10
names = ("w1", "w2", "w3")
w2 = WorkerId("w2")


def problem_of(balance: str = "time") -> Problem:
    problem = Problem(num_rounds=4, validate=False, inner=InnerConfig(lr=3e-3, batch_size=4, warmup=0.1))
    problem.fleet = FleetConfig(
        min_workers=3, reconnect_s=20.0, no_progress_s=500.0, snapshot_every_steps=2, balance=balance,
    )  # pyright: ignore[reportArgumentType]  # fmt: skip
    return problem


def step_of_a_second(lease: pb.Lease) -> float:
    return max(lease.num_sequences, 1) / 4.0


def world_of(problem: Problem, folder: Path) -> World:
    strategy = DiLoCo(DiLoCoConfig(num_inner_steps=num_inner_steps, outer_lr=0.7, outer_momentum=0.6))
    world = World(problem.plan(strategy), problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
    for name in names:
        world.add(name, cost_s=step_of_a_second, link=Link(rtt_s=0.02))
    return world


async def third_round(world: World) -> None:
    while world.run is None or world.run.state is None or world.run.state.round < 2:
        await world.clock.sleep(0.1)


def play(problem: Problem, folder: Path, *, crashes_coordinator: bool = False) -> tuple[World, Tensor]:
    """In the third round w2 dies after 5.5 s and is back 3 s later."""

    async def main() -> tuple[World, Tensor]:
        world = world_of(problem, folder)
        await world.start()
        witness = Witness(problem.num_shards * problem.sequences_per_shard, problem.seq_len)

        def heard(event: Event) -> None:
            if event.kind == "round" and world.run is not None:
                witness.told(world.run, event.detail["round"])

        world.on_event = heard
        await third_round(world)
        await world.clock.sleep(5.5)
        world.kill_for("w2", 3.0)
        if crashes_coordinator:
            await world.clock.sleep(5.5)  # w2 was told and has not delivered yet, or is about to be told
            await world.crash_coordinator()
            await world.start()
        while not world.training_is_over:
            await world.clock.sleep(0.5)
        state = await world.finish()
        assert world.last is not None
        assert witness.num_cut_short == sum(bool(e.detail["cut_short"]) for e in world.events if e.kind == "round")
        return world, world.last.params.read(state.params)

    return run_virtual(main())


def steps_of(world: World) -> list[list[int]]:
    """Steps by round and worker, by what the rounds' lines say."""
    rounds = [e.detail for e in world.events if e.kind == "round"]
    return [[num_inner_steps - each["cut_short"].get(name, 0) for name in names] for each in rounds]


def dealt(of: Problem, rounds: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """What each worker reads in each round where it is granted `num_inner_steps` and takes so many steps."""
    shards = [Shard(name=d, num_sequences=len(s), digest=d) for d, s in zip(of._names(), of.shards, strict=True)]
    dealer, state = Dealer(shards, seed=of.seed), DealState()
    batch, read = of.inner.batch_size, list[list[Tensor]]()
    for steps in rounds:
        spans: list[tuple[Span, ...]] = []
        for name in names:
            state, given = dealer.deal(state, name, num_inner_steps * batch)
            spans.append(given)
        read.append(
            [torch.cat([_rows(of, span) for span in each])[: n * batch] for each, n in zip(spans, steps, strict=True)]
        )
        for each, n in zip(spans, steps, strict=True):
            one_by_one = [replace(s, start=i, stop=i + 1) for s in each for i in range(s.start, s.stop)]
            state = dealer.settle(state, one_by_one[: n * batch], consumed=True)
            state = dealer.settle(state, one_by_one[n * batch :], consumed=False)
    return read


def _rows(of: Problem, span: Span) -> Tensor:
    order = epoch_order(of.seed, span.epoch, span.shard, of.sequences_per_shard)[span.start : span.stop]
    return of.shards[of._names().index(span.shard)][torch.as_tensor(order.copy())].long()


def fednova(of: Problem, rounds: Sequence[Sequence[int]]) -> Tensor:
    """theta moves by (sum_j p_j H_j) sum_i p_i delta_i / H_i with p_i ~ H_i, all having been granted as many steps."""
    model = of.model()
    optimizers = [references.make_adamw(model, of) for _ in names]
    theta = nn.Parameter(references.flat(model).clone())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.6, nesterov=True)
    for round, (steps, rows) in enumerate(zip(rounds, dealt(of, rounds), strict=True)):
        moved, mean_steps = torch.zeros_like(theta), 0.0
        for i, n in enumerate(steps):
            nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
            for step, batch in enumerate(rows[i].split(of.inner.batch_size)):
                done = (round + step / num_inner_steps) / of.num_rounds
                references.train_step(model, optimizers[i], batch, of, done)
            p = n / sum(steps)
            moved += p * (theta.detach() - references.flat(model)) / n
            mean_steps += p * n
        theta.grad = mean_steps * moved
        outer.step()
    return theta.detach()


def test_a_worker_that_came_back_late_is_merged_by_the_steps_it_took(tmp_path: Path) -> None:
    problem = problem_of()
    world, params = play(problem, tmp_path)
    rounds = steps_of(world)
    assert [rounds[i] for i in (0, 1, 3)] == [[10, 10, 10]] * 3
    assert rounds[2] == [10, rounds[2][1], 10] and 4 <= rounds[2][1] <= 6  # its snapshot was of step 4
    seconds = [e.detail["seconds"] for e in world.events if e.kind == "round"]
    assert seconds[2] - seconds[1] < 1.5  # it was told at once, and ended with the step it was at
    start = references.flat(problem.model())
    expected = fednova(problem, rounds)
    assert (expected - start).abs().max() > 1e-2
    assert (params - expected).abs().max() < 1e-5
    given = {row["id"]: row["tokens"] for row in world.last.contributions()} if world.last is not None else {}
    assert given == {name: 32 * sum(steps[i] for steps in rounds) for i, name in enumerate(names)}


def test_without_balance_the_round_waits_for_it(tmp_path: Path) -> None:
    world, _ = play(problem_of("none"), tmp_path)
    assert steps_of(world) == [[10, 10, 10]] * 4
    seconds = [e.detail["seconds"] for e in world.events if e.kind == "round"]
    assert seconds[2] - seconds[1] > 3.5


def test_a_restart_of_the_coordinator_in_between_loses_no_data(tmp_path: Path) -> None:
    """Whether it was told or not: the books agree after each commit, which `play` checks."""
    world, _ = play(problem_of(), tmp_path, crashes_coordinator=True)
    assert len(steps_of(world)) == 4
    assert world.last is not None and world.last.state is not None
    (epoch,) = world.last.deck.account()[-1:]
    assert epoch["outstanding"] == 0


def test_its_pace_is_that_of_what_it_trained(tmp_path: Path) -> None:
    """A second for four sequences, whatever it was granted: so the next round asks as much of it as before."""
    world, _ = play(problem_of(), tmp_path)
    assert world.last is not None
    for name in names:
        past = world.last.fleet.paces.seconds[WorkerId(name)]
        assert len(past) == 3 and all(abs(s - 0.25) < 0.02 for s in past)


def test_a_machine_that_becomes_slow_ends_early_until_it_is_asked_for_less(tmp_path: Path) -> None:
    """Nobody has died: from the third round on w2 takes three times as long."""
    problem = problem_of()
    problem.num_rounds = 5

    async def main() -> list[Any]:
        world = world_of(problem, tmp_path)
        await world.start()
        await third_round(world)
        await world.clock.sleep(0.5)  # in the middle of its first step
        world.slowness["w2"] = 3.0
        while not world.training_is_over:
            await world.clock.sleep(0.5)
        await world.finish()
        return [e.detail["cut_short"] for e in world.events if e.kind == "round"]

    assert run_virtual(main()) == [{}, {}, {"w2": 5}, {"w2": 6}, {}]  # of 10 steps of 1 s, with one as before; of 3 s


def test_seeds_play_it_and_every_invariant_holds() -> None:
    """Data that was not trained is dealt again, whoever dies meanwhile: see `simulate --fuzz` for many more."""
    for seed in seeds_with_late_work:
        assert case_of(seed).balance == "time"
        verdict = play_seed(seed)
        assert verdict.is_good, verdict.detail
        assert verdict.num_cut_short > 0


seeds_with_late_work = (10, 133)
