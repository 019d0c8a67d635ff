"""Sparse DiLoCo: one worker is a plain loop with error feedback, the rest is the contract; and what it refuses."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import references
from torch import Tensor, nn

from potluck.aggregation.config import AggregationConfig
from potluck.codecs.bundle import Bundle, write_flat
from potluck.codecs.policy import CodecPolicy, CodecRule
from potluck.contract import checks
from potluck.models.flat import layout_of
from potluck.optim.inner import InnerConfig
from potluck.planner.compression import CompressionConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.sparse_diloco import SparseDiLoCo, SparseDiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.types.errors import RecipeError
from potluck.types.params import Layout, Params

pytestmark = pytest.mark.timeout(120)
num_steps, beta, sparse = 5, 0.95, "topk(25%)+2bit"


def make() -> Strategy:
    return SparseDiLoCo(SparseDiLoCoConfig(num_inner_steps=num_steps))


def problem(num_rounds: int = 4, **changes: Any) -> Problem:
    given = {"up_codec": f"{sparse}+ef({beta})", "aggregation": AggregationConfig(rule="norm_clipping"), **changes}
    return Problem(num_rounds=num_rounds, **given)


def reference(of: Problem, scratch: Path) -> Tensor:
    """a = beta e + delta; theta <- theta - C(a); e = a - C(a), C tensor by tensor, int8 for small ones."""
    model, found = of.model(), CodecPolicy(default=sparse)
    inner, layout = references.make_adamw(model, of), layout_of(model)
    theta = references.flat(model).clone()
    e = torch.zeros_like(theta)
    batches = of.batches(of.num_rounds * num_steps * of.inner.batch_size)
    for round in range(of.num_rounds):
        nn.utils.vector_to_parameters(theta.clone(), model.parameters())
        for k in range(num_steps):
            references.train_step(model, inner, next(batches), of, (round + k / num_steps) / of.num_rounds)
        a = beta * e + (theta - references.flat(model))
        write_flat(scratch, "delta", a, layout, found)
        with Bundle.open(scratch) as bundle:
            sent = bundle.flat_slice("delta", layout, 0, layout.numel).clone()
        theta, e = theta - sent, a - sent
    return theta


def test_one_worker_equals_a_plain_loop_with_error_feedback(tmp_path: Path) -> None:
    given = problem()
    given.store_shards(tmp_path)
    checks.equals_reference(given, make, lambda of: reference(of, tmp_path / "update"))


def test_it_goes_on_exactly_after_restarts() -> None:
    checks.resumes_exactly(problem(down_codec="int8-delta"), make)


def test_it_converges_with_losses() -> None:
    checks.survives_losses(problem(12, inner=InnerConfig(lr=1e-2, batch_size=8, warmup=0.1)), make)


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "grpc"])
def test_it_moves_what_it_says(sockets: bool) -> None:
    checks.moves_what_it_says(problem(), make, sockets=sockets)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ((CodecRule(codec="bf16", match="*.wte.*"),), "wte.weight as bf16"),
        ((CodecRule(codec="int8"),), "as int8: leave that rule out"),
        ((CodecRule(codec="fp32", max_numel=1024),), ""),
        ((CodecRule(codec="topk(50%)", match="*.wte.*"), CodecRule(codec="bf16", match="*.bias")), ""),
    ],
)
def test_no_rule_sends_a_matrix_whole(rules: tuple[CodecRule, ...], reason: str) -> None:
    plan = problem().plan(make())
    facts = replace(plan.facts(initial=Params(()), zeros=Params(())), up_rules=rules, layout=Layout.of(
        [("transformer.wte.weight", (100, 50)), ("h.0.weight", (40, 40)), ("h.0.bias", (4000,))]
    ))  # fmt: skip
    with pytest.raises(RecipeError, match=reason) if reason else contextlib.nullcontext():
        make().init(facts)


def test_no_fleet_chooses_another_codec() -> None:
    plan = problem().plan(make())
    facts = plan.facts(initial=Params(()), zeros=Params(()))
    with pytest.raises(RecipeError, match=r"compression.mode is 'adaptive': set it to 'fixed'"):
        make().init(replace(facts, compression=CompressionConfig(mode="adaptive")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"up_codec": "int4+ef"}, "largest values only"),
        ({"up_codec": sparse}, "needs error feedback"),
        ({"aggregation": AggregationConfig()}, "'norm_clipping'"),
    ],
)
def test_it_says_what_the_recipe_lacks(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        checks.run(problem(**changes), make, num_workers=1)
