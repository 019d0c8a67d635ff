"""The inner optimizer on a flat model: torch's AdamW, SGD or Muon, or Adafactor, with its state in flat vectors.

Muon takes the matrices between embedding and head, AdamW what is left: embeddings, head, norms and biases. Both go by
one learning rate: Muon's steps are scaled to the size of AdamW's (`match_rms_adamw`; Liu et al. 2025,
arXiv:2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from potluck.models.flat import FlatModel
from potluck.optim.adafactor import Adafactor, factor_shapes
from potluck.optim.inner import InnerConfig
from potluck.types.errors import CorruptError, ModelError

Slots = dict[str, list[tuple[nn.Parameter, tuple[int, ...]]]]
"""By the name that the optimizer gives it: whose state there is, and in which shape."""


class InnerOptimizer:
    """What it keeps of each name is views of one flat vector, made at the first step."""

    def __init__(self, flat: FlatModel, config: InnerConfig) -> None:
        self._flat, self._config = flat, config
        self._kept: dict[str, Tensor] | None = None
        self.reset()

    def reset(self) -> None:
        """As before the first step."""
        config, parameters = self._config, self._flat.trained
        self._kept = None
        self._counted: list[nn.Parameter] = []  # whose steps are counted
        self._slots: Slots = {}
        optimizers: list[torch.optim.Optimizer]
        match config.optimizer:
            case "sgd":
                optimizers = [torch.optim.SGD(self._groups(parameters), lr=config.lr)]
            case "adamw":
                optimizers = [self._adamw(parameters)]
            case "muon":
                hidden = hidden_matrices(self._flat)
                others = [p for p in parameters if not any(p is h for h in hidden)]
                optimizers = [_muon(hidden, config)] if hidden else []
                optimizers += [self._adamw(others)] if others else []
                self._slots["momentum_buffer"] = [(p, tuple(p.shape)) for p in hidden]
            case "adafactor":
                groups = self._groups(parameters)
                optimizers = [Adafactor(groups, lr=config.lr, beta2=config.betas[1], eps=config.eps)]
                self._counted = parameters
                for parameter in parameters:
                    for name, shape in factor_shapes(parameter.shape).items():
                        self._slots.setdefault(name, []).append((parameter, shape))
        self._optimizers = optimizers
        self._slots = {name: slot for name, slot in self._slots.items() if slot}

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """Decay on what has two or more dimensions only."""
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self._config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _adamw(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        config = self._config
        self._counted = parameters
        shapes = [(p, tuple(p.shape)) for p in parameters]
        self._slots |= {"exp_avg": shapes, "exp_avg_sq": shapes}
        fused = True if self._flat.device.type == "cuda" else None
        groups = self._groups(parameters)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients to at most that norm; 0 for no limit. The norm before."""
        if limit:
            return nn.utils.clip_grad_norm_(self._flat.trained, limit)
        grads = [p.grad for p in self._flat.trained if p.grad is not None]
        return nn.utils.get_total_norm(grads)

    def step(self, lr: float, *, seed: int) -> None:
        """`seed` is of the chance in it: where weights are rounded at random."""
        if self._slots and self._kept is None:
            self._make()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["seed"] = lr, seed
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """What is kept, fp32, by name, and each counted tensor's steps, int64. {} before the first step."""
        if self._kept is None:
            return {}
        counts = [int(self._state(p)["step"]) for p in self._counted]
        return {
            **{name: flat.cpu() for name, flat in self._kept.items()},
            "steps": torch.tensor(counts, dtype=torch.int64),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """CorruptError if the tensors are not those of this model and optimizer."""
        expected: dict[str, tuple[torch.dtype, list[int]]] = {}
        if tensors and self._slots:
            expected = {name: (torch.float32, [_numel(slot)]) for name, slot in self._slots.items()}
            expected["steps"] = (torch.int64, [len(self._counted)])
        found = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
        if found != expected:
            raise CorruptError(
                f"the inner optimizer's state holds {_named(found)} and must hold {_named(expected)}; start it afresh"
            )
        self.reset()
        if not tensors:
            return
        for name, flat in self._make().items():
            flat.copy_(tensors[name])
        for parameter, count in zip(self._counted, tensors["steps"].tolist(), strict=True):
            self._state(parameter)["step"].fill_(count)

    def _make(self) -> dict[str, Tensor]:
        device = self._flat.device
        self._kept = {}
        for name, slot in self._slots.items():
            flat = self._kept[name] = torch.zeros(_numel(slot), dtype=torch.float32, device=device)
            offset = 0
            for parameter, shape in slot:
                stop = offset + math.prod(shape)
                self._state(parameter)[name] = flat[offset:stop].view(shape)
                offset = stop
        step_device = device if device.type == "cuda" else torch.device("cpu")
        for parameter in self._counted:
            self._state(parameter)["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
        return self._kept

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What the optimizer that has this parameter keeps of it."""
        for optimizer in self._optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state[parameter]
        raise AssertionError("a parameter has no optimizer")


def hidden_matrices(flat: FlatModel) -> list[nn.Parameter]:
    """The parameters of two dimensions that are neither an embedding nor the head."""
    module: Any = flat.module
    outer = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    if (head := module.get_output_embeddings()) is not None:
        outer.add(id(head.weight))
    return [p for p in flat.trained if p.dim() == 2 and id(p) not in outer]


def _muon(parameters: list[nn.Parameter], config: InnerConfig) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ModelError(
            f"torch {torch.__version__} has no Muon, which the run's inner optimizer is; install 2.9 or later"
        )
    return kind(
        parameters, lr=config.lr, weight_decay=config.weight_decay, momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip


def _numel(slot: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) for _, shape in slot)


def _named(tensors: Mapping[str, tuple[torch.dtype, list[int]]]) -> str:
    return ", ".join(f"{name[:50]} {shape}" for name, (_, shape) in sorted(tensors.items())[:5]) or "nothing"
