"""What leaves a device is what its task declares: an owner's policy is asked for no more and no less beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from contract.test_contract import Case, cases
from contract.test_fed_lora import problem_of, unequal

from potluck.contract import checks
from potluck.simulator.exact.problem import Problem
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig
from potluck.strategies.registry import tasks_of
from potluck.strategies.strategy import Strategy, tasks_given
from potluck.strategies.task import ResultField
from potluck.worker import pieces
from potluck.worker.runner import Runner


def kinds_of(scalars: Mapping[str, Any], tensors: Mapping[str, Any], inline: Mapping[str, Any]) -> set[ResultField]:
    found = {ResultField(name, "text" if isinstance(value, str) else "number") for name, value in scalars.items()}
    return found | {ResultField(n, "vector") for n in tensors} | {ResultField(n, "tensor") for n in inline}


@pytest.mark.parametrize("case", [pytest.param(cases[name], id=name) for name in sorted(cases)])
def test_results_hold_what_is_declared_and_tasks_are_known(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_declared(case.problem(), case.make, monkeypatch)


@pytest.mark.parametrize(
    "settings", [{}, {"rule": "fed_sa", "personal": True}, {"rule": "het_lora", "press": 0.3}], ids=str
)
def test_fed_lora_gives_no_tasks_but_those_that_it_says(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(num_rounds=6, **({"adapter": unequal} if "press" in settings else {}))
    given = check_declared(problem, lambda: FedLoRA(FedLoRAConfig(num_inner_steps=3, **settings)), monkeypatch)
    said = tasks_given(FedLoRA(FedLoRAConfig(**settings)))
    assert said is not None and given <= {*said}
    assert len(given) >= 2 and said[-1] in given


def check_declared(problem: Problem, make: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The tasks that workers were given."""
    seen: dict[str, set[ResultField]] = {}
    let_out, call = Runner._let_out, pieces._call

    async def seen_let_out(self: Runner, lease: Any, answer: Any, result: Any) -> None:
        seen.setdefault(lease.task, set()).update(kinds_of(result.scalars, result.tensors, result.inline))
        await let_out(self, lease, answer, result)

    def seen_call(request: Any, *rest: Any) -> Any:
        made = call(request, *rest)
        seen.setdefault(request.task, set()).update(kinds_of({}, {}, made))
        return made

    monkeypatch.setattr(Runner, "_let_out", seen_let_out)
    monkeypatch.setattr(pieces, "_call", seen_call)
    checks.run(problem, make, num_workers=2)
    declared = {task.name: set(task.fields) for task in tasks_of(type(make()))}
    assert seen and {name: declared.get(name) for name in seen} == seen
    return set(seen)
