"""Every rule of federated LoRA: against plain PEFT and dense matrices, and through what a run may meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from contract.lora_references import fed_lora

from potluck.contract import checks
from potluck.fleet.config import FleetConfig
from potluck.lora.places import adapted_layers
from potluck.models.adapters import pairs
from potluck.models.config import AdapterConfig
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies import merging
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig, FedLoRAState, RuleName, new_factors_seed, rules
from potluck.worker import agent
from potluck.worker.need import memory_of_rank

plain = AdapterConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
unequal = AdapterConfig(rank=4, alpha=6, rslora=True, lower_ranks=(1, 2), target_modules=("q_proj", "down_proj"))
gpt2 = AdapterConfig(rank=3, alpha=3, target_modules=("c_attn",))
thin = AdapterConfig(rank=1, alpha=2, target_modules=("q_proj", "v_proj"))
num_steps = 3


def problem_of(**changes: Any) -> Problem:
    inner = InnerConfig(lr=1e-2, batch_size=4, warmup=0.1, weight_decay=0.1)
    given: dict[str, Any] = {"family": "llama", "adapter": plain, "inner": inner, "num_rounds": 3, **changes}
    return Problem(**given)


def making(rule: str) -> Callable[[], FedLoRA]:
    return lambda: FedLoRA(FedLoRAConfig.model_validate({"rule": rule, "num_inner_steps": num_steps}))


def memory_for(problem: Problem, rule: str, rank: int) -> int:
    """Bytes with which a worker can train that rank and no higher one."""
    plan = problem.plan(making(rule)())
    need = memory_of_rank(plan.spec, plan.layout, rank, precision="fp32")
    return need.device_bytes + need.kept_bytes


def check_equal(problem: Problem, rule: str, ranks: list[int]) -> None:
    assert problem.adapter is not None
    highest = problem.adapter.rank

    def memory(i: int) -> int:
        return 0 if ranks[i] == highest else memory_for(problem, rule, ranks[i])

    got = checks.run(problem, making(rule), num_workers=len(ranks), memory=memory)
    wanted = fed_lora(
        problem, rule, num_inner_steps=num_steps, ranks=ranks, seed_of=partial(new_factors_seed, problem.seed)
    )
    layout = problem.plan(making(rule)()).layout
    found, layers = pairs(layout, got.params), adapted_layers(layout)
    assert list(found) == list(wanted)
    for name, (a, b) in found.items():
        want, merged = wanted[name], layers[name].merged
        # Components of the SVD are as exact as their singular values are apart; their product is what counts.
        if rule == "flex_lora":
            np.testing.assert_allclose((b @ a).numpy(), want.b @ want.a, atol=2e-6)
        else:
            np.testing.assert_allclose(a.numpy(), want.a, atol=5e-6)
            np.testing.assert_allclose(b.numpy(), want.b, atol=5e-6)
        assert (merged is not None) == (rule in ("flora", "fed_ex"))
        if merged is not None:
            spec = layout.tensors[merged]
            mass = got.params[spec.offset : spec.stop].view(spec.shape).numpy()
            assert np.abs(mass).max() > (1e-4 if rule == "flora" else 1e-7)
            np.testing.assert_allclose(mass, want.merged, atol=2e-6)


@pytest.mark.parametrize("rule", rules)
def test_two_workers_equal_plain_peft_and_dense_matrices(rule: str) -> None:
    check_equal(problem_of(), rule, [4, 4])


@pytest.mark.parametrize("rule", [name for name, rule in rules.items() if rule.takes_unequal_ranks])
def test_unequal_ranks_equal_plain_peft_and_dense_matrices(rule: str) -> None:
    check_equal(problem_of(adapter=unequal), rule, [1, 4, 2])
    check_equal(problem_of(adapter=unequal), rule, [1, 2])


def test_a_worker_tells_its_rank_also_where_nothing_is_known_of_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "differ", lambda *_: False)
    check_equal(problem_of(adapter=unequal), "flex_lora", [4, 2])


def test_components_that_are_pressed_down_are_dropped() -> None:
    """Until nothing is left above the lowest rank; equal to plain PEFT with the penalty as a part of its loss."""
    problem, falls = problem_of(adapter=unequal, num_rounds=6), list[list[int]]()

    def make() -> FedLoRA:
        return FedLoRA(FedLoRAConfig(rule="het_lora", num_inner_steps=num_steps, press=0.3))

    got = checks.run(problem, make, num_workers=2)
    wanted = fed_lora(
        problem, "het_lora", num_inner_steps=num_steps, ranks=[4, 4], seed_of=partial(new_factors_seed, problem.seed),
        press=0.3, fell=falls.append,
    )  # fmt: skip
    assert isinstance(got.state, FedLoRAState)
    assert [got.state.pruned.get(f"w{i + 1}", 4) for i in range(2)] == falls[-1] and min(falls[-1]) < 4
    for name, (a, b) in pairs(problem.plan(make()).layout, got.params).items():
        np.testing.assert_allclose(a.numpy(), wanted[name].a, atol=1e-5)
        np.testing.assert_allclose(b.numpy(), wanted[name].b, atol=1e-5)


@pytest.mark.parametrize("rule", ["fed_ex", "flora", "flex_lora"])
def test_gpt2(rule: str) -> None:
    check_equal(problem_of(family="gpt2", adapter=gpt2), rule, [3, 3])


@pytest.mark.parametrize(("rule", "num_workers", "least"), [("fed_ex", 2, 1), ("flora", 2, 1), ("flora", 1, 3)])
def test_what_is_merged_comes_down_as_factors_and_as_matrices(rule: str, num_workers: int, least: int) -> None:
    """Of rank 1 a round's factors are 112 elements for each worker, and the matrices are 768."""
    fleet = FleetConfig(min_workers=num_workers, no_progress_s=60.0)

    def problem() -> Problem:
        return problem_of(adapter=thin, num_rounds=7, fleet=fleet)

    check_equal(problem(), rule, [1] * num_workers)
    checks.moves_what_it_says(problem(), making(rule), num_workers=num_workers)
    down = list(islice(merging.bytes_down(checks.facts_of(problem().plan(making(rule)())), num_workers), 7))
    factors, matrices = min(down), max(down)
    assert down == ([factors] * least + [matrices]) * (7 // (least + 1)) + down[7 // (least + 1) * (least + 1) :]
    assert factors < 0.5 * matrices


@pytest.mark.parametrize("rule", ["fed_ex", "flora"])
def test_factors_beside_a_downlink_of_differences(rule: str) -> None:
    problem = problem_of(adapter=thin, num_rounds=7, down_codec="int8-delta")
    problem.inner = problem.inner.model_copy(update={"lr": 0.05})
    got = checks.run(problem, making(rule), num_workers=2)
    assert got.losses[7] < got.losses[0] - 0.001


@pytest.mark.parametrize("rule", ["fed_ex", "flora"])
def test_stop_and_resume_with_factors_on_the_way(rule: str) -> None:
    checks.resumes_exactly(problem_of(adapter=thin, num_rounds=6), making(rule), moments=(0.2, 0.6))


@pytest.mark.parametrize("rule", rules)
def test_it_learns_and_loses_nothing(rule: str) -> None:
    problem = problem_of(num_rounds=8)
    problem.inner = problem.inner.model_copy(update={"lr": 0.05})
    got = checks.run(problem, making(rule), num_workers=2)
    assert got.losses[8] < got.losses[0] - 0.01


@pytest.mark.parametrize("rule", rules)
def test_it_moves_what_it_says(rule: str) -> None:
    checks.moves_what_it_says(problem_of(up_codec="int8", down_codec="bf16"), making(rule))


@pytest.mark.parametrize("rule", ["ffa", "ro_lora", "fed_sa"])
def test_what_stays_does_not_travel(rule: str) -> None:
    facts = checks.facts_of(problem_of().plan(making(rule)()))
    both, one = (making(each)().total(facts, 100) for each in ("fed_it", rule))
    assert one.up < 0.6 * both.up
    assert one.down < 0.6 * both.down


@pytest.mark.parametrize("rule", rules)
def test_stop_and_resume_changes_nothing(rule: str) -> None:
    checks.resumes_exactly(problem_of(), making(rule), moments=(0.3, 0.7))


@pytest.mark.parametrize("rule", ["fed_ex", "fed_sa", "flex_lora"])
def test_losses_and_deaths(rule: RuleName) -> None:
    problem = problem_of(num_rounds=8, adapter=unequal if rules[rule].takes_unequal_ranks else plain)
    problem.inner = problem.inner.model_copy(update={"lr": 0.05})
    checks.survives_losses(problem, making(rule), falls_to=0.997)


def test_one_seed_gives_one_run() -> None:
    checks.same_trace(problem_of(adapter=unequal), making("flex_lora"))
