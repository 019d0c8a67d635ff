"""The five checks. Each takes a way to make the strategy and raises `Broken` with what it found.

1. one worker and no loss equals a plain local PyTorch reference
2. it converges with 20 % of tasks lost and a worker that vanishes for good
3. stop and resume, also in the middle of a round, equals never having stopped
4. the same seed gives the same trace on the virtual clock
5. the bytes it says it will move equal the bytes counted on the memory transport, and its workers keep no more vectors
   of the model's size than it says
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from potluck.clock import InlineExecutor, SystemClock, ThreadExecutor, VirtualClock, run_virtual
from potluck.coordinator.plan import Plan
from potluck.protocol import pb
from potluck.simulator.exact.networks import Sockets
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes, Strategy
from potluck.transport.memory import Link
from potluck.types.ids import WorkerId
from potluck.types.params import Params
from potluck.worker.replica import KEPT

MakeStrategy = Callable[[], Strategy]
Reference = Callable[[Problem], Tensor]
"""A plain PyTorch loop over `problem.num_rounds` rounds of one worker: the parameters it ends with, flat fp32."""

step_cost_s = 1.0
real_pace = 0.01
T = TypeVar("T")


class Broken(AssertionError):
    """A strategy does not keep the contract."""


@dataclass(frozen=True)
class Outcome:
    """What a run in a world ended with."""

    state: State
    params: Tensor
    losses: dict[int, float]  # validation, by round
    round_losses: list[Any]  # training, of every round; None where it is withheld
    trace: list[tuple[float, str]]
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]
    kept: dict[WorkerId, set[str]]  # by worker, the names of what its states hold of the method's own


def cost_s(lease: pb.Lease) -> float:
    """A device that takes a second for four sequences."""
    return step_cost_s * max(lease.num_sequences, 1) / 4.0


class PacedThreads(ThreadExecutor):
    """Real threads on a device so much slower than they are; a hundredth of the modelled time, to spare real time."""

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        result = await super().run(fn, *args)
        await asyncio.sleep(cost_s * real_pace)
        return result


async def play(
    problem: Problem,
    make: MakeStrategy,
    folder: Path,
    *,
    num_workers: int,
    min_workers: int | None = None,
    sockets: bool = False,
    disturb: Callable[[World], Awaitable[None]] | None = None,
    costs: Callable[[int], Callable[[pb.Lease], float]] = lambda _: cost_s,
    memory: Callable[[int], int] = lambda _: 0,
) -> Outcome:
    """A whole run: start, let `disturb` do its worst, wait for the end. `memory`: bytes of a worker, 0 for enough."""
    problem.fleet = problem.fleet.model_copy(update={"min_workers": min_workers or num_workers})
    clock, executor = (SystemClock(), PacedThreads) if sockets else (VirtualClock(), InlineExecutor)
    world = World(
        problem.plan(make()),
        problem.make_deck,
        folder,
        clock=clock,
        make_executor=executor,
        network=Sockets() if sockets else None,
    )
    for i in range(num_workers):
        world.add(
            f"w{i + 1}", link=Link(up_bytes_per_s=2e5, down_bytes_per_s=1e6, rtt_s=0.05), cost_s=costs(i),
            max_memory_bytes=memory(i),
        )  # fmt: skip
    await world.clock.sleep(1.0)
    await world.start()
    if disturb is not None:
        await disturb(world)
    state = await world.finish()
    assert world.last is not None
    return Outcome(
        state=state,
        params=world.last.params.read(state.params),
        losses=dict(world.last.losses),
        round_losses=[e.detail["loss"] for e in world.events if e.kind == "round"],
        trace=world.trace,
        bytes_up=dict(world.object_bytes_up),
        bytes_down=dict(world.object_bytes_down),
        kept={id: _kept(world.disk(id)) for id in world.hosts},
    )


def _kept(disk: Path) -> set[str]:
    found: set[str] = set()
    for path in disk.glob("runs/*/local/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(name for name in file.keys() if name.startswith(KEPT))  # noqa: SIM118
    return found


def run(problem: Problem, make: MakeStrategy, **options: Any) -> Outcome:
    """`play` in a fresh folder: on a virtual clock, or with `sockets` over gRPC on a real one."""
    with tempfile.TemporaryDirectory(prefix="potluck-contract-") as folder:
        playing = play(problem, make, Path(folder), **options)
        return asyncio.run(playing) if options.get("sockets") else run_virtual(playing)


def equals_reference(
    problem: Problem, make: MakeStrategy, reference: Reference, *, tolerance: float = 2e-6, sockets: bool = False
) -> None:
    """Check 1. `tolerance` bounds the largest difference of any parameter."""
    got = run(problem, make, num_workers=1, sockets=sockets)
    expected = reference(problem)
    difference = (got.params - expected).abs().max().item()
    start = torch.nn.utils.parameters_to_vector(p for p in problem.model().parameters() if p.requires_grad)
    if (expected - start).abs().max().item() < 100 * tolerance:
        raise Broken("the reference hardly moves the parameters, so that equality would prove nothing")
    if not difference <= tolerance:
        raise Broken(f"one worker differs from the plain loop by {difference:.2e}, more than {tolerance:.0e}")


def survives_losses(
    problem: Problem, make: MakeStrategy, *, num_workers: int = 4, share_lost: float = 0.2, falls_to: float = 0.95,
    sockets: bool = False,
) -> None:  # fmt: skip
    """Check 2: tasks hang until they are given up on, one worker goes for good; the loss falls to that share."""
    chance = random.Random(problem.seed)
    if sockets:
        problem.fleet = problem.fleet.model_copy(update={"no_progress_s": 1.0, "heartbeat_s": 0.3, "reconnect_s": 1.0})
    hang_s = 2.0 * problem.fleet.no_progress_s / (real_pace if sockets else 1.0)

    def costs(_: int) -> Callable[[pb.Lease], float]:
        return lambda lease: hang_s if lease.num_sequences and chance.random() < share_lost else cost_s(lease)

    async def disturb(world: World) -> None:
        while world.run is None or world.run.state is None or world.run.state.round < 1:
            await world.clock.sleep(0.1)
        await world.crash(f"w{num_workers}")

    got = run(problem, make, num_workers=num_workers, min_workers=1, disturb=disturb, costs=costs, sockets=sockets)
    first, last = got.losses[0], got.losses[max(got.losses)]
    if got.state.round != problem.num_rounds:
        raise Broken(f"the run ended after {got.state.round} of {problem.num_rounds} rounds")
    if not last < falls_to * first:
        raise Broken(f"with {share_lost:.0%} of tasks lost the loss went from {first:.3f} to {last:.3f}")


def resumes_exactly(
    problem: Problem,
    make: MakeStrategy,
    *,
    num_workers: int = 2,
    moments: Sequence[float] = (0.3, 0.55, 0.8),
    tolerance: float = 0.0,
    sockets: bool = False,
) -> None:
    """Check 3. The coordinator dies at shares of the run's time, once with its workers and once without."""
    undisturbed = run(problem, make, num_workers=num_workers, sockets=sockets)
    took_s = undisturbed.trace[-1][0] - undisturbed.trace[0][0]
    for with_workers in (False, True):

        async def disturb(world: World, with_workers: bool = with_workers) -> None:
            begun, passed = world.clock.now(), 0.0
            for moment in moments:
                await world.clock.sleep(max(moment * took_s - passed, 0.0))
                if world.training_is_over:
                    return
                await world.crash_coordinator()
                if with_workers:
                    for id in list(world.hosts):
                        await world.crash(id)
                        world.switch_on(id)
                await world.clock.sleep(1.0)
                await world.start()
                passed = world.clock.now() - begun

        got = run(problem, make, num_workers=num_workers, disturb=disturb, sockets=sockets)
        difference = (got.params - undisturbed.params).abs().max().item()
        if not difference <= tolerance:
            who = "coordinator and workers" if with_workers else "coordinator"
            raise Broken(f"after restarts of the {who} the parameters differ by {difference:.2e}")
        if got.state.tokens != undisturbed.state.tokens:
            raise Broken(f"{got.state.tokens} tokens after restarts and {undisturbed.state.tokens} without")


