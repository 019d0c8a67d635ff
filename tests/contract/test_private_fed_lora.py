"""Whole runs of FFA-LoRA with differential privacy: what they compute, what leaves, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.lora_references import Owner
from torch import Tensor
from torch.nn.functional import cross_entropy

from potluck.clock import VirtualClock, run_virtual
from potluck.contract import checks
from potluck.contract.checks import cost_s
from potluck.fleet.intake import Intake
from potluck.fleet.roster import Member
from potluck.models.config import AdapterConfig
from potluck.optim.accounting import PrivateSteps, epsilon
from potluck.optim.inner import InnerConfig, learning_rate
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.storage.objects import ObjectStore
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig
from potluck.strategies.run import RunSpec
from potluck.transport.memory import Link
from potluck.types.ids import WorkerId
from potluck.worker.privacy_ledger import PrivacyLedger
from potluck.worker.sources import Sources

adapter = AdapterConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
num_steps = 3
PRIVACY = {"max_epsilon": 1e4, "delta": 1e-5, "noise_multiplier": 1.0, "clip": 0.1}


def problem_of(*, batch_size: int = 4, num_rounds: int = 3, **changes: Any) -> Problem:
    inner = InnerConfig(lr=1e-2, batch_size=batch_size, warmup=0.1, weight_decay=0.1)
    return Problem(family="llama", adapter=adapter, inner=inner, num_rounds=num_rounds, private=True, **changes)


def making(**privacy: float) -> Callable[[], FedLoRA]:
    settings = {"rule": "ffa", "num_inner_steps": num_steps, "privacy": {**PRIVACY, **privacy}}
    return lambda: FedLoRA(FedLoRAConfig.model_validate(settings))


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem], None]:
    """Workers bring the records of a problem, in the order in which they come."""

    def bring(problem: Problem) -> None:
        def prepare(spec: RunSpec, objects: ObjectStore, *, cache_dir: Path, **_: Any) -> Sources:
            worker = next(part for part in cache_dir.parts if part.startswith("w") and part[1:2].isdigit())
            own = problem.own_records(int(worker[1]) - 1, cache_dir)
            return Sources(spec=spec, objects=objects, own=own)

        monkeypatch.setattr("potluck.worker.equip.prepare_sources", prepare)

    return bring


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[pb.Report]:
    """All that workers say to the coordinator."""
    heard: list[pb.Report] = []
    plain = Intake.report

    def report(self: Intake, member: Member, said: pb.Report) -> None:
        heard.append(pb.Report.FromString(said.SerializeToString()))
        plain(self, member, said)

    monkeypatch.setattr(Intake, "report", report)
    return heard


def play(
    problem: Problem, folder: Path, *, num_workers: int = 2, min_workers: int = 0,
    disturb: Callable[[World], Awaitable[None]] | None = None, **privacy: float,
) -> tuple[World, Tensor]:  # fmt: skip
    """The world afterwards, and the parameters."""
    problem.fleet = problem.fleet.model_copy(update={"min_workers": min_workers or num_workers})

    async def main() -> tuple[World, Tensor]:
        world = World(
            problem.plan(making(**privacy)()), problem.make_deck, folder, clock=VirtualClock(),
            make_executor=checks.InlineExecutor,
        )  # fmt: skip
        for i in range(num_workers):
            world.add(f"w{i + 1}", link=Link(up_bytes_per_s=2e5, down_bytes_per_s=1e6, rtt_s=0.05), cost_s=cost_s)
        await world.start()
        if disturb is not None:
            await disturb(world)
        state = await world.finish()
        assert world.last is not None
        return world, world.last.params.read(state.params)

    return run_virtual(main())


def num_counted(world: World, worker: str) -> int:
    path = PrivacyLedger.path(world.disk(worker), "contract")
    return sum(row[0] for row in json.loads(path.read_bytes())["steps"]) if path.exists() else 0


def rounds_of(world: World) -> list[dict[str, Any]]:
    return [dict(event.detail) for event in world.events if event.kind == "round"]


def test_without_noise_to_speak_of_and_whole_samples_it_is_plain_peft(
    brought: Callable[[Problem], None], tmp_path: Path
) -> None:
    """Two owners: every step is on all of an owner's records, then the mean of B."""
    problem = problem_of(batch_size=32)
    brought(problem)
    _, got = play(problem, tmp_path, noise_multiplier=1e-12, clip=1e3, max_epsilon=1e300)
    owners = [Owner(problem, adapter.rank) for _ in range(2)]
    factors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(problem.seed)
    for name, layer in owners[0].layers.items():
        drawn = torch.nn.init.kaiming_uniform_(torch.empty(4, 16), a=5**0.5, generator=generator)
        for owner in owners:
            owner.layers[name].lora_A["default"].weight.data.copy_(drawn)
        factors[name] = layer.lora_B["default"].weight.detach().clone()
    for owner in owners:
        owner.train_only("B")
    for round in range(problem.num_rounds):
        ended: list[dict[str, Tensor]] = []
        for owner, rows in zip(owners, problem.shards, strict=False):
            for name, layer in owner.layers.items():
                layer.lora_B["default"].weight.data.copy_(factors[name])
            for step in range(num_steps):
                progress = (round + step / num_steps) / problem.num_rounds
                owner.optimizer.param_groups[0]["lr"] = learning_rate(problem.inner, progress)
                owner.optimizer.zero_grad()
                logits = owner.model(input_ids=rows[:, :-1].long()).logits
                cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1).long()).backward()
                owner.optimizer.step()
            ended.append({n: x.lora_B["default"].weight.detach().clone() for n, x in owner.layers.items()})
        factors = {name: (ended[0][name] + ended[1][name]) / 2 for name in factors}
    layout = problem.plan(making()()).layout
    for tensor in layout:
        if ".lora_B." in tensor.name:
            found = got[tensor.offset : tensor.stop].view(tensor.shape)
            torch.testing.assert_close(found, factors[tensor.name.partition(".lora_B.")[0]], rtol=0, atol=2e-5)
            assert found.abs().max() > 5e-3


