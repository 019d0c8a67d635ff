"""The replica against plain loops over transformers models and torch optimizers."""

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, llama
from models.test_device import Machine
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from potluck.models.attention import implementation as fp32_attention
from potluck.models.build import build, layout_of
from potluck.models.flat import FlatModel
from potluck.optim.inner import InnerConfig, learning_rate
from potluck.strategies.replica import Loss, TaskCancelled
from potluck.strategies.run import RunSpec
from potluck.types.errors import CorruptError, DataError, ModelError, ResourceError
from potluck.worker.need import replica_memory
from potluck.worker.replica import StepInfo, TorchReplica

seq_len = 12


def spec_of(config: dict[str, Any], *, precision: str = "fp32", seed: int = 0, **inner: Any) -> RunSpec:
    settings = InnerConfig(**{"lr": 1e-2, "batch_size": 4, "warmup": 0.1, **inner})
    return RunSpec.model_validate(
        {
            "run_id": "r", "name": "r", "seed": seed, "strategy": "diloco", "model_config_json": config,
            "layout": layout_of(build(config)).to_json(), "seq_len": seq_len, "precision": precision,
            "inner": settings, "data_access": "shared",
        }
    )  # fmt: skip


def some_batches(count: int, size: int = 4, *, seed: int = 1, skip: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (size, seq_len + 1), generator=generator) for _ in range(skip + count)][skip:]


def replica_of(spec: RunSpec, **options: Any) -> TorchReplica:
    replica = TorchReplica(spec, **options)
    replica.load(FlatModel(build(spec.model_config_json, seed=1)).params())
    return replica


def plain_loop(spec: RunSpec, steps: list[list[Tensor]]) -> tuple[list[float], Tensor]:
    """Losses and parameters of a loop as anybody would write it."""
    inner, model = spec.inner, build(spec.model_config_json, seed=1)
    matrices, others = ([p for p in model.parameters() if (p.dim() >= 2) is big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if inner.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=inner.lr)
    losses: list[float] = []
    for i, batches in enumerate(steps):
        optimizer.zero_grad()
        num_tokens = sum(batch[:, 1:].numel() for batch in batches)
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch[:, :-1]).logits
            loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
            loss = loss * (batch[:, 1:].numel() / num_tokens)
            loss.backward()
            total += loss.item()
        if inner.clip:
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, i / len(steps))
        optimizer.step()
        losses.append(total)
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(replica: TorchReplica, num_steps: int, *, of: int, start: int = 0) -> list[float]:
    return [replica.train_step(progress=(start + i) / of).loss for i in range(num_steps)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_are_those_of_a_plain_loop_bit_for_bit(name: str, optimizer: str) -> None:
    spec, batches = spec_of(FAMILIES[name], optimizer=optimizer), some_batches(6)
    replica = replica_of(spec)
    replica.feed(iter(batches))
    losses = train(replica, 6, of=6)
    expected, params = plain_loop(spec, [[batch] for batch in batches])
    assert losses == expected
    assert torch.equal(replica.params().tensor(), params)
    assert (params - FlatModel(build(FAMILIES[name], seed=1)).params()).abs().max() > 1e-3


def test_accumulation_weighs_by_tokens_also_where_the_last_batch_is_short() -> None:
    spec = spec_of(llama(), accumulation=3, optimizer="sgd", lr=1.0, clip=0.0)
    batches = [*some_batches(5), some_batches(1, size=1, seed=2)[0]]
    replica = replica_of(spec)
    replica.feed(batches)
    steps = [replica.train_step(progress=i / 2) for i in range(2)]
    losses, params = plain_loop(spec, [batches[:3], batches[3:]])
    assert [s.num_tokens for s in steps] == [12 * seq_len, 9 * seq_len]
    assert [s.loss for s in steps] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(replica.params().tensor(), params, rtol=1e-5, atol=1e-6)
    whole = replica_of(spec_of(llama(), batch_size=12, optimizer="sgd", lr=1.0, clip=0.0))
    whole.feed([torch.cat(batches[:3]), torch.cat(batches[3:])])
    train(whole, 2, of=2)
    torch.testing.assert_close(replica.params().tensor(), whole.params().tensor(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_of_the_sum_and_unclipped(name: str) -> None:
    spec = spec_of(FAMILIES[name], clip=1e-3)
    batches = some_batches(2)
    replica = replica_of(spec)
    before = replica.params().tensor()
    replica.feed(iter(batches))
    got, loss = replica.gradient(num_sequences=7)  # the second micro-batch only in part
    model = build(FAMILIES[name], seed=1)
    tokens = torch.cat(batches)[:7]
    logits = model(input_ids=tokens[:, :-1]).logits
    expected = cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1), reduction="sum")
    expected.backward()
    grad = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert loss.num_tokens == 7 * seq_len
    assert loss.loss_sum == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())
    assert torch.equal(replica.params().tensor(), before)
    rest, rest_loss = replica.gradient(num_sequences=1)  # what was left of it
    assert rest_loss.num_tokens == seq_len
    assert rest.abs().max() > 0


