"""Training that comes apart: what is noticed, what is not, and what a run does about it, on the virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.contract.checks import cost_s
from potluck.coordinator.divergence import Diverged, DivergenceConfig, DivergenceWatch, RoundFigures, min_rounds
from potluck.coordinator.events import Event
from potluck.coordinator.plan import CheckpointConfig, ValidationConfig
from potluck.fleet.config import FleetConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies import diloco
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.task import Result
from potluck.types.errors import NotFinite, RoundFailed, RunStopped

config = DivergenceConfig()


def figures(round: int, loss: float = 3.0, step_norm: float = 1.0) -> RoundFigures:
    return RoundFigures(round=round, loss=loss, step_norm=step_norm)


def fed(*losses: float, config: DivergenceConfig = config) -> DivergenceWatch:
    """A watch that let these rounds pass."""
    watch = DivergenceWatch(config)
    for i, loss in enumerate(losses):
        watch.judge(figures(i + 1, loss))
        watch.commit(figures(i + 1, loss))
    return watch


usual = [3.0 + 0.02 * (i % 3) for i in range(20)]


def test_a_loss_that_stays_far_above_is_noticed_and_the_state_before_its_first_round_is_not_trusted() -> None:
    watch = fed(*usual, 9.0, 9.0)
    assert watch.suspects
    with pytest.raises(Diverged, match=r"far above the usual 3.02 for 3 rounds and is 9 in round 23") as diverged:
        watch.judge(figures(23, 9.0))
    assert diverged.value.good_round == 19  # the loss of round 21 is that of the state after round 20


def test_a_spike_of_fewer_rounds_is_let_pass() -> None:
    watch = fed(*usual, 9.0, 9.0, 3.1, 9.0, 3.0)
    assert not watch.suspects


def test_a_step_that_is_too_large_is_not_taken() -> None:
    watch = fed(*usual)
    watch.judge(figures(21, step_norm=50.0))
    with pytest.raises(Diverged, match=r"the step of round 21 has the norm 100 and 1 was usual") as diverged:
        watch.judge(figures(21, step_norm=100.0))
    assert diverged.value.good_round == 20


@pytest.mark.parametrize(("loss", "norm", "good"), [(math.nan, 1.0, 0), (3.0, math.inf, 1), (3.0, math.nan, 1)])
def test_what_is_not_finite_is_noticed_at_once(loss: float, norm: float, good: int) -> None:
    with pytest.raises(Diverged, match="must be finite") as diverged:
        fed(3.0).judge(figures(2, loss, norm))
    assert diverged.value.good_round == good


def test_it_can_be_turned_off() -> None:
    watch = fed(*usual, *[1e9] * 5, config=DivergenceConfig(watch=False))
    watch.judge(figures(26, math.nan, math.inf))
    assert not watch.suspects


def test_a_slow_rise_is_noticed_although_the_median_rises_with_it() -> None:
    with pytest.raises(Diverged, match="for 3 rounds"):
        fed(*usual, *usual, *(3.0 + 0.05 * i for i in range(80)))


def test_text_of_another_kind_after_a_window_of_one_kind_is_no_divergence() -> None:
    """Losses of one worker's batches on a corpus whose documents come one after another, measured: code at 3.1 nats,
    48 rounds of tables at 2.0, then prose at 4.3 that nothing was like before."""
    noise = random.Random(1)
    code = [3.1 + noise.uniform(-0.4, 0.4) for _ in range(300)]
    tables = [2.0 + noise.uniform(-0.15, 0.15) for _ in range(48)]
    prose = [4.29, 4.60, 4.06, 4.27, 4.23, 3.56, 3.96, 3.83]
    assert not fed(*code, *tables, *prose).suspects
    with pytest.raises(Diverged, match=r"far above the usual 1\.999 for 3 rounds"):
        fed(*code, *tables, 5.4, 5.5, 5.9)


def test_what_was_committed_before_a_restart_counts_the_same() -> None:
    rounds = [figures(i + 1, loss) for i, loss in enumerate([*usual, 9.0, 9.0])]
    with pytest.raises(Diverged):
        DivergenceWatch(config, rounds).judge(figures(23, 9.0))


@given(st.integers(0, 10_000), st.floats(0.0, 0.5), st.sampled_from(["falling", "warm-up", "level"]))
@settings(max_examples=60, deadline=None)
def test_ordinary_training_is_never_taken_for_divergence(seed: int, noise: float, shape: str) -> None:
    """Noise of up to a half of the loss, a late spike of twice its value, steps that grow with the rate or momentum."""
    chance = random.Random(seed)
    watch = DivergenceWatch(config)
    for round in range(1, 120):
        falling = 3.0 + 7.0 * math.exp(-round / 20) if shape == "falling" else 3.0
        loss = falling * (1 + noise * chance.uniform(-1, 1)) * (2.0 if round in (70, 71) else 1.0)
        rate = round / 60 if shape == "warm-up" else 10.0 - 9.0 * 0.9**round
        now = figures(round, loss, rate * chance.uniform(0.5, 2.0))
        watch.judge(now)
        watch.commit(now)


def test_too_few_rounds_say_nothing() -> None:
    fed(*[1.0] * (min_rounds - 1), 1e9, 1e9, 1e9)


# Runs


def world_of(
    problem: Problem, folder: Path, *, every_rounds: int = 2, inner_steps: int = 2, keep: int = 3, **settings: object
) -> World:
    plan = replace(
        problem.plan(DiLoCo(DiLoCoConfig(num_inner_steps=inner_steps, outer_momentum=0.0))),
        checkpoint=CheckpointConfig(every_rounds=every_rounds, keep=keep),
        divergence=DivergenceConfig(**settings),  # pyright: ignore[reportArgumentType]
    )
    return World(plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)


def problem_of(num_rounds: int) -> Problem:
    return Problem(num_rounds=num_rounds, validate=False, fleet=FleetConfig(min_workers=2, no_progress_s=60.0))


def spoil(
    monkeypatch: pytest.MonkeyPatch, *, update: Callable[[int], float] = lambda _: 1.0,
    loss: Callable[[int], float] = lambda _: 1.0,
) -> None:  # fmt: skip
    """Update and loss of every task times a factor, the tasks counted from 1 in the order they are done."""
    done = 0
    honest = diloco.inner.function

    def spoilt(replica: object, **arguments: object) -> Result:
        nonlocal done
        done += 1
        result = honest(replica, **arguments)
        scalars = {**result.scalars, "loss_sum": loss(done) * float(result.scalars["loss_sum"])}
        return replace(result, scalars=scalars, tensors={"delta": update(done) * result.tensors["delta"]})

    monkeypatch.setitem(vars(diloco.inner), "function", spoilt)


def accounted(world: World) -> None:
    """Tokens, contributions and data agree with the state that the run ended with."""
    assert world.last is not None and world.last.state is not None
    state = world.last.state
    assert sum(row["tokens"] for row in world.last.contributions()) == state.tokens
    (epoch,) = world.last.deck.account()
    consumed = epoch["epoch"] * 8 * 32 + epoch["consumed"]  # shards, sequences
    assert (consumed * 8, epoch["outstanding"]) == (state.tokens, 0)
    assert state.tokens == state.round * 2 * 2 * 4 * 8  # rounds, workers, steps, batch, sequence


def test_an_update_that_explodes_is_not_taken_and_the_second_time_the_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two workers sends finite updates of ten thousand times their size in rounds 12 and 15."""
    spoil(monkeypatch, update=lambda number: 1e4 if number in (23, 31) else 1.0)

    async def main() -> World:
        world = world_of(problem_of(20), tmp_path)
        for name in ("w1", "w2"):
            world.add(name, cost_s=cost_s)
        await world.start()
        with pytest.raises(RunStopped, match=r"step of round 15 .* was usual, after 1 times .* stands at round 14"):
            await world.finish()
        return world

    world = run_virtual(main())
    back = [e for e in world.events if e.kind == "rolled_back"]
    assert [e.detail["round"] for e in back] == [11, 14]
    assert "the step of round 12 has the norm" in back[0].text
    assert world.last is not None
    assert [(o.kind, o.round, o.value["to_round"]) for o in world.last.operations] == [
        ("roll_back", 11, 11), ("roll_back", 14, 14),
    ]  # fmt: skip
    accounted(world)


