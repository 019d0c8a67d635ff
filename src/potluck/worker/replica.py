"""Draft replica, to be replaced by its owner's."""
from __future__ import annotations
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from potluck.models.build import build
from potluck.models.flat import FlatModel
from potluck.optim.inner import learning_rate
from potluck.strategies.replica import Loss, Mailbox, Step, TaskCancelled
from potluck.strategies.run import RunSpec
from potluck.types.params import Layout

@dataclass(frozen=True)
class StepInfo:
    step: int
    loss: float
    tokens_per_s: float

class TorchReplica:
    def __init__(self, spec: RunSpec, *, device: str = "cpu", num_threads: int | None = None) -> None:
        self.inner = spec.inner
        self.flat = FlatModel(build(spec.model_config_json), layout=Layout.from_json(spec.layout), device=device)
        self.mailbox: Mailbox
        self.on_step: Callable[[StepInfo], None] = lambda _: None
        self._cancel = False
        self._n = 0
        self.reset_local_state()

    @property
    def layout(self) -> Layout:
        return self.flat.layout

    def reset_local_state(self) -> None:
        i = self.inner
        mats = [p for p in self.flat.parameters if p.dim() >= 2]; vecs = [p for p in self.flat.parameters if p.dim() < 2]
        self.opt = torch.optim.AdamW([{"params": mats, "weight_decay": i.weight_decay}, {"params": vecs, "weight_decay": 0.0}], lr=i.lr, betas=i.betas, eps=i.eps)

    def local_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        out: dict[str, Tensor] = {}
        for n, p in enumerate(self.flat.parameters):
            for k, v in self.opt.state.get(p, {}).items():
                out[f"{n}.{k}"] = torch.as_tensor(v).clone()
        return out, {}

    def restore_local_state(self, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        self.reset_local_state()
        for key, v in tensors.items():
            n, k = key.split(".", 1)
            self.opt.state[self.flat.parameters[int(n)]][k] = v.clone()

    def feed(self, source: Iterator[Tensor]) -> None:
        self._source = source
        self._cancel = False

    def cancel(self) -> None:
        self._cancel = True

    def batches(self) -> Iterator[Tensor]:
        return self._source

    def load(self, theta: Tensor) -> None:
        self.flat.load(theta)

    def params(self) -> Tensor:
        return self.flat.params()

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self.flat.module(input_ids=batch[:, :-1]).logits
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1), reduction="sum")

    def train_step(self, *, progress: float) -> Step:
        if self._cancel:
            raise TaskCancelled
        begun = time.monotonic()
        for g in self.opt.param_groups:
            g["lr"] = learning_rate(self.inner, progress)
        total, n = 0.0, 0
        for p in self.flat.parameters:
            p.grad = None
        batches = [next(self._source) for _ in range(self.inner.accumulation)]
        n = sum(b[:, 1:].numel() for b in batches)
        for b in batches:
            loss = self._loss(b) / n
            loss.backward()
            total += loss.item()
        if self.inner.clip:
            torch.nn.utils.clip_grad_norm_(self.flat.parameters, self.inner.clip)
        self.opt.step()
        self._n += 1
        self.on_step(StepInfo(self._n, total, n / max(time.monotonic() - begun, 1e-9)))
        return Step(total, n)

    def gradient(self, *, num_sequences: int) -> tuple[Tensor, Loss]:
        for p in self.flat.parameters:
            p.grad = None
        total, n, seen = 0.0, 0, 0
        while seen < num_sequences:
            b = next(self._source)
            seen += len(b)
            loss = self._loss(b)
            loss.backward()
            total += loss.item(); n += b[:, 1:].numel()
        return self.flat.gradient(), Loss(total, n)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Loss:
        return Loss(self._loss(tokens).item(), tokens[:, 1:].numel())
