"""A snapshot of a run, for the live view, `potluck status` and the JSON that commands print."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from potluck.coordinator.changes import sentence
from potluck.coordinator.core import ROLL_BACK, Coordinator, open_ledger
from potluck.fleet.roster import Member, absence
from potluck.storage.ledger import Operation

max_operations = 20
"""The last ones, for the view."""


def snapshot(run: Coordinator) -> dict[str, Any]:
    """Who is here, what they do, what the run waits for, how it goes. JSON values only."""
    state = run.state
    budget = run.plan.budget
    progress = run.facts.progress(state) if state else 0.0
    elapsed_s = state.seconds if state else 0.0
    left_s = elapsed_s * (1.0 - progress) / progress if progress > 0 else None
    given = {row["id"]: row for row in run.contributions()}
    return {
        "run_id": run.plan.spec.run_id,
        "name": run.plan.spec.name,
        "strategy": run.plan.spec.strategy,
        "phase": run.stop_reason or run.fleet.phase,
        "round": state.round if state else 0,
        "tokens": state.tokens if state else 0,
        "budget": {"tokens": budget.tokens, "rounds": budget.rounds, "hours": budget.hours},
        "progress": progress,
        "seconds": elapsed_s,
        "seconds_left": left_s,
        "loss": state.loss if state and state.round else None,
        "validation": [[r, x] for r, x in sorted(run.losses.items())],
        "epochs": run.deck.account(),
        "operations": [{"round": o.round, "at": o.at, "text": told(o)} for o in run.operations[-max_operations:]],
        "workers": [_worker(run, m, given.get(m.id, {})) for m in sorted(run.roster.members.values(), key=_id)],
    }


def operations_in_folder(folder: Path) -> list[str]:
    """What was done to the run in a folder, a line each, whether it goes on or not. Blocks."""
    with closing(open_ledger(folder, durable=False)) as ledger:
        return [f"round {o.round}: {told(o)}" for o in ledger.operations()]


def progress_in_folder(folder: Path) -> dict[str, Any]:
    """How far a run came that does not go on. Blocks."""
    with closing(open_ledger(folder, durable=False)) as ledger:
        state = ledger.last_state() or {}
    names = {"round": 0, "tokens": 0, "seconds": 0.0}
    return {**{name: state.get(name, none) for name, none in names.items()}, "loss": state.get("loss")}


def told(operation: Operation) -> str:
    """What was done to the run, for people."""
    value = operation.value
    if operation.kind == ROLL_BACK:
        return f"went back to round {value['to_round']}: {value['reason']}"
    return f"{value['by']}: {sentence(operation)}"


def _id(member: Member) -> str:
    return member.id


def _worker(run: Coordinator, member: Member, given: dict[str, Any]) -> dict[str, Any]:
    progress = member.progress
    if member.quarantined:
        activity = "quarantined"
    elif not member.connected:
        reason = absence(member, run.clock.now(), run.config)  # of a subject that its row names
        activity = reason.removeprefix(f"{member.id} ") or "away"
    else:
        activity = progress.activity if progress and progress.activity else "waiting"
    return {
        "id": member.id,
        "device": member.profile.device,
        "device_name": member.profile.device_name,
        "precision": run.plan.spec.precision if run.plan.spec.precision in member.profile.precisions else "fp32",
        "connected": member.connected,
        "state": activity,
        "reason": member.quarantined,
        "tokens_per_s": progress.tokens_per_s if progress and progress.activity == "training" else 0.0,
        "step": int(progress.step) if progress else 0,
        "tokens": given.get("tokens", 0),
        "rounds": given.get("rounds", 0),
        "bytes_up": given.get("bytes_up", 0),
        "bytes_down": given.get("bytes_down", 0),
        "up_bytes_per_s": member.up_bytes_per_s,
        "down_bytes_per_s": member.down_bytes_per_s,
        "rtt_s": member.profile.link.rtt_s,
        "note": run.told_of.get(member.id) or member.note,
    }
