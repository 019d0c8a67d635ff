"""Owners fine-tune adapters on instructions of their own: real processes, deaths among them, and what is left."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.processes import events, potluck, words, write_recipe
from e2e.test_data_access import FLEET, Run, host, model_dir  # noqa: F401
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # which PEFT itself asks
]

STRATEGY = """name = "fed_lora"
rule = "{rule}"
{more}num_inner_steps = 5
inner = {{ lr = 2e-2, warmup = 0.0, batch_size = 4 }}"""


def instructions(path: Path, seed: int) -> Path:
    chance = random.Random(seed)
    told = [
        {"instruction": f"say {word} {number}", "output": f"{word} " * 3 + chance.choice(words)}
        for number, word in enumerate(chance.choices(words[seed * 5 : seed * 5 + 5], k=60))
    ]
    path.write_text("\n".join(map(json.dumps, told)))
    return path


def recipe_of(folder: Path, model: Path, rule: str, *, more: str = "", adapter: str = "") -> None:
    write_recipe(
        folder / "tiny.toml", "", fleet=FLEET, budget="rounds = 100000", validation="every_rounds = 2",
        model=f'path = "{model.as_posix()}"\nadapter = {{ rank = 4, target_modules = ["q_proj", "v_proj"]{adapter} }}',
        data='private = true\nformat = "instruct"\nseq_len = 48\nvalidation = 0.2',
        strategy=STRATEGY.format(rule=rule, more=more),
    )  # fmt: skip


def validations(run: Run) -> list[dict[str, Any]]:
    return [e for e in events(run.run) if e["kind"] == "validation"]


@pytest.mark.parametrize(("rule", "more"), [("flora", ""), ("fed_sa", "personal = true\n")])
def test_owners_train_together_and_one_dies(
    rule: str, more: str, host: Callable[[], Run], model_dir: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    recipe_of(tmp_path, model_dir, rule, more=more)
    run = host()
    names = ("anna", "bert", "cleo")
    owners = {name: instructions(tmp_path / f"{name}.jsonl", seed) for seed, name in enumerate(names)}
    (tmp_path / "dora.jsonl").write_text(json.dumps({"instruction": "say", "output": ""}))
    for name, path in owners.items():
        run.join(name, path)
    run.join("dora", tmp_path / "dora.jsonl")
    run.wait(lambda: len(run.rounds()) >= 3, "third round")
    run.workers["bert"].kill()
    run.workers["bert"].wait()
    run.join("bert", owners["bert"])
    seen = len(run.rounds())
    run.wait(lambda: any("bert" in e["workers"] for e in run.rounds()[seen + 1 :]), "round with bert again")
    seen = len(validations(run))
    run.wait(lambda: len(validations(run)) > seen, "another validation")
    told = validations(run)
    assert run.workers.pop("dora").wait(30) == 4  # what its owner gave is at fault
    assert "dora.jsonl:1: 'output' is empty" in (tmp_path / "dora.log").read_text()
    run.stop()

    assert told[-1]["loss"] < told[0]["loss"] - 0.02
    result = json.loads((run.run / "result.json").read_text())
    of_owners = {worker["id"]: worker["owner"] for worker in result["workers"] if worker["tokens"]}
    assert set(of_owners) == {"anna", "bert", "cleo"}
    assert any(each["initial"] is not None for each in of_owners.values()), "nobody was there at the start"
    for each in of_owners.values():
        assert each["initial"] is None or each["final"] < each["initial"]
        assert (each["personal"] is not None) == bool(more)
    settings = json.loads((run.run / "model" / "adapter_config.json").read_text())
    assert settings["r"] == 4 if rule == "fed_sa" else settings["r"] >= 4
    done = potluck("export", "run", "--merged", "merged", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = load_file(model_dir / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before.get(name, tensor))}
    assert changed == (set() if rule == "fed_sa" else {n for n in before if "q_proj" in n or "v_proj" in n})


def test_a_run_with_lower_ranks_leaves_plain_adapters(host: Callable[[], Run], model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe_of(tmp_path, model_dir, "flex_lora", adapter=", lower_ranks = [1]")
    run = host()
    for seed, name in enumerate(("anna", "bert")):
        run.join(name, instructions(tmp_path / f"{name}.jsonl", seed))
    run.wait(lambda: len(run.rounds()) >= 2, "second round")
    run.stop()
    settings = json.loads((run.run / "model" / "adapter_config.json").read_text())
    assert settings["r"] == 4
