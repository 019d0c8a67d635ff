"""What is read off a model is what a step of it asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.models.build import layout_of, skeleton
from potluck.strategies.sub_gemm.head import HeadConfig, HeadModel
from potluck.strategies.sub_gemm.product import Product
from potluck.strategies.sub_gemm.walk import Asked, asked_products

gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 96}
llama = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


@pytest.mark.parametrize("config", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("logits_bytes", [256 << 20, 4 * 96 * 5], ids=["whole", "five rows at a time"])
def test_a_real_step_asks_for_the_same(config: dict[str, Any], logits_bytes: int) -> None:
    config = config | ids
    layout = layout_of(skeleton(config))
    model = HeadModel(config, layout, HeadConfig(batch_size=2, seq_len=8, logits_bytes=logits_bytes))
    model.load(0.02 * torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)))
    seen: Counter[Asked] = Counter()

    def multiply(product: Product) -> Tensor:
        seen[Asked(*product.shape, product.kind)] += 1
        return product.a.values @ product.b.values

    model.gradient([torch.zeros(2, 9, dtype=torch.int64)], num_sequences=2, multiplier=multiply)
    asked: Counter[Asked] = Counter()
    for product, count in asked_products(config, num_tokens=16, logits_bytes=logits_bytes).items():
        asked[product._replace(times=1)] += product.times * count
    assert asked == seen


def test_a_model_of_many_billions_is_read_without_values() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096, "vocab_size": 32000,
        "tie_word_embeddings": False,
    }  # fmt: skip
    asked = asked_products(config | ids, num_tokens=1024)
    assert asked[Asked(1024, 8192, 1024, "forward")] == 160  # keys and values of 8 heads
    assert asked[Asked(1024, 8192, 28672, "forward")] == 160  # gate and up
    assert asked[Asked(28672, 1024, 8192, "weight_gradient")] == 160
    assert asked[Asked(1024, 8192, 32000, "forward")] == 1
    forward = sum(2 * a.m * a.n * a.q * count for a, count in asked.items() if a.kind == "forward")
    assert forward == 2 * 1024 * (80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 8192 * 32000)
