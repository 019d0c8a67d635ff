"""Owners fine-tune with differential privacy, in real processes: what is told of it, and what is not forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.processes import events
from e2e.test_data_access import Run, host, model_dir  # noqa: F401
from e2e.test_fed_lora import instructions, recipe_of

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # which PEFT itself asks
]


def counted(folder: Path, name: str) -> int:
    """Steps in a worker's ledger."""
    found = list((folder / name / "privacy").glob("*.json"))
    return sum(row[0] for row in json.loads(found[0].read_bytes())["steps"]) if found else 0


def test_what_is_told_and_what_is_counted(
    host: Callable[[], Run], model_dir: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    privacy = "privacy = { max_epsilon = 60.0, delta = 1e-5, noise_multiplier = 1.0, clip = 0.5 }\n"
    recipe_of(tmp_path, model_dir, "ffa", more=privacy)
    recipe = tmp_path / "tiny.toml"
    text = recipe.read_text().replace("validation = 0.2", "validation = 0")
    recipe.write_text(text.replace("min_workers = 2", "min_workers = 1"))
    run = host()
    owners = {name: instructions(tmp_path / f"{name}.jsonl", seed) for seed, name in enumerate(("anna", "bert"))}
    with owners["anna"].open("a") as file:
        file.write("\n" + json.dumps({"instruction": "say", "output": ""}))
    lines = owners["bert"].read_text().splitlines()
    owners["bert"].write_text("\n".join(lines[:5]))  # of so few records that they are in nearly all samples
    for name, path in owners.items():
        run.join(name, path)
    assert run.workers["bert"].wait(120) == 0
    assert "privacy than the run's epsilon of 60" in (tmp_path / "bert.log").read_text()

    before = counted(tmp_path, "anna")
    run.workers["anna"].kill()
    run.workers["anna"].wait()
    at_kill = counted(tmp_path, "anna")
    run.join("anna", owners["anna"])
    seen = len(run.rounds())
    run.wait(lambda: len(run.rounds()) > seen + 1, "round after the kill")
    assert before <= at_kill < counted(tmp_path, "anna")

    rounds = run.rounds()
    assert {name for e in rounds for name in e["workers"]} == {"anna", "bert"}
    assert all(e["loss"] is None for e in rounds)
    costs = [e["figures"]["epsilon/anna"] for e in rounds if "epsilon/anna" in e["figures"]]
    assert costs == sorted(costs) and costs[0] > 0 and max(e["figures"]["epsilon"] for e in rounds) <= 60
    told = (tmp_path / "anna.log").read_text()
    assert "skipped anna.jsonl:61: 'output' is empty" in told.replace(f"{tmp_path}/", "")
    assert told.count("privacy: epsilon") > len(costs) / 2
    notes = [e["text"] for e in events(run.run) if e["kind"] in ("note", "validation")]
    assert not any("skipped" in text or "documents" in text or "loss" in text for text in notes)

    run.workers["anna"].kill()
    run.workers["anna"].wait()
    for path in (tmp_path / "anna" / "privacy").glob("*.json"):
        path.unlink()
    run.join("anna", owners["anna"])
    assert run.workers.pop("anna").wait(60) == 10
    assert "which says what that spent of its owner's privacy, is missing" in (tmp_path / "anna.log").read_text()
    run.workers.clear()
    run.stop()
    result = json.loads((run.run / "result.json").read_text())
    assert result["final_val_loss"] is None
    assert (run.run / "model" / "adapter_config.json").exists()
