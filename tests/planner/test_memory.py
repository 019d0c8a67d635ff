"""The estimate against arithmetic, and against what a replica's process really takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.families import gpt2, llama

from potluck.planner.memory import ModelDims, TrainingMemory, check_fits, kept_bytes, training_memory

GIB = 1 << 30
big_gpt2 = gpt2(n_embd=512, n_head=8, n_layer=6, vocab_size=4096)
wide_gpt2 = gpt2(n_embd=512, n_head=8, n_layer=2, vocab_size=50257)
deep_llama = llama(hidden_size=256, intermediate_size=688, num_hidden_layers=4, max_position_embeddings=256)

script = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
import psutil, torch
from worker.test_replica import spec_of
from potluck.models.loss import MAX_WHOLE_BYTES
from potluck.planner.memory import ModelDims, training_memory
from potluck.types.vector import Vector
from potluck.worker.replica import TorchReplica

torch.set_num_threads(1)
config, batch_size, seq_len = json.loads(sys.argv[2])


def round_of(spec, batch_size):
    replica = TorchReplica(spec)
    theta = Vector(replica.layout.numel, lambda start, stop: torch.full((stop - start,), 0.01))
    replica.load(theta)
    replica.feed([torch.randint(0, 64, (batch_size, spec.seq_len + 1))] * 2)
    replica.train_step(progress=0.5)
    replica.train_step(progress=0.5)
    return sum(len(part) for _, part in (theta - replica.params()).slices())


small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 32}
round_of(spec_of(small), 4)  # imports and thread pools are not the model's
spec = spec_of(config, batch_size=batch_size).model_copy(update={"seq_len": seq_len})
process, top, done = psutil.Process(), [0], threading.Event()


def watch():
    while not done.wait(0.001):
        top[0] = max(top[0], process.memory_info().rss)


before = process.memory_info().rss
thread = threading.Thread(target=watch)
thread.start()
num_params = round_of(spec, batch_size)
done.set()
thread.join()
need = training_memory(
    ModelDims.of(config, num_params), batch_size=batch_size, seq_len=seq_len, optimizer="adamw", precision="fp32",
    max_logits_bytes=MAX_WHOLE_BYTES,
)
print(json.dumps([top[0] - before, need.device_bytes]))
"""


@pytest.mark.slow  # a process of its own for each
@pytest.mark.parametrize(
    ("config", "batch_size", "seq_len"),
    [(big_gpt2, 1, 16), (wide_gpt2, 1, 16), (deep_llama, 8, 256)],
    ids=["parameters", "embedding", "activations"],
)
def test_the_estimate_is_close_to_what_a_process_takes(config: dict[str, Any], batch_size: int, seq_len: int) -> None:
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-c", script, str(tests), json.dumps([config, batch_size, seq_len])]
    output = subprocess.run(command, check=True, timeout=55, capture_output=True, text=True).stdout
    measured, estimated = json.loads(output.splitlines()[-1])
    assert measured > 150 << 20
    low, high = (0.9, 1.1) if config is wide_gpt2 else (0.7, 1.4)
    assert low < measured / estimated < high


def need(dims: ModelDims, **changes: Any) -> TrainingMemory:
    options = {"batch_size": 1, "seq_len": 1, "optimizer": "adamw", "precision": "fp32", "max_logits_bytes": 1 << 40}
    return training_memory(dims, **{**options, **changes})


dims = ModelDims(num_params=10**9, num_layers=10, hidden_dim=100, ff_dim=400, vocab_size=1000, is_gated=False)


def test_the_parts_that_are_exact() -> None:
    tiny = replace(dims, num_layers=0, vocab_size=0, ff_dim=0)
    assert need(tiny) == TrainingMemory(device_bytes=16 * 10**9, host_bytes=8 * 10**9)
    assert need(tiny, optimizer="sgd").device_bytes == 8 * 10**9
    assert need(tiny, precision="bf16-mixed").device_bytes == 18 * 10**9
    assert need(tiny, kept_vectors=2.25) == replace(need(tiny), kept_bytes=9 * 10**9)


