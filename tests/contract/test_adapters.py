"""Methods that know nothing of adapters train them: against plain PEFT, and through what a run may meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import references
from torch import Tensor
from worlds import virtual_world

import potluck.simulator.exact.world as world_module
from potluck.clock import run_virtual
from potluck.contract import checks
from potluck.models.config import AdapterConfig
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.run import RunSpec
from potluck.strategies.strategy import Strategy
from potluck.strategies.zeroth_order import ZerothOrder, ZerothOrderConfig
from potluck.transport.memory import Link
from potluck.types.errors import ModelError
from potluck.types.ids import WorkerId
from potluck.worker.equip import equip

diloco_settings: dict[str, Any] = {"num_inner_steps": 5, "outer_lr": 0.7, "outer_momentum": 0.6}
adapters = {
    "gpt2": AdapterConfig(rank=4, alpha=8, target_modules=("c_attn", "c_fc")),
    "llama": AdapterConfig(rank=3, alpha=6, rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
}


def make_fed_avg() -> Strategy:
    return FedAvg(FedAvgConfig(num_inner_steps=5))


def make_diloco() -> Strategy:
    return DiLoCo(DiLoCoConfig(**diloco_settings))


methods: dict[str, tuple[Callable[[], Strategy], Callable[[Problem], Tensor]]] = {
    "fed_avg": (make_fed_avg, lambda problem: references.fed_avg(problem, [[5]] * problem.num_rounds)),
    "diloco": (make_diloco, lambda problem: references.diloco(problem, **diloco_settings)),
}


def problem_of(family: str = "llama", **changes: Any) -> Problem:
    inner = InnerConfig(lr=1e-2, batch_size=4, warmup=0.1, weight_decay=0.1)
    return Problem(family=family, adapter=adapters[family], inner=inner, **{"num_rounds": 3, **changes})


@pytest.mark.parametrize(("method", "family"), [("fed_avg", "gpt2"), ("fed_avg", "llama"), ("diloco", "llama")])
def test_one_worker_equals_plain_peft(method: str, family: str, tmp_path: Path) -> None:
    make, reference = methods[method]
    problem = problem_of(family)
    problem.store_shards(tmp_path)
    checks.equals_reference(problem, make, reference)


def test_a_base_held_in_fewer_bits_learns_alike() -> None:
    losses: dict[str, list[float]] = {}
    for base in ("fp32", "bf16", "int8"):
        problem = problem_of(base=base)
        problem.inner = problem.inner.model_copy(update={"lr": 0.1})
        losses[base] = checks.run(problem, make_fed_avg, num_workers=1).round_losses
        assert losses[base][-1] < losses[base][0] - 0.02
        assert losses[base] == pytest.approx(losses["fp32"], abs=0.01)
    assert losses["fp32"] != losses["bf16"] != losses["int8"]


def test_stop_and_resume_changes_nothing() -> None:
    checks.resumes_exactly(problem_of(base="int8"), make_diloco, moments=(0.3, 0.7))


def test_seeds_and_slopes_are_enough_for_adapters() -> None:
    """Zeroth order on an int8 base: no worker sends an object, and none is given one."""
    problem = problem_of(base="int8", num_rounds=12)
    problem.inner = InnerConfig(lr=2.0, batch_size=4, optimizer="sgd", weight_decay=0.0, warmup=0.0)
    got = checks.run(problem, lambda: ZerothOrder(ZerothOrderConfig()), num_workers=2)
    assert not got.bytes_up and got.losses[12] < got.losses[0] - 0.01
    assert not got.bytes_down


def test_only_adapters_travel() -> None:
    """Up and down, to the byte; the base came before the first round and is counted apart."""
    problem = problem_of(up_codec="int8", down_codec="bf16")
    checks.moves_what_it_says(problem, make_diloco)
    layout = problem.plan(make_diloco()).layout
    assert layout.numel < 0.25 * sum(p.numel() for p in problem.model().parameters())
    assert all(".lora_" in spec.name for spec in layout)


def test_a_worker_whose_model_is_another_is_refused_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(spec: RunSpec, *args: Any, folder: Path, **options: Any) -> Any:
        if folder.name == "w2":  # another version of transformers, say: its model has other shapes
            spec = spec.model_copy(update={"model_config_json": {**spec.model_config_json, "intermediate_size": 40}})
        if folder.name == "w3":  # or the coordinator changed its mind about the rank
            assert spec.adapter is not None
            spec = spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"rank": 5})})
        return await equip(spec, *args, folder=folder, **options)

    monkeypatch.setattr(world_module, "equip", elsewhere)
    problem = problem_of()
    problem.fleet = problem.fleet.model_copy(update={"min_workers": 1})
    refused: dict[str, BaseException | None] = {}

    async def main() -> None:
        world = virtual_world(problem, make_fed_avg(), tmp_path)
        for name in ("w1", "w2", "w3"):
            world.add(name, cost_s=checks.cost_s)
        await world.start()
        assert world.training is not None
        state = await world.training
        assert state.round == problem.num_rounds
        for name in ("w2", "w3"):
            task = world.hosts[WorkerId(name)].task
            assert task is not None and task.done()
            refused[name] = task.exception()
            world.kill(name)
        await world.finish()

    run_virtual(main())
    assert isinstance(refused["w2"], ModelError)
    assert "another model's base" in str(refused["w2"])
    assert isinstance(refused["w3"], ModelError)
    assert "the run has [3, 16] as tensor model.layers.0.self_attn.q_proj.lora_A.default.weight" in str(refused["w3"])


def test_a_base_that_changed_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    problem = problem_of(base="bf16")

    async def main() -> None:
        world = virtual_world(problem, make_fed_avg(), tmp_path)
        world.add("w1", cost_s=checks.cost_s)
        await world.start()
        while world.run is None or world.run.state is None or world.run.state.round < 1:
            await world.clock.sleep(0.5)
        await world.crash("w1")
        base = world.plan.spec.base
        assert base is not None
        store = ObjectStore(world.disk("w1") / "runs" / "contract" / "objects")
        path = store.path(base.objects[0].digest)  # pyright: ignore[reportArgumentType]
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        world.switch_on(WorkerId("w1"))
        state = await world.finish()
        assert state.round == problem.num_rounds
        assert any("had become" in note for note in world.hosts[WorkerId("w1")].notes)
        assert world.last is not None
        got.append(world.last.params.read(state.params))

    got: list[Tensor] = []
    run_virtual(main())
    undisturbed = checks.run(problem_of(base="bf16"), make_fed_avg, num_workers=1)
    assert torch.equal(got[0], undisturbed.params)


def test_a_coordinator_that_dies_while_the_base_is_fetched_is_joined_again(tmp_path: Path) -> None:
    problem = problem_of()

    async def main() -> None:
        world = virtual_world(problem, make_fed_avg(), tmp_path)
        base = world.plan.spec.base
        assert base is not None
        world.add("w1", link=Link(down_bytes_per_s=base.num_bytes / 10), cost_s=checks.cost_s)
        await world.start()
        await world.clock.sleep(5.0)
        objects = world.disk("w1") / "runs" / "contract" / "objects"
        arrived = list(objects.glob("blake3-*"))
        assert 1 < len(arrived) < len(base.objects)
        await world.crash_coordinator()
        await world.clock.sleep(1.0)
        await world.start()
        async with asyncio.timeout(300):
            state = await world.finish()
        assert state.round == problem.num_rounds

    run_virtual(main())