def test_evaluation_sums_over_any_number_of_sequences() -> None:
    spec = spec_of(gpt2(resid_pdrop=0.5))
    replica = replica_of(spec)
    tokens = torch.cat(some_batches(3))[:10]
    model = build(gpt2(), seed=1)
    logits = model(input_ids=tokens[:, :-1]).logits
    expected = cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1), reduction="sum").item()
    got = replica.evaluate(tokens.to(torch.int32))
    assert got == Loss(pytest.approx(expected, rel=1e-6), 10 * seq_len)
    replica.feed(some_batches(3))
    assert [len(batch) for batch in replica.batches()] == [4, 4, 4]


def test_bf16_mixed_trains_close_to_fp32_with_fp32_state() -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16-mixed"):
        replica = replica_of(spec_of(llama(), precision=precision), hardware=Machine(bf16=True, free=1 << 32))
        module: Any = replica.module
        attention = module.config._attn_implementation
        assert attention == (fp32_attention if precision == "bf16-mixed" else "sdpa")
        assert replica.precision.name == precision
        replica.feed(some_batches(1) * 30)
        losses[precision] = train(replica, 30, of=60)
        tensors, _ = replica.local_state()
        assert replica.params().tensor().dtype == tensors["exp_avg"].dtype == torch.float32
    assert losses["bf16-mixed"] != losses["fp32"]
    assert losses["bf16-mixed"] == pytest.approx(losses["fp32"], abs=0.1)
    assert losses["bf16-mixed"][-1] < 0.7 * losses["bf16-mixed"][0]
    slow = TorchReplica(spec_of(llama(), precision="bf16-mixed"), hardware=Machine(bf16=False, free=1 << 32))
    assert slow.precision.name == "fp32"


# Local state

script = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
sys.path.insert(0, sys.argv[1])
from models.families import FAMILIES
from worker.test_replica import replica_of, some_batches, spec_of, train
torch.set_num_threads(1)
folder, name, dropout = Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
config = {**FAMILIES[name], **({"attention_dropout": dropout} if name == "llama" else {"resid_pdrop": dropout})}
replica = replica_of(spec_of(config))
state = load_file(folder / "state.safetensors")
replica.load(state.pop("theta"))
replica.restore_local_state(state, {"num_steps": 3})
replica.feed(iter(some_batches(4, skip=3)))
train(replica, 4, of=7, start=3)
save_file({"theta": replica.params().tensor(), **replica.local_state()[0]}, folder / "after.safetensors")
"""


@pytest.mark.parametrize(("name", "dropout"), [("gpt2", 0.0), ("gpt2", 0.3), ("llama", 0.3)])
def test_state_saved_and_restored_in_another_process_goes_on_bit_for_bit(
    tmp_path: Path, name: str, dropout: float
) -> None:
    config = {**FAMILIES[name], **({"attention_dropout": dropout} if name == "llama" else {"resid_pdrop": dropout})}
    whole = replica_of(spec_of(config))
    whole.feed(iter(some_batches(7)))
    train(whole, 7, of=7)
    first = replica_of(spec_of(config))
    first.feed(iter(some_batches(3)))
    train(first, 3, of=7)
    tensors, scalars = first.local_state()
    assert scalars == {"num_steps": 3}
    assert tensors["steps"].tolist() == [3] * len(first.layout.tensors)
    save_file({"theta": first.params().tensor(), **tensors}, tmp_path / "state.safetensors")
    tests = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", script, tests, tmp_path, name, str(dropout)], check=True, timeout=50)
    after = load_file(tmp_path / "after.safetensors")
    assert torch.equal(after.pop("theta"), whole.params().tensor())
    expected, _ = whole.local_state()
    assert set(after) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(after[key], tensor)


def test_dropout_draws_anew_at_each_step_and_is_the_same_in_each_replica() -> None:
    spec = spec_of(gpt2(resid_pdrop=0.5), optimizer="sgd", lr=1e-12)
    batches = some_batches(1) * 3
    losses: list[list[float]] = []
    for _ in range(2):
        replica = replica_of(spec)
        replica.feed(batches)
        losses.append(train(replica, 3, of=3))
        torch.rand(5)  # whatever else draws numbers in between
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_a_reset_is_a_new_start() -> None:
    spec = spec_of(gpt2())
    start = FlatModel(build(gpt2(), seed=1)).params()
    replica = replica_of(spec)
    assert replica.local_state() == ({}, {"num_steps": 0})
    ends: list[Tensor] = []
    for _ in range(2):
        replica.reset_local_state()
        replica.load(start)
        replica.feed(some_batches(3))
        train(replica, 3, of=3)
        ends.append(replica.params().tensor())
    assert torch.equal(ends[0], ends[1])
    replica.load(start)
    replica.feed(some_batches(3))
    train(replica, 3, of=3)
    assert not torch.equal(ends[0], replica.params().tensor())  # without a reset the moments go on
    replica.restore_local_state({}, {"num_steps": 0})
    assert replica.local_state() == ({}, {"num_steps": 0})


@pytest.mark.parametrize(
    ("change", "scalars"),
    [
        (lambda t: {"exp_avg": t["exp_avg"]}, {"num_steps": 1}),
        (lambda t: {**t, "exp_avg": t["exp_avg"][1:]}, {"num_steps": 1}),
        (lambda t: {**t, "exp_avg": t["exp_avg"].double()}, {"num_steps": 1}),
        (lambda t: {**t, "more": t["steps"]}, {"num_steps": 1}),
        (lambda t: t, {}),
        (lambda t: t, {"num_steps": -1}),
    ],
)
def test_the_state_of_another_model_is_refused_and_changes_nothing(change: Any, scalars: dict[str, Any]) -> None:
    replica = replica_of(spec_of(gpt2()))
    replica.feed(some_batches(1))
    train(replica, 1, of=1)
    tensors = {name: tensor.clone() for name, tensor in replica.local_state()[0].items()}
    with pytest.raises(CorruptError, match="start it afresh"):
        replica.restore_local_state(change(tensors), scalars)
    assert torch.equal(replica.local_state()[0]["exp_avg"], tensors["exp_avg"])


# What goes wrong


def test_cancel_from_another_thread_ends_the_task_at_its_next_micro_batch() -> None:
    replica = replica_of(spec_of(gpt2(), accumulation=2))
    started = threading.Event()

    def source() -> Iterator[Tensor]:
        while True:
            started.set()
            yield some_batches(1)[0]

    def cancel() -> None:
        started.wait()
        replica.cancel()

    replica.feed(source())
    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(TaskCancelled):
        train(replica, 100_000, of=100_000)
    thread.join()
    for call in (lambda: replica.gradient(num_sequences=4), lambda: replica.evaluate(some_batches(1)[0])):
        with pytest.raises(TaskCancelled):
            call()
    with pytest.raises(TaskCancelled):
        next(replica.batches())
    replica.feed(some_batches(2))
    assert math.isfinite(replica.train_step(progress=0.0).loss)


def test_a_loss_that_is_not_finite_ends_the_task_before_it_touches_anything() -> None:
    replica = replica_of(spec_of(gpt2()))
    theta = replica.params().tensor()
    theta[0] = float("nan")
    replica.load(theta)
    replica.feed([torch.zeros(4, seq_len + 1, dtype=torch.int64)] * 2)
    with pytest.raises(ModelError, match=r"the loss is nan at inner step 1 with learning rate .*; lower"):
        replica.train_step(progress=0.5)
    assert replica.local_state() == ({}, {"num_steps": 0})
    torch.testing.assert_close(replica.params().tensor(), theta, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(ModelError, match="the loss is nan"):
        replica.gradient(num_sequences=4)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_does_too(clip: float) -> None:
    replica = replica_of(spec_of(gpt2(), clip=clip))
    replica.module.lm_head.weight.register_hook(lambda grad: grad * float("inf"))
    before = replica.params().tensor()
    replica.feed(some_batches(2))
    with pytest.raises(ModelError, match="the gradient's norm is"):
        replica.train_step(progress=0.5)
    assert torch.equal(replica.params().tensor(), before)
    with pytest.raises(ModelError, match="the gradient's norm is"):
        replica.gradient(num_sequences=4)


def test_data_that_ends_or_has_another_length_is_one_sentence() -> None:
    replica = replica_of(spec_of(gpt2()))
    replica.feed(some_batches(1))
    replica.train_step(progress=0.0)
    with pytest.raises(DataError, match="ended before its steps did"):
        replica.train_step(progress=0.0)
    replica.feed(some_batches(1))
    with pytest.raises(DataError, match="ended 2 sequences short of the 6"):
        replica.gradient(num_sequences=6)
    replica.feed([torch.zeros(4, seq_len, dtype=torch.int64)])
    with pytest.raises(DataError, match=r"must be \[any, 13\]"):
        replica.train_step(progress=0.0)


def test_a_model_that_is_too_big_says_what_it_needs_and_what_there_is() -> None:
    spec = spec_of(gpt2())
    with pytest.raises(ResourceError, match=r"needs \d\.\d MiB and 0\.0 MiB are free; lower"):
        TorchReplica(spec, hardware=Machine())  # seven bytes
    with pytest.raises(ResourceError, match="within --max-memory"):
        TorchReplica(spec, max_memory_bytes=1000)
    assert TorchReplica(spec, max_memory_bytes=1 << 30).layout == layout_of(build(gpt2()))


def test_what_the_method_keeps_is_counted_before_the_model_is_built() -> None:
    spec = spec_of(gpt2())
    need = replica_memory(spec, layout_of(build(gpt2())).numel, precision="fp32").device_bytes
    TorchReplica(spec, max_memory_bytes=need)
    with pytest.raises(ResourceError, match="of it for what the method keeps, and"):
        TorchReplica(spec.model_copy(update={"kept_vectors": 2.0}), max_memory_bytes=need)


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    spec = spec_of(gpt2())
    other = spec.model_copy(update={"layout": layout_of(build(llama())).to_json()})
    with pytest.raises(ModelError, match="install the version"):
        TorchReplica(other)
    for update in (
        {"layout": []},
        {"layout": [["a"]]},
        {"layout": [[1, 2]]},
        {"model_config_json": {"vocab_size": "x"}},
    ):
        with pytest.raises(ModelError):
            TorchReplica(spec.model_copy(update=update))


def test_every_step_is_reported_with_its_rate() -> None:
    ticks = iter(float(i) * 0.5 for i in range(100))
    replica = replica_of(spec_of(gpt2()), now=lambda: next(ticks))
    told: list[StepInfo] = []
    replica.on_step = told.append
    replica.feed(some_batches(3))
    losses = train(replica, 2, of=2)
    _, loss = replica.gradient(num_sequences=4)
    assert [info.step for info in told] == [1, 2, 3]
    assert [info.loss for info in told[:2]] == losses
    assert told[2].loss == pytest.approx(loss.loss_sum / loss.num_tokens)
    assert [info.tokens_per_s for info in told] == [4 * seq_len / 0.5] * 3