def test_what_comes_and_goes_by_hand() -> None:
    """A token's activations of 10 layers and three times its logits; the embedding is the largest tensor."""
    forward, embedding = 10 * (8.5 * 100 + 5.2 * 400) * 4 + 3 * 4 * 1000, 4 * 100 * 1000

    def passing(**changes: Any) -> int:
        steady = need(replace(dims, num_layers=0, vocab_size=0, ff_dim=0), **changes).device_bytes
        return need(dims, **changes).device_bytes - steady

    assert passing() == forward + 2 * embedding  # root and quotient of AdamW
    assert passing(batch_size=100) == 100 * forward + 2 * embedding
    assert passing(optimizer="sgd") == forward + embedding
    assert passing(optimizer="muon") == forward + 4 * embedding  # the second moments of embedding and head too


def test_activations_grow_with_tokens_and_logits_are_bounded() -> None:
    flat = replace(dims, num_params=0)  # no gradients and steps
    assert need(flat, batch_size=4, seq_len=100).device_bytes == 400 * need(flat).device_bytes
    unbounded = need(replace(flat, vocab_size=10**6), batch_size=4, seq_len=100).device_bytes
    bounded = need(replace(flat, vocab_size=10**6), batch_size=4, seq_len=100, max_logits_bytes=1000).device_bytes
    assert unbounded - bounded == 3 * (4 * 400 * 10**6 - 1000)


def test_dimensions_are_read_under_their_family_names() -> None:
    assert ModelDims.of(gpt2(), 5) == ModelDims(
        num_params=5,
        num_layers=2,
        hidden_dim=32,
        ff_dim=128,
        vocab_size=64,
        is_gated=False,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
    )
    assert ModelDims.of(llama(), 5) == ModelDims(
        num_params=5,
        num_layers=2,
        hidden_dim=32,
        ff_dim=48,
        vocab_size=64,
        is_gated=True,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )


def test_what_a_layer_keeps_by_hand() -> None:
    dims = ModelDims(
        num_params=1, num_layers=1, hidden_dim=10, ff_dim=20, vocab_size=8, is_gated=False, num_heads=2, head_dim=5
    )
    kept = (8.5 * 10 + 5.2 * 20) * 4
    assert kept_bytes(dims, "fp32") == pytest.approx(kept)
    assert kept_bytes(dims, "bf16-mixed") == pytest.approx(0.7 * kept)


def test_what_does_not_fit_is_named_with_need_and_have() -> None:
    want = TrainingMemory(device_bytes=4 * GIB, host_bytes=2 * GIB)
    assert check_fits(want, device="cpu", device_free_bytes=4 * GIB, host_free_bytes=0) == ""
    lacking = check_fits(want, device="mps", device_free_bytes=5 * GIB, host_free_bytes=99 * GIB)
    assert lacking == "needs 6.0 GiB and 5.0 GiB are free"
    assert check_fits(want, device="cuda:0", device_free_bytes=4 * GIB, host_free_bytes=2 * GIB) == ""
    assert "4.0 GiB on cuda:0 and 3.0 GiB" in check_fits(
        want, device="cuda:0", device_free_bytes=3 * GIB, host_free_bytes=2 * GIB
    )
    assert "2.0 GiB of main memory" in check_fits(want, device="cuda:0", device_free_bytes=4 * GIB, host_free_bytes=GIB)


def test_what_a_method_keeps_must_fit_too() -> None:
    want = TrainingMemory(device_bytes=4 * GIB, host_bytes=2 * GIB, kept_bytes=3 * GIB)
    assert check_fits(want, device="cpu", device_free_bytes=7 * GIB, host_free_bytes=0) == ""
    lacking = check_fits(want, device="cpu", device_free_bytes=6 * GIB, host_free_bytes=0)
    assert lacking == "needs 7.0 GiB, 3.0 GiB of it for what the method keeps, and 6.0 GiB are free"
    assert "needs 9.0 GiB" in check_fits(want, device="mps", device_free_bytes=8 * GIB, host_free_bytes=0)
    on_gpu = {"device": "cuda:0", "device_free_bytes": 4 * GIB}
    assert check_fits(want, **on_gpu, host_free_bytes=5 * GIB) == ""
    assert "needs 5.0 GiB, 3.0 GiB of it" in check_fits(want, **on_gpu, host_free_bytes=4 * GIB)