def test_nothing_that_leaves_but_b_depends_on_the_records(
    brought: Callable[[Problem], None], reports: list[pb.Report], tmp_path: Path
) -> None:
    said: list[list[Any]] = []
    for seed in (7, 8):  # of the records as well
        problem = problem_of()
        problem.shards = Problem(seed=seed).shards
        brought(problem)
        play(problem, tmp_path / str(seed))
        results = {(r.key, r.round): json.loads(r.scalars_json) for report in reports for r in report.results}
        said.append(sorted(results.items()))
        assert all(not report.note for report in reports)
        assert len(results) == 2 * problem.num_rounds
        reports.clear()
    assert said[0] == said[1]
    for _, scalars in said[0]:
        assert scalars.keys() == {"num_tokens", "num_steps", "epsilon"}
        assert (scalars["num_tokens"], scalars["num_steps"]) == (num_steps * 4 * 8, num_steps)


def test_what_it_cost_is_told_each_round_and_its_loss_is_not(
    brought: Callable[[Problem], None], tmp_path: Path
) -> None:
    problem = problem_of()
    brought(problem)
    world, _ = play(problem, tmp_path)
    assert world.last is not None and world.last.state is not None
    assert world.last.state.loss is None and world.last.losses == {}
    for number, each in enumerate(rounds_of(world), start=1):
        spent = [PrivateSteps(num_steps=number * num_steps, rate=4 / 32, noise_multiplier=1.0)]
        assert each["loss"] is None
        assert each["figures"] == dict.fromkeys(["epsilon", "epsilon/w1", "epsilon/w2"], epsilon(spent, 1e-5))
    texts = [event.text for event in world.events if event.kind == "round"]
    assert all("epsilon " in text and "loss" not in text for text in texts)
    assert not [event for event in world.events if event.kind in ("validation", "note")]
    for host in world.hosts.values():
        told = [text for text in host.notes if "is spent, in" in text]
        assert len(told) == 1 + problem.num_rounds  # at the start too
        assert told[-1].startswith(f"privacy: epsilon {rounds_of(world)[-1]['figures']['epsilon']:.3f} of 10000")


def test_who_has_spent_the_budget_leaves_and_the_rest_goes_on(
    brought: Callable[[Problem], None], reports: list[pb.Report], tmp_path: Path
) -> None:
    problem = problem_of(num_rounds=6)
    problem.shards[1] = problem.shards[1][:16]  # of fewer records each is in more samples
    brought(problem)
    spent = [PrivateSteps(num_steps=5, rate=4 / 16, noise_multiplier=1.0)]
    world, _ = play(problem, tmp_path, min_workers=1, max_epsilon=epsilon(spent, 1e-5) + 1e-6)
    both = [each["workers"] == ["w1", "w2"] for each in rounds_of(world)]
    assert sum(both) == 2 and not any(both[-2:])
    assert (num_counted(world, "w1"), num_counted(world, "w2")) == (6 * num_steps, 5)
    assert all(each["figures"]["epsilon"] <= epsilon(spent, 1e-5) for each in rounds_of(world))
    (last,) = [report for report in reports if report.leaving]
    assert "another step would cost the owner of this worker more privacy than the run's epsilon" in last.note
    left = [event for event in world.events if event.kind == "left"]
    assert [event.detail["worker"] for event in left][:1] == ["w2"]


def test_the_ledger_only_grows_whoever_is_killed(brought: Callable[[Problem], None], tmp_path: Path) -> None:
    problem = problem_of(num_rounds=6)
    problem.fleet = problem.fleet.model_copy(update={"snapshot_every_steps": 1})
    brought(problem)
    seen: list[int] = []

    async def disturb(world: World) -> None:
        for number in range(5):
            await world.clock.sleep(2.3)
            seen.append(num_counted(world, "w1"))
            if world.training_is_over:
                return
            if number % 2:
                await world.crash_coordinator()
                await world.clock.sleep(1.0)
                await world.start()
            await world.crash("w1")
            seen.append(num_counted(world, "w1"))
            world.switch_on(WorkerId("w1"))

    world, _ = play(problem, tmp_path, disturb=disturb)
    seen.append(num_counted(world, "w1"))
    assert seen == sorted(seen) and len(set(seen)) > 3
    assert seen[-1] >= problem.num_rounds * num_steps
    figures = [each["figures"]["epsilon/w1"] for each in rounds_of(world)]
    assert figures == sorted(figures) and len(figures) >= problem.num_rounds
    assert world.last is not None and world.last.state is not None and world.last.state.loss is None


def test_a_worker_whose_ledger_is_gone_takes_no_part_any_more(
    brought: Callable[[Problem], None], tmp_path: Path
) -> None:
    problem = problem_of(num_rounds=4)
    brought(problem)

    async def disturb(world: World) -> None:
        while not rounds_of(world):
            await world.clock.sleep(0.1)
        world.kill("w1")
        PrivacyLedger.path(world.disk("w1"), "contract").unlink()
        world.switch_on(WorkerId("w1"))
        task = world.hosts[WorkerId("w1")].task
        assert task is not None
        with pytest.raises(Exception, match=r"has trained in the run and .* is missing"):
            await task
        world.hosts[WorkerId("w1")].task = None

    world, _ = play(problem, tmp_path, min_workers=1, disturb=disturb)
    assert rounds_of(world)[-1]["workers"] == ["w2"]


def test_it_moves_what_it_says(brought: Callable[[Problem], None]) -> None:
    problem = problem_of(up_codec="int8", down_codec="bf16")
    brought(problem)
    checks.moves_what_it_says(problem, making())
