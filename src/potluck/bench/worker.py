"""What a worker costs between synchronisations: its training steps beside a plain PyTorch loop.

Both train the same model on the same batches with the same optimizer and threads, in one process, in short blocks
that take turns; the figure is the median of the ratios of neighbouring blocks, so that a machine that slows down or
speeds up meanwhile does not favour either.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from potluck.models.build import build, layout_of
from potluck.models.device import choose_device, choose_precision
from potluck.optim.inner import InnerConfig, learning_rate
from potluck.strategies.run import RunSpec
from potluck.worker.replica import TorchReplica


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of GPT-2's family and its batches; the demo's by default."""

    n_layer: int = 4
    n_embd: int = 128
    vocab_size: int = 4096
    seq_len: int = 256
    batch_size: int = 8

    def config_json(self) -> dict[str, Any]:
        return {
            "model_type": "gpt2", "n_layer": self.n_layer, "n_embd": self.n_embd, "n_head": max(1, self.n_embd // 64),
            "n_positions": self.seq_len, "vocab_size": self.vocab_size, "bos_token_id": 0, "eos_token_id": 0,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip


small_vocabulary = Workload()
large_vocabulary = Workload(n_layer=2, vocab_size=50257, batch_size=4)  # logits bigger than all else


def bench_worker(
    *,
    num_pairs: int = 9,
    steps_per_block: int = 4,
    device: str = "auto",
    precision: str = "fp32",
    num_threads: int | None = None,
    workloads: dict[str, Workload] | None = None,
) -> dict[str, float]:
    """Tokens per second of the replica and of the plain loop, and the ratio, for each workload. About a minute."""
    if num_threads:
        torch.set_num_threads(num_threads)
    place = choose_device(device)
    figures: dict[str, float] = {"num_threads": torch.get_num_threads()}
    chosen = workloads or {"": small_vocabulary, "large_vocabulary_": large_vocabulary}
    for prefix, workload in chosen.items():
        found = _compare(workload, place, precision, num_pairs=num_pairs, steps_per_block=steps_per_block)
        figures |= {prefix + name: value for name, value in found.items()}
    return figures


def _compare(
    workload: Workload, device: torch.device, precision: str, *, num_pairs: int, steps_per_block: int
) -> dict[str, float]:
    inner = InnerConfig(batch_size=workload.batch_size)
    generator = torch.Generator().manual_seed(1)
    shape = (workload.batch_size, workload.seq_len + 1)
    batches = [torch.randint(0, workload.vocab_size, shape, generator=generator) for _ in range(8)]
    contestants = (
        _replica_steps(workload, inner, device, precision, batches),
        _plain_steps(workload, inner, device, precision, batches),
    )
    for step in contestants:  # warm-up: memory, kernels, optimizer state
        _block(step, 2, device)
    tokens = steps_per_block * workload.batch_size * workload.seq_len
    rates: tuple[list[float], list[float]] = ([], [])
    for pair in range(num_pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            rates[which].append(tokens / _block(contestants[which], steps_per_block, device))
    ratios = [replica / plain for replica, plain in zip(*rates, strict=True)]
    return {
        "replica_tokens_per_s": round(statistics.median(rates[0]), 1),
        "plain_tokens_per_s": round(statistics.median(rates[1]), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_lowest": round(min(ratios), 4),
        "ratio_highest": round(max(ratios), 4),
        "num_pairs": num_pairs,
    }


def _block(step: Callable[[], object], num_steps: int, device: torch.device) -> float:
    """Seconds for some steps, the device's queue included."""
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _replica_steps(
    workload: Workload, inner: InnerConfig, device: torch.device, precision: str, batches: list[Tensor]
) -> Callable[[], object]:
    config = workload.config_json()
    model = build(config, seed=1)
    spec = RunSpec.model_validate(
        {
            "run_id": "bench", "name": "bench", "seed": 1, "strategy": "diloco", "model_config_json": config,
            "layout": layout_of(model).to_json(), "seq_len": workload.seq_len, "precision": precision,
            "inner": inner, "data_access": "shared",
        }
    )  # fmt: skip
    replica = TorchReplica(spec, device=device)
    replica.load(nn.utils.parameters_to_vector(model.parameters()).detach())
    replica.feed(_endless(batches))
    return lambda: replica.train_step(progress=0.5)


def _plain_steps(
    workload: Workload, inner: InnerConfig, device: torch.device, precision: str, batches: list[Tensor]
) -> Callable[[], object]:
    model = build(workload.config_json(), seed=1).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = True if device.type == "cuda" else None
    optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps, fused=fused)
    autocast = choose_precision(precision, device).autocast
    source = _endless(batches)

    def step() -> float:
        batch = next(source).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, 0.5)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), batch[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _endless(batches: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches
