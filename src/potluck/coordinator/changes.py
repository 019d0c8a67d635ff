"""Changes of a recipe while its run goes on, or is stopped: decisions that the ledger keeps.

A change holds from when it is made, and at later starts for as long as the recipe given says of that key what it said
then: who edits the recipe afterwards means it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from potluck.coordinator.core import Coordinator, open_ledger
from potluck.coordinator.prepare import replanned, stored_recipe
from potluck.coordinator.recipe import ALTERNATIVES, Recipe, apply_override, known_keys, parse_recipe
from potluck.storage.files import FolderLock
from potluck.storage.ledger import MARK, Ledger, Operation
from potluck.types.errors import RecipeError
from potluck.types.mistakes import nearest

SET = "set"
spent = "; that much is done already, so no further round begins"
LIVE_KEYS = (
    "budget.tokens",
    "budget.rounds",
    "budget.hours",
    "fleet.min_workers",
    "fleet.balance",
    "fleet.deadlines",
    "fleet.no_progress_s",
    "fleet.reconnect_s",
    "fleet.quarantine_after",
    "fleet.quarantine_s",
    "fleet.max_update_norm",
    "fleet.max_discarded_rounds",
    "checkpoint.every_rounds",
    "checkpoint.keep",
    "validation.every_rounds",
    "transfer.max_up_mbit",
    "transfer.max_down_mbit",
    "transfer.max_up_mbit_per_worker",
    "transfer.max_down_mbit_per_worker",
    "divergence.watch",
    "divergence.deviations",
    "divergence.patience_rounds",
    "divergence.max_roll_backs",
)
"""What may change in the middle of a run: nothing that workers were told, nor what the model, data or method are."""


def changed(recipe: Recipe, setting: str) -> tuple[str, Recipe]:
    """The key of `key=value`, and the recipe with it set. RecipeError, which names the keys that may change."""
    key = setting.partition("=")[0].strip()
    if key not in LIVE_KEYS:
        raise RecipeError(_not_live(key))
    table = recipe.to_json()
    apply_override(table, setting)
    return key, parse_recipe(table, "the change")


def _not_live(key: str) -> str:
    """Why that key is not set, and which are."""
    if key in known_keys() or key.startswith("strategy."):  # its settings are each strategy's own
        return f"{key} cannot change while a run goes on; docs/recipes.md marks the keys that can"
    near = nearest(key, LIVE_KEYS)
    return f"{key[:100]!r} is not a key; " + (f"did you mean {near}?" if near else "docs/recipes.md marks those to set")


def with_changes(given: Recipe, operations: Iterable[Operation]) -> tuple[Recipe, list[str]]:
    """The recipe that holds, and the keys whose changes no longer do because `given` says something else since."""
    recipe, last, passed = given, dict[str, Operation](), list[str]()
    for operation in operations:
        if operation.kind == SET:
            last.pop(operation.value["key"], None)  # the later one of two alternatives counts
            last[operation.value["key"]] = operation
    for key, operation in last.items():
        if _values(given, key) == operation.value["given"]:
            recipe = changed(recipe, f"{key}={json.dumps(operation.value['value'])}")[1]
        else:
            passed.append(key)
    return recipe, passed


class Changes:
    """The recipe of a run that goes on: as it was given at the start, and as it holds."""

    def __init__(self, given: Recipe, now: Recipe) -> None:
        self._given, self.now = given, now
        self._turn = asyncio.Lock()

    async def set(self, run: Coordinator, setting: str, *, by: str) -> str:
        """Set one key: written down first, then in force. The sentence that says so.

        RecipeError, and nothing is set, also for what the run's strategy refuses.
        """
        async with self._turn:
            return await self._set(run, setting, by=by)

    async def _set(self, run: Coordinator, setting: str, *, by: str) -> str:
        key, recipe = changed(self.now, setting)
        plan = replanned(run.plan, recipe)
        rounds = run.state.round if run.state else 0
        operation = _operation(key, self._given, self.now, recipe, at=run.clock.time(), round=rounds, by=by)
        await run.lanes.ledger.run(run.ledger.record, operation)
        self.now = recipe
        run.operations.append(operation)
        run.adopt(plan)
        run.tell("changed", f"{by}: {sentence(operation)}", key=key, value=operation.value["value"])
        is_spent = key.startswith("budget.") and run.state is not None and run.facts.progress(run.state) >= 1.0
        return sentence(operation) + (spent if is_spent else "")


def recipe_of(folder: Path, given: Recipe) -> tuple[Recipe, list[str]]:
    """`with_changes` by what the ledger in a run's folder holds, if there is one. Blocks."""
    if not (folder / MARK).exists():
        return given, []
    ledger = open_ledger(folder, durable=False)
    try:
        return with_changes(given, ledger.operations())
    finally:
        ledger.close()


def set_in_folder(folder: Path, setting: str, *, at: float, by: str) -> str:
    """As `Changes.set`, for a run that is not going on. Blocks."""
    lock = FolderLock(folder)
    try:
        ledger = open_ledger(folder, durable=True)
        try:
            return _set_in_ledger(ledger, folder, setting, at=at, by=by)
        finally:
            ledger.close()
    finally:
        lock.release()


def _set_in_ledger(ledger: Ledger, folder: Path, setting: str, *, at: float, by: str) -> str:
    given = stored_recipe(folder)
    before, _ = with_changes(given, ledger.operations())
    key, recipe = changed(before, setting)
    state = ledger.last_state()
    operation = _operation(key, given, before, recipe, at=at, round=state["round"] if state else 0, by=by)
    ledger.record(operation)
    said = f"when the run goes on, {sentence(operation)}"
    if state is None or not key.startswith("budget."):
        return said
    budget = recipe.budget.to_budget()
    done = budget.progress(tokens=state["tokens"], rounds=state["round"], seconds=state["seconds"])
    return said + (spent if done >= 1.0 else "")


def sentence(operation: Operation) -> str:
    value = operation.value
    was = f", and was {json.dumps(value['was'])}" if value["was"] is not None else ""
    return f"{value['key']} is {json.dumps(value['value'])}{was}"


def _operation(key: str, given: Recipe, before: Recipe, after: Recipe, *, at: float, round: int, by: str) -> Operation:
    value = {
        "key": key, "value": _values(after, key)[key], "was": _values(before, key)[key],
        "given": _values(given, key), "by": by,
    }  # fmt: skip
    return Operation(kind=SET, at=at, round=round, value=value)


def _values(recipe: Recipe, key: str) -> Mapping[str, Any]:
    """What a recipe says of a key and its alternatives."""
    table = recipe.to_json()
    names = next((group for group in ALTERNATIVES if key in group), (key,))
    return {name: table[name.partition(".")[0]].get(name.partition(".")[2]) for name in names}
