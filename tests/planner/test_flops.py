"""Work of a step, by hand and against torch's own counter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models.families import gpt2, llama
from torch.utils.flop_counter import FlopCounterMode

from potluck.models.build import build
from potluck.planner.flops import Trained, Work, forward_flops, layer_params, step_work
from potluck.planner.memory import ModelDims

# d = 4, n_q d_h = 4, n_kv d_h = 2, d_ff = 6, gated
dims = ModelDims(
    num_params=1000, num_layers=3, hidden_dim=4, ff_dim=6, vocab_size=10, is_gated=True, num_heads=2, num_kv_heads=1
)  # fmt: skip
P = 2 * 4 * 4 + 2 * 4 * 2 + 3 * 4 * 6 + 2 * 4  # 128


def work(**changes: Any) -> Work:
    return step_work(dims, **{"seq_len": 8, "num_tokens": 1, **changes})


def test_a_layer_by_hand() -> None:
    assert layer_params(dims) == P
    assert layer_params(replace(dims, is_gated=False, num_kv_heads=2)) == 4 * 4 * 4 + 2 * 4 * 6 + 8
    assert layer_params(dims, ff_share=0.5, head_share=0.5) == 0.5 * 32 + 0.5 * 16 + 36 + 8
    assert forward_flops(dims, 8) == (2 * P, 2 * 8 * 4)
    assert forward_flops(dims, 8, head_share=0.5)[1] == 2 * 8 * 2


def test_a_step_with_everything_trained_is_three_forward_passes() -> None:
    found = work(num_tokens=5)
    assert found.gemm_flops == 5 * (3 * 3 * 2 * P + 3 * 2 * 4 * 10)
    assert found.attention_flops == 5 * 3 * 3 * 2 * 8 * 4
    assert found.optimizer_bytes == 7 * 4 * 1000
    assert found.num_gemms == 7 * 9 + 3
    assert found.flops == found.gemm_flops + found.attention_flops


def test_recompute_adds_a_forward_pass_of_the_layers() -> None:
    assert work(recompute=True).gemm_flops - work().gemm_flops == 3 * 2 * P
    assert work(recompute=True).attention_flops - work().attention_flops == 3 * 2 * 8 * 4


def test_frozen_layers() -> None:
    # Layer 1 of 0, 1, 2 is trained: 0 only goes forward, 1 takes 1 + 2, 2 takes 1 + 1 and its attention 1 + 2.
    found = work(trained=Trained(layers=frozenset({1}), embedding=False, head=False), num_trained_params=10)
    head = 2 * 4 * 10
    assert found.gemm_flops == (1 + 3 + 2) * 2 * P + 2 * head  # through the head goes a gradient
    assert found.attention_flops == (1 + 3 + 3) * 2 * 8 * 4
    assert found.optimizer_bytes == 7 * 4 * 10
    only_head = work(trained=Trained(layers=frozenset(), embedding=False, head=True))
    assert only_head.gemm_flops == 3 * 2 * P + 2 * head
    nothing = work(trained=Trained(layers=frozenset(), embedding=False, head=False))
    assert nothing.gemm_flops == 3 * 2 * P + head
    assert nothing.attention_flops == 3 * 2 * 8 * 4


@pytest.mark.parametrize("config", [gpt2(n_embd=64, n_layer=3), llama(hidden_size=64, intermediate_size=96)])
def test_products_with_weights_are_what_torch_counts(config: dict[str, Any]) -> None:
    """Attention apart, which the counter of the math kernel counts whole and this model by half."""
    model = build(config, seed=1)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    dims = ModelDims.of(config, sum(p.numel() for p in model.parameters()))
    found = step_work(dims, seq_len=16, num_tokens=32)
    assert found.gemm_flops == pytest.approx(products, rel=0.02)  # the 2 d of the norms
