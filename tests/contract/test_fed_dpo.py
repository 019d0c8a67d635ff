"""Federated DPO against plain PEFT step by step, and its reference, which no rule moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from contract.references import flat, make_adamw, trained
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from potluck.contract import checks
from potluck.models.config import AdapterConfig
from potluck.models.loss import TokenLoss
from potluck.models.preference import pair_losses
from potluck.optim.inner import InnerConfig, learning_rate
from potluck.simulator.exact.problem import Problem
from potluck.strategies.fed_dpo import FedDPO, FedDPOConfig
from potluck.types.errors import RecipeError

beta = 2.0


def problem_of(**changes: Any) -> Problem:
    given: dict[str, Any] = {
        "family": "llama", "num_rounds": 3, "pairs": True,
        "adapter": AdapterConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj")),
        "inner": InnerConfig(lr=0.1, batch_size=4, warmup=0.1, weight_decay=0.1), **changes,
    }  # fmt: skip
    return Problem(**given)


def making(rule: str = "fed_it") -> Callable[[], FedDPO]:
    return lambda: FedDPO(FedDPOConfig.model_validate({"rule": rule, "num_inner_steps": 3, "beta": beta}))


@contextmanager
def base_alone(model: Any) -> Iterator[None]:
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    scales = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)
    yield
    for layer, scale in zip(layers, scales, strict=True):
        layer.scaling = scale


def log_probabilities(model: Any, rows: Tensor) -> Tensor:
    """Of the answers. rows [n, seq_len + 1], tokens of prompts as complements."""
    inputs, targets = torch.where(rows < 0, ~rows, rows)[:, :-1], rows[:, 1:]
    found = log_softmax(model(input_ids=inputs).logits, dim=-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (found * (targets >= 0)).sum(dim=1)


def plain_dpo(problem: Problem, num_steps: int) -> tuple[Tensor, list[float]]:
    """Parameters after so many steps of one worker, and the loss of each."""
    model: Any = problem.model()
    optimizer, losses = make_adamw(model, problem), list[float]()
    for step, pairs in enumerate(problem.batches(num_steps * problem.inner.batch_size)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(problem.inner, step / num_steps)
        with base_alone(model), torch.no_grad():
            chosen_ref, rejected_ref = (log_probabilities(model, pairs[:, i]) for i in (0, 1))
        chosen, rejected = (log_probabilities(model, pairs[:, i]) for i in (0, 1))
        loss = -logsigmoid(beta * ((chosen - chosen_ref) - (rejected - rejected_ref))).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(model), problem.inner.clip)
        optimizer.step()
        losses.append(loss.item())
    return flat(model), losses


def test_one_worker_equals_plain_peft_step_by_step() -> None:
    problem = problem_of(num_rounds=9)
    make = lambda: FedDPO(FedDPOConfig(num_inner_steps=1, beta=beta))  # noqa: E731
    got = checks.run(problem, make, num_workers=1)
    params, losses = plain_dpo(problem, 9)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and abs(losses[-1] - losses[0]) > 1e-3
    assert got.round_losses == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(got.params, params, atol=1e-5, rtol=0)
    assert got.losses[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("rule", ["flora", "fed_ex", "fed_sa"])
def test_the_reference_stays_what_it_was(rule: str) -> None:
    """What was merged is part of the policy: else the loss would begin at log 2 again in every round."""
    got = checks.run(problem_of(num_rounds=16), making(rule), num_workers=2)
    assert got.losses[16] < 0.6 and max(got.round_losses[-3:]) < 0.66


def test_losses_in_chunks_have_the_same_gradients() -> None:
    problem = problem_of()
    model = problem.model()
    pairs = problem.shards[0][:5].long()
    for p in trained(model):
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    found: list[tuple[Tensor, list[Tensor | None]]] = []
    for most in (0, 1 << 30):
        losses = TokenLoss(model, vocab_size=32, max_whole_bytes=most, chunk_bytes=4 * 32 * 7, marked=True)
        each = pair_losses(losses, model, pairs, beta=beta)
        each.sum().backward()
        found.append((each.detach(), [p.grad for p in trained(model)]))
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0].std() > 1e-3


def test_single_answers_are_refused() -> None:
    problem = problem_of(pairs=False)
    with pytest.raises(RecipeError, match="learns from pairs of answers"):
        making()().init(checks.facts_of(problem.plan(making()())))


def test_stop_and_resume_changes_nothing() -> None:
    checks.resumes_exactly(problem_of(), making("flora"), moments=(0.3, 0.7))
