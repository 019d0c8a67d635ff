"""Federated LoRA in plain PyTorch and PEFT, joined in NumPy on dense matrices. Nothing is Potluck's but the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from contract.references import make_adamw, train_step, trained
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from potluck.models.build import build
from potluck.simulator.exact.problem import Problem

Matrix = npt.NDArray[np.float64]


@dataclass
class Adapter:
    """Of the highest rank, with its scale; `merged` is what is in the base."""

    a: Matrix
    b: Matrix
    merged: Matrix


def scale_of(problem: Problem, rank: int) -> float:
    assert problem.adapter is not None
    return problem.adapter.alpha / (np.sqrt(rank) if problem.adapter.rslora else rank)


class Owner:
    """One worker: a model by PEFT's own hand, its optimizer, and with FedSA its B."""

    def __init__(self, problem: Problem, rank: int) -> None:
        assert problem.adapter is not None
        self.problem, self.rank = problem, rank
        self.model: Any = build(problem.config_json(), seed=problem.seed)
        settings = LoraConfig(
            r=rank, lora_alpha=problem.adapter.alpha, use_rslora=problem.adapter.rslora,  # pyright: ignore[reportArgumentType]
            target_modules=list(problem.adapter.target_modules), fan_in_fan_out=problem.family == "gpt2",
        )  # fmt: skip
        inject_adapter_in_model(settings, self.model)
        self.layers: dict[str, Any] = {n: m for n, m in self.model.named_modules() if hasattr(m, "lora_A")}
        self.bases = {name: layer.base_layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.optimizer = make_adamw(self.model, problem)
        self.own: dict[str, Matrix] = {}

    def fallen(self, rank: int) -> Owner:
        """The same worker with a lower rank, and the moments of what it keeps."""
        lower = Owner(self.problem, rank)
        for name, layer in lower.layers.items():
            for mine, its, cut in (
                (layer.lora_A["default"].weight, self.layers[name].lora_A["default"].weight, lambda t: t[:rank]),
                (layer.lora_B["default"].weight, self.layers[name].lora_B["default"].weight, lambda t: t[:, :rank]),
            ):
                kept = self.optimizer.state[its]
                lower.optimizer.state[mine] = {
                    "step": kept["step"], "exp_avg": cut(kept["exp_avg"]).clone(),
                    "exp_avg_sq": cut(kept["exp_avg_sq"]).clone(),
                }  # fmt: skip
        return lower

    def load(self, adapters: dict[str, Adapter], ratio: float) -> None:
        for name, each in adapters.items():
            layer = self.layers[name]
            b = self.own.get(name, each.b[:, : self.rank] * ratio)
            with torch.no_grad():
                layer.lora_A["default"].weight.copy_(torch.from_numpy(each.a[: self.rank]))
                layer.lora_B["default"].weight.copy_(torch.from_numpy(b))
                merged = torch.from_numpy(each.merged.T if self.problem.family == "gpt2" else each.merged)
                layer.base_layer.weight.copy_(self.bases[name] + merged.float())

    def factors(self, name: str) -> tuple[Matrix, Matrix]:
        layer = self.layers[name]
        return tuple(
            weights["default"].weight.detach().double().numpy().copy() for weights in (layer.lora_A, layer.lora_B)
        )  # pyright: ignore[reportReturnType]

    def tail(self, first: int) -> torch.Tensor:
        """The sum over layers of ||B[:, first:]|| ||A[first:]||, with gradients."""
        norm = torch.linalg.vector_norm
        pairs = [(layer.lora_A["default"].weight, layer.lora_B["default"].weight) for layer in self.layers.values()]
        return torch.stack([norm(b[:, first:]) * norm(a[first:]) for a, b in pairs]).sum()

    def train_only(self, factor: str) -> None:
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(f"lora_{factor}" in name or factor == "AB")
                parameter.grad = None


def drawn(shape: tuple[int, int], generator: torch.Generator) -> Matrix:
    a = torch.empty(shape)
    return nn.init.kaiming_uniform_(a, a=5**0.5, generator=generator).double().numpy()


def first(problem: Problem) -> dict[str, Adapter]:
    """As PEFT begins them, from the run's seed: layer after layer, A Kaiming uniform and B zero."""
    assert problem.adapter is not None
    generator = torch.Generator().manual_seed(problem.seed)
    owner = Owner(problem, problem.adapter.rank)
    found: dict[str, Adapter] = {}
    for name in owner.layers:
        a, b = owner.factors(name)
        merged = np.zeros((b.shape[0], a.shape[1]))
        found[name] = Adapter(drawn(a.shape, generator), np.zeros_like(b), merged)  # pyright: ignore[reportArgumentType]
    return found


def weighed(matrices: Sequence[Matrix], weights: Sequence[float]) -> Matrix:
    """Their mean; smaller ones have zeros below and to the right."""
    rows, columns = (max(m.shape[axis] for m in matrices) for axis in (0, 1))
    total = np.zeros((rows, columns))
    for matrix, weight in zip(matrices, weights, strict=True):
        total[: matrix.shape[0], : matrix.shape[1]] += weight / sum(weights) * matrix
    return total


def fed_lora(
    problem: Problem, rule: str, *, num_inner_steps: int, ranks: Sequence[int], seed_of: Callable[[int], int],
    press: float = 0.0, fell: Callable[[list[int]], None] = lambda _: None,
) -> dict[str, Adapter]:  # fmt: skip
    """Worker i trains `ranks[i]`; all have as much data. `seed_of(round)` is what new factors are drawn from. `fell`
    hears the ranks after each round, which HetLoRA lowers where components that it presses down have shrunk."""
    assert problem.adapter is not None
    highest = problem.adapter.rank
    adapters, scale = first(problem), scale_of(problem, highest)
    owners = [Owner(problem, rank) for rank in ranks]
    batch = problem.inner.batch_size
    asked = [[(f"w{i + 1}", num_inner_steps * batch) for i in range(len(ranks))]] * problem.num_rounds
    has_shrunk = [False] * len(ranks)
    for round, rows in enumerate(problem.dealt(asked)):
        moving = {"ffa": "B", "ro_lora": "AB"[(round + 1) % 2]}.get(rule, "AB")
        for i, owner in enumerate(owners):
            owner.load(adapters, scale / scale_of(problem, owner.rank))
            owner.train_only(moving)
            lower = max(r for r in (0, *problem.adapter.lower_ranks) if r < owner.rank)
            pressing = press if lower else 0.0
            size_before = owner.tail(lower).item()

            def extra(owner: Owner = owner, lower: int = lower) -> torch.Tensor:
                return press * owner.tail(lower)

            if rule in ("flora", "flex_lora"):
                owner.optimizer = make_adamw(owner.model, problem)
            for k, tokens in enumerate(rows[f"w{i + 1}"].split(batch)):
                progress = (round + k / num_inner_steps) / problem.num_rounds
                train_step(owner.model, owner.optimizer, tokens, problem, progress, extra=extra if pressing else None)
            has_shrunk[i] = bool(pressing) and owner.tail(lower).item() < size_before
            owner.train_only("AB")
            assert len(trained(owner.model)) == 2 * len(owner.layers)
        next_ranks = [
            max(r for r in problem.adapter.lower_ranks if r < owner.rank) if has_shrunk[i] else owner.rank
            for i, owner in enumerate(owners)
        ]
        fresh = torch.Generator().manual_seed(seed_of(round + 1))
        for name, each in adapters.items():
            sent = [(*owner.factors(name), scale_of(problem, owner.rank)) for owner in owners]
            equal, highest_sent = [1.0] * len(sent), max(owner.rank for owner in owners)
            dense = weighed([s * b @ a for a, b, s in sent], equal)
            mean_a = weighed([a for a, _, _ in sent], equal)
            mean_b = weighed([b * s / scale for _, b, s in sent], equal)
            match rule:
                case "fed_it" | "ffa" | "ro_lora":
                    each.a, each.b = mean_a, mean_b
                case "het_lora":
                    norms = [float(np.linalg.norm(s * b @ a)) for a, b, s in sent]
                    each.a[:highest_sent] = weighed([a for a, _, _ in sent], norms)
                    each.b[:, :highest_sent] = weighed([b * s / scale for _, b, s in sent], norms)
                case "fed_sa":
                    each.a = mean_a
                    for owner in owners:
                        owner.own[name] = owner.factors(name)[1]
                case "fed_ex":
                    each.a, each.b = mean_a, mean_b
                    each.merged = each.merged + dense - scale * mean_b @ mean_a
                case "flora":
                    each.merged = each.merged + dense
                    each.a, each.b = drawn(each.a.shape, fresh), np.zeros_like(each.b)  # pyright: ignore[reportArgumentType]
                case _:
                    u, s, vh = np.linalg.svd(dense)
                    signs = np.sign(u[np.abs(u).argmax(0), np.arange(u.shape[1])])[:highest]
                    each.a = (vh[:highest].T * signs).T
                    each.b = u[:, :highest] * signs * s[:highest] / scale
        for i, rank in enumerate(next_ranks):
            if rank < owners[i].rank:
                owners[i] = owners[i].fallen(rank)
        fell([owner.rank for owner in owners])
    return adapters