def diverging(folder: Path, monkeypatch: pytest.MonkeyPatch, *, dies_in: str = "") -> World:
    """The loss of rounds 13 to 15 is four times what it was; the coordinator may die on its way back."""
    spoil(monkeypatch, loss=lambda number: 4.0 if 25 <= number <= 30 else 1.0)

    async def main() -> World:
        world = world_of(problem_of(20), folder, every_rounds=4)
        for name in ("w1", "w2"):
            world.add(name, cost_s=cost_s)
        await world.start()
        if dies_in:
            await die_once(world, dies_in)
        await world.finish()
        return world

    return run_virtual(main())


async def die_once(world: World, where: str) -> None:
    """Let the coordinator die before or after the transaction that goes back, and start again."""
    assert world.run is not None
    ledger, reached = world.run.ledger, asyncio.Event()
    honest = ledger.roll_back

    def dying(*arguments: Any, **named: Any) -> None:
        if where == "after":
            honest(*arguments, **named)
        reached.set()
        raise RoundFailed("the coordinator is about to die here")

    ledger.roll_back = dying  # type: ignore[method-assign]
    await reached.wait()
    with contextlib.suppress(RoundFailed):
        await world.crash_coordinator()
    await world.clock.sleep(1.0)
    await world.start()


@pytest.fixture(scope="module")
def came_back(tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        return diverging(tmp_path_factory.mktemp("came-back"), patch)


def last_params(world: World) -> torch.Tensor:
    assert world.last is not None and world.last.state is not None
    return world.last.params.read(world.last.state.params)


def test_a_loss_that_explodes_sends_the_run_back_to_a_checkpoint_and_it_goes_on(came_back: World) -> None:
    (back,) = [e for e in came_back.events if e.kind == "rolled_back"]
    assert back.text.startswith("the loss has been far above the usual 3.")
    assert back.detail["round"] == 8  # the checkpoint of round 12 is of the state that gave round 13 its loss
    rounds = [e.detail["round"] for e in came_back.events if e.kind == "round"]
    assert rounds == [*range(1, 15), *range(9, 21)]
    accounted(came_back)
    saved = [e.detail["round"] for e in came_back.events if e.kind == "checkpoint"]
    assert saved == [4, 8, 12, 12, 16, 20]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_coordinator_that_dies_on_the_way_back_ends_where_it_would_have(
    where: str, came_back: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = diverging(tmp_path, monkeypatch, dies_in=where)
    assert world.last is not None
    assert [(o.kind, o.value["to_round"]) for o in world.last.operations] == [("roll_back", 8)]
    accounted(world)
    assert torch.equal(last_params(world), last_params(came_back))


def test_a_run_that_is_stopped_while_its_loss_is_suspected_keeps_the_checkpoint_it_may_have_to_go_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of rounds 14 to 16 is four times what it was, and the run is stopped after round 14."""
    spoil(monkeypatch, loss=lambda number: 4.0 if 27 <= number <= 32 else 1.0)

    async def main(*, stops_after: int) -> World:
        world = world_of(problem_of(20), tmp_path, every_rounds=4, keep=1)

        def stop(event: Event) -> None:
            if event.kind == "round" and event.detail["round"] == stops_after and world.run is not None:
                world.run.stop("asked to")

        world.on_event = stop
        for name in ("w1", "w2"):
            world.add(name, cost_s=cost_s)
        await world.start()
        await world.finish()
        return world

    stopped = run_virtual(main(stops_after=14))
    assert stopped.last is not None and stopped.last.checkpoints.names() == ("round-000012", "round-000014")
    world = run_virtual(main(stops_after=0))
    assert [e.detail["round"] for e in world.events if e.kind == "rolled_back"] == [12]
    accounted(world)
    assert world.last is not None and world.last.checkpoints.names() == ("round-000020",)


def test_a_validation_that_is_done_again_after_a_roll_back_is_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 9 is validated before the run goes back to round 8, and when it is done again."""
    spoil(monkeypatch, loss=lambda number: 4.0 if 25 <= number <= 30 else 1.0)
    problem = problem_of(16)
    problem.validate = True
    given: list[tuple[int, int, str]] = []

    def noted(lease: pb.Lease) -> float:
        if lease.held_out:
            given.append((lease.round, lease.attempt, lease.key))
        return cost_s(lease)

    async def main() -> World:
        world = world_of(problem, tmp_path, every_rounds=4)
        world.plan = replace(world.plan, validation=ValidationConfig(every_rounds=3))
        for name in ("w1", "w2"):
            world.add(name, cost_s=noted)
        await world.start()
        await world.finish()
        return world

    world = run_virtual(main())
    assert [e.detail["round"] for e in world.events if e.kind == "validation"] == [0, 3, 6, 9, 12, 9, 12, 15, 16]
    assert len(given) == len(set(given))


def test_a_learning_rate_that_diverges_is_noticed(tmp_path: Path) -> None:
    """It rises to a thousand times what this model bears. With less it depends on the processor what comes of it."""
    problem = problem_of(56)
    problem.inner = problem.inner.model_copy(update={"lr": 30.0, "warmup": 0.95})

    async def main() -> World:
        world = world_of(problem, tmp_path)
        for name in ("w1", "w2"):
            world.add(name, cost_s=cost_s)
        await world.start()
        with pytest.raises(RunStopped, match=r"far above the usual .* after 1 times .* look for what is wrong"):
            await world.finish()
        return world

    world = run_virtual(main())
    assert len([e for e in world.events if e.kind == "rolled_back"]) == 2
    accounted(world)


def test_a_loss_that_is_not_finite_on_every_worker_stops_the_run_at_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(replica: object, **arguments: object) -> Result:
        raise NotFinite("the loss is nan at inner step 3")

    async def main() -> World:
        world = world_of(problem_of(20), tmp_path)
        for name in ("w1", "w2"):
            world.add(name, cost_s=cost_s)
        await world.start()
        while world.run is None or world.run.state is None or world.run.state.round < 5:
            await world.clock.sleep(0.1)
        monkeypatch.setitem(vars(diloco.inner), "function", overflow)
        with pytest.raises(RunStopped, match=r"the loss is nan .* it stands at round 2"):
            await world.finish()
        return world

    world = run_virtual(main())
    assert [e.detail["round"] for e in world.events if e.kind == "rolled_back"] == [4, 2]
    accounted(world)
