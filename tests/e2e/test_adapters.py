"""Adapters in real processes: a kill of coordinator and workers in the middle, and what is left at the end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from e2e.processes import events, potluck, result_of, start, wait_for, write_corpus, write_recipe
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(150)

MODEL = (
    'config = { model_type = "gpt2", n_layer = 2, n_embd = 32, n_head = 2, n_positions = 32 }\nbase = "int8"\n'
    'adapter = { rank = 4, alpha = 16, target_modules = ["c_attn", "c_proj", "c_fc"] }'
)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_its_base(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=6)
    strategy = 'name = "fed_avg"\nnum_inner_steps = 20\ninner = { lr = 2e-2, batch_size = 8 }'
    recipe = write_recipe(
        tmp_path / "tiny.toml", 'shared = "texts"', model=MODEL, strategy=strategy, budget="rounds = 12",
        checkpoint="every_rounds = 1",
    )  # fmt: skip
    arguments = ("run", recipe, "--local", "2", "--dir", "run")
    first = start(*arguments, cwd=tmp_path, log=tmp_path / "log")
    wait_for(tmp_path / "run", "round", count=2)
    os.kill(first.pid, signal.SIGKILL)  # its workers end with it
    first.wait()
    base = json.loads((tmp_path / "run" / "prepared.json").read_text())["base"]
    result = result_of(potluck(*arguments, "--resume", "--json", cwd=tmp_path))
    assert result["rounds"] == 12
    assert result["final_val_loss"] < result["initial_val_loss"] - 0.05
    assert json.loads((tmp_path / "run" / "prepared.json").read_text())["base"] == base
    assert sum("writing the frozen model" in e["text"] for e in events(tmp_path / "run")) == 1
    trained = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(torch.isfinite(t).all() and t.any() for t in trained.values())
    done = potluck("export", "run", "--merged", "merged", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    texts = [
        potluck("generate", folder, "--prompt", "ka", "--temperature", "0", "--max-new-tokens", "8", cwd=tmp_path)
        for folder in ("run/model", "merged")
    ]
    assert all(text.returncode == 0 for text in texts), texts[0].stderr + texts[1].stderr
    assert texts[0].stdout == texts[1].stdout != "ka\n"