def same_trace(
    problem: Problem, make: MakeStrategy, *, num_workers: int = 3, tolerance: float = 0.0, sockets: bool = False
) -> None:
    """Check 4. On a real clock events come when they come: there the losses and the parameters must be the same, up to
    `tolerance` where what is done by whom depends on the clock.
    """
    one, two = (run(problem, make, num_workers=num_workers, sockets=sockets) for _ in range(2))
    allowed = tolerance if sockets else 0.0
    if max(abs(a - b) for a, b in zip(one.round_losses, two.round_losses, strict=True)) > allowed:
        raise Broken(f"two runs have the losses {one.round_losses} and {two.round_losses}")
    if one.trace != two.trace and not sockets:
        at = next((i for i, (a, b) in enumerate(zip(one.trace, two.trace, strict=False)) if a != b), -1)
        raise Broken(f"two runs differ from event {at}: {one.trace[at]} and {two.trace[at]}")
    if not (one.params - two.params).abs().max().item() <= allowed:
        raise Broken("two runs with the same trace have different parameters")


def moves_what_it_says(problem: Problem, make: MakeStrategy, *, num_workers: int = 2, sockets: bool = False) -> None:
    """Check 5: objects of the model's size, for each worker over the whole run."""
    problem.validate = False  # validation moves one more version
    problem.inner = problem.inner.model_copy(update={"warmup": 0.0})  # a step of rate 0 makes no new version to move
    strategy = make()
    plan = problem.plan(strategy)
    facts, rounds = facts_of(plan), problem.num_rounds
    said = strategy.estimate(facts)
    total = getattr(strategy, "total", None)  # whose rounds are not all alike
    expected = total(facts, rounds) if total else RoundBytes(up=said.up * rounds, down=said.down * rounds)
    got = run(problem, make, num_workers=num_workers, sockets=sockets)
    for id in (f"w{i + 1}" for i in range(num_workers)):
        counted = (got.bytes_up.get(id, 0), got.bytes_down.get(id, 0))
        if counted != (expected.up, expected.down):
            raise Broken(f"{id} moved {counted} bytes up and down in {rounds} rounds and said {expected}")
        if len(kept := got.kept[WorkerId(id)]) > plan.spec.kept_vectors:
            raise Broken(f"{id} keeps {sorted(kept)} and `kept_vectors` says {plan.spec.kept_vectors:g}")


def facts_of(plan: Plan) -> RunFacts:
    """What a strategy may know of a run whose parameters are nowhere yet."""
    nothing = Params(())
    return plan.facts(initial=nothing, zeros=nothing)
