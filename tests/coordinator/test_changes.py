"""A recipe that changes while its run goes on: what may, what a running one makes of it, what a restart does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import virtual_world

from potluck.clock import run_virtual
from potluck.coordinator.changes import LIVE_KEYS, Changes, changed, set_in_folder, with_changes
from potluck.coordinator.prepare import replanned
from potluck.coordinator.recipe import SECTIONS, Recipe, known_keys, load_recipe
from potluck.coordinator.status import operations_in_folder, progress_in_folder, snapshot
from potluck.fleet.config import FleetConfig
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.storage.database import Database
from potluck.storage.ledger import MARK, CommitRow, Ledger, Operation
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig
from potluck.types.errors import RecipeError


def recipe(*overrides: str) -> Recipe:
    return load_recipe("stdlib-gpt", overrides)


def test_every_live_key_is_a_key() -> None:
    assert set(LIVE_KEYS) <= set(known_keys())
    assert len(set(LIVE_KEYS)) == len(LIVE_KEYS) and all(key.partition(".")[0] in SECTIONS for key in LIVE_KEYS)


def test_a_change_of_a_key_or_of_its_alternative() -> None:
    before = recipe("budget.rounds=9")
    assert changed(before, "fleet.min_workers=7")[1].fleet.min_workers == 7
    key, after = changed(before, "budget.tokens=1000")
    assert (key, after.budget.tokens, after.budget.rounds) == ("budget.tokens", 1000, None)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("strategy.inner.lr=1", "strategy.inner.lr cannot change while a run goes on; docs/recipes.md marks"),
        ("fleet.min_worker=1", "'fleet.min_worker' is not a key; did you mean fleet.min_workers?"),
        ("flit=1", "'flit' is not a key; docs/recipes.md marks those to set"),
        ("fleet.min_workers=0", "fleet.min_workers is 0 and must be at least 1"),
        ("fleet.min_workers", "is not of the form key=value"),
        ("fleet.no_progress_s=inf", "fleet.no_progress_s is inf and must be a finite number"),
        ("", "'' is not a key"),
    ],
)
def test_what_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        changed(recipe(), setting)


def of_folder(folder: Path) -> list[Operation]:
    ledger = Ledger(Database(folder / MARK))
    try:
        return ledger.operations()
    finally:
        ledger.close()


def test_a_stopped_run_keeps_changes_until_its_recipe_is_edited(tmp_path: Path) -> None:
    given = recipe("budget.rounds=9", "fleet.min_workers=4")
    Ledger(Database(tmp_path / MARK)).close()
    (tmp_path / "recipe.json").write_text(json.dumps({"run_id": "it", "recipe": given.to_json()}))
    assert set_in_folder(tmp_path, "budget.rounds=12", at=5.0, by="me") == (
        "when the run goes on, budget.rounds is 12, and was 9"
    )
    set_in_folder(tmp_path, "fleet.min_workers=2", at=6.0, by="me")
    set_in_folder(tmp_path, "budget.rounds=13", at=7.0, by="me")
    operations = of_folder(tmp_path)
    assert [(o.kind, o.at, o.value["was"], o.value["value"]) for o in operations] == [
        ("set", 5.0, 9, 12), ("set", 6.0, 4, 2), ("set", 7.0, 12, 13),
    ]  # fmt: skip
    now, passed = with_changes(given, operations)
    assert (now.budget.rounds, now.fleet.min_workers, passed) == (13, 2, [])
    edited = recipe("budget.rounds=50", "fleet.min_workers=4")
    now, passed = with_changes(edited, operations)
    assert (now.budget.rounds, now.fleet.min_workers, passed) == (50, 2, ["budget.rounds"])
    now, passed = with_changes(recipe("budget.tokens=500", "fleet.min_workers=4"), operations)
    assert (now.budget.tokens, now.budget.rounds, passed) == (500, None, ["budget.rounds"])


def test_a_budget_that_is_spent_already_is_said(tmp_path: Path) -> None:
    ledger = Ledger(Database(tmp_path / MARK))
    state = {"round": 6, "tokens": 600, "seconds": 6.0}
    ledger.commit(CommitRow(round=5, attempt=0, state=state, deal={}, accepted=()), at=1.0)
    ledger.close()
    (tmp_path / "recipe.json").write_text(json.dumps({"run_id": "it", "recipe": recipe("budget.rounds=9").to_json()}))
    said = set_in_folder(tmp_path, "budget.rounds=6", at=5.0, by="me")
    assert said.endswith("; that much is done already, so no further round begins")
    assert "done already" not in set_in_folder(tmp_path, "budget.rounds=7", at=5.0, by="me")
    assert operations_in_folder(tmp_path)[1] == "round 6: me: budget.rounds is 7, and was 6"
    assert progress_in_folder(tmp_path) == {**state, "loss": None}


def test_a_run_that_waits_for_more_workers_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    problem = Problem(num_rounds=50, validate=False, fleet=FleetConfig(min_workers=3))
    given = recipe("budget.rounds=50", "fleet.min_workers=3")

    async def main() -> World:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2)), tmp_path)
        world.add("w1", cost_s=lambda _: 1.0)
        await world.start()
        await world.clock.sleep(30.0)
        assert world.run is not None and world.run.state is not None and world.run.state.round == 0
        changes = Changes(given, given)
        told = await changes.set(world.run, "fleet.min_workers=1", by="me")
        assert told == "fleet.min_workers is 1, and was 3"
        await changes.set(world.run, "transfer.max_up_mbit=8", by="me")
        assert world.run.pacer.limits.up == 1e6
        await world.clock.sleep(20.0)
        assert world.run.state.round > 3
        await changes.set(world.run, f"budget.rounds={world.run.state.round + 2}", by="me")
        told_of = [o["text"] for o in snapshot(world.run)["operations"]]
        assert told_of[0] == "me: fleet.min_workers is 1, and was 3" and len(told_of) == 3
        await world.crash_coordinator()
        world.plan = replanned(world.plan, with_changes(given, of_folder(world.disk("coordinator")))[0])
        await world.start()
        await world.finish()
        return world

    world = run_virtual(main())
    assert world.last is not None and world.last.state is not None
    rounds = world.last.operations[-1]
    assert world.last.state.round == rounds.value["value"] == rounds.round + 2
    assert [e.detail["key"] for e in world.events if e.kind == "changed"] == [
        "fleet.min_workers", "transfer.max_up_mbit", "budget.rounds",
    ]  # fmt: skip


def test_what_the_strategy_refuses_is_not_set_either(tmp_path: Path) -> None:
    given = recipe("budget.rounds=6")

    async def main() -> World:
        strategy = StreamingDiLoCo(StreamingDiLoCoConfig(num_inner_steps=2, num_fragments=2, overlap_steps=1))
        world = virtual_world(Problem(num_rounds=6, validate=False), strategy, tmp_path)
        world.add("w1", cost_s=lambda _: 1.0)
        await world.start()
        await world.clock.sleep(1.5)
        assert world.run is not None
        with pytest.raises(RecipeError, match=r'as many steps: set fleet.balance to "none"'):
            await Changes(given, given).set(world.run, "fleet.balance=time", by="me")
        assert world.run.plan.fleet.balance == "none" and not world.run.operations
        with pytest.raises(RecipeError, match=r'as many steps: set fleet.balance to "none"'):  # as at the next start
            replanned(world.plan, changed(given, "fleet.balance=time")[1])
        await world.finish()
        return world

    world = run_virtual(main())
    assert world.last is not None and world.last.state is not None and world.last.state.round == 6


def test_a_shorter_patience_reaches_work_that_is_under_way(tmp_path: Path) -> None:
    problem = Problem(num_rounds=1, validate=False, fleet=FleetConfig(min_workers=2, no_progress_s=900.0))
    given = recipe("budget.rounds=1", "fleet.min_workers=2", "fleet.no_progress_s=900")

    async def main() -> World:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2)), tmp_path)
        world.add("w1", cost_s=lambda _: 1.0)
        world.add("w2", cost_s=lambda _: 1e6)
        await world.start()
        await world.clock.sleep(60.0)
        assert world.run is not None
        assert not [e for e in world.events if e.kind == "lost"]
        await Changes(given, given).set(world.run, "fleet.no_progress_s=20", by="me")
        await world.clock.sleep(5.0)
        await world.finish()
        return world

    events = run_virtual(main()).events
    (lost,) = [e for e in events if e.kind == "lost"]
    assert lost.detail["worker"] == "w2" and "no progress" in lost.text
