"""A whole run of fine-tuning without gradients: what travels, what a worker takes, and whether it learns.

Two owners of instructions (rig/owners.py) train adapters on SmolLM2 (rig/smollm2.py), or on a model that is named, with
the method `zeroth_order`: a coordinator and workers as real processes, over TLS, each worker behind a wire that counts
all bytes of its link. Those of the base and the tokenizer, which came before the first validation, are left out.

    memory_ratio = peak resident memory of a worker / of a process that only reads

which has the same base in bf16 by `transformers`, the same adapters by PEFT, and evaluates batches of the same shape.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.bench.fine_tuning import smol_model
from potluck.bench.rig.owners import write_owners
from potluck.bench.rig.real_run import RealRun, real_run, tiny_recipe
from potluck.bench.rig.wire import wire_loop

num_owners, num_records, seq_len, batch_size = 2, 240, 64, 4
finish_s = 3 * 3600.0

READER = """
import sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).eval()
tokens = torch.randint(0, model.config.vocab_size, (int(sys.argv[2]), int(sys.argv[3])))
with torch.inference_mode():
    for _ in range(8):
        model(input_ids=tokens, labels=tokens)
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
"""


def bench_zeroth_order(
    *, rounds: int = 200, perturbations: int = 4, lr: float = 1e-3, model: str = "",
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Linux only. `model` is a model directory of the Llama family, "" for SmolLM2, downloaded the first time."""
    folder_of_model, began = smol_model(model, told), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name, wire_loop() as loop:
        folder = Path(name)
        owners = write_owners(folder / "owners", num_records=num_records, validation=1 / 15, seed=1)[:num_owners]
        (folder / "recipe.toml").write_text(_recipe(folder_of_model, rounds, perturbations, lr), encoding="utf-8")
        with real_run(folder, loop) as run:
            run.start_host()
            for owner in owners:
                run.join(owner.name, data=(owner.everything,))
            run.wait(lambda: run.events("validation"), "first validation", timeout_s=finish_s)
            before = {owner.name: _bytes(run, owner.name) for owner in owners}
            told(f"validation loss {run.events('validation')[0]['loss']:.4f}")
            peaks, reported = dict[str, int](), 0
            while run.host.poll() is None:
                peaks |= {owner: peak for owner in before if (peak := _peak_bytes(run.workers[owner].pid))}
                if len(run.rounds()) >= reported + 20:
                    reported = len(run.rounds())
                    told(f"round {reported}: loss {run.rounds()[-1]['loss']:.4f} ({time.monotonic() - began:.0f} s)")
                time.sleep(1.0)
            after = {owner: _bytes(run, owner) for owner in before}
            losses = [event["loss"] for event in run.events("validation")]
        reading = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", READER, folder_of_model, str(batch_size), str(seq_len)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    worker, reader = max(peaks.values()), int(reading.stdout) * 1024
    return {
        "rounds": rounds,
        "seconds": round(time.monotonic() - began),
        "kilobytes_per_worker": round(max(sum(after[w]) - sum(before[w]) for w in before) / 1e3, 1),
        "kilobytes_up_per_worker": round(max(after[w][0] - before[w][0] for w in before) / 1e3, 1),
        "first_loss_nats": round(losses[0], 4),
        "last_loss_nats": round(losses[-1], 4),
        "worker_peak_mb": round(worker / 1e6, 1),
        "reader_peak_mb": round(reader / 1e6, 1),
        "memory_ratio": round(worker / reader, 3),
    }


def _bytes(run: RealRun, worker: str) -> tuple[int, int]:
    """Of the worker's link so far, up and down."""
    return run.wires[worker].up.num_bytes, run.wires[worker].down.num_bytes


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _recipe(model: Path, rounds: int, perturbations: int, lr: float) -> str:
    return tiny_recipe(
        "zeroth-order", "",
        model=f'path = "{model.as_posix()}"\nbase = "bf16"\n'
        'adapter = { rank = 8, target_modules = ["q_proj", "v_proj"] }',
        data=f'private = true\nformat = "instruct"\nseq_len = {seq_len}\nvalidation = {1 / 15}',
        budget=f"rounds = {rounds}",
        strategy=f'name = "zeroth_order"\nnum_perturbations = {perturbations}\n'
        f'inner = {{ optimizer = "sgd", weight_decay = 0.0, lr = {lr}, batch_size = {batch_size} }}',
        codec="", validation="every_rounds = 0", fleet="min_workers = 2\nheartbeat_s = 10.0",
    )  # fmt: skip
