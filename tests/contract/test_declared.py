"""What leaves a device is what its task declares: an owner's policy is asked for no more and no less beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from contract.test_contract import Case, cases

from potluck.contract import checks
from potluck.strategies.registry import tasks_of
from potluck.strategies.task import ResultField
from potluck.worker import pieces
from potluck.worker.runner import Runner


def kinds_of(scalars: Mapping[str, Any], tensors: Mapping[str, Any], inline: Mapping[str, Any]) -> set[ResultField]:
    found = {ResultField(name, "text" if isinstance(value, str) else "number") for name, value in scalars.items()}
    return found | {ResultField(n, "vector") for n in tensors} | {ResultField(n, "tensor") for n in inline}


@pytest.mark.parametrize("case", [pytest.param(cases[name], id=name) for name in sorted(cases)])
def test_results_hold_what_is_declared_and_tasks_are_known(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
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
    checks.run(case.problem(), case.make, num_workers=2)
    declared = {task.name: set(task.fields) for task in tasks_of(type(case.make()))}
    assert seen and {name: declared.get(name) for name in seen} == seen
