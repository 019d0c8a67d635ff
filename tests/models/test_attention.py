"""Attention in fp32 within bf16: what it computes, and that it is what a replica on a processor has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from potluck.models import attention
from potluck.models.attention import implementation, widen_attention
from potluck.models.build import build

gpt2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
llama = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16,
}  # fmt: skip
tokens = torch.arange(32).view(2, 16) * 7 % 64


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), [p.grad.float() for p in model.parameters()]


@pytest.mark.parametrize("config", [gpt2, llama], ids=["gpt2", "llama"])
def test_in_fp32_nothing_changes(config: dict[str, Any]) -> None:
    plain: Any = build(config, seed=1)
    wide: Any = build(config, seed=1)
    widen_attention(wide)
    assert wide.config._attn_implementation == implementation
    expected, own = loss_and_gradients(plain), loss_and_gradients(wide)
    assert torch.equal(own[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(own[1], expected[1], strict=True))


@pytest.mark.parametrize("config", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_under_bf16_it_is_nearer_to_fp32_than_bf16_is(config: dict[str, Any], is_autocast: bool) -> None:
    exact = loss_and_gradients(build(config, seed=1))

    def error(*, is_wide: bool) -> float:
        model = build(config, seed=1)
        if not is_autocast:
            model = model.to(torch.bfloat16)
        if is_wide:
            widen_attention(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            _, gradients = loss_and_gradients(model)
        return sum(float((a - b).norm() ** 2) for a, b in zip(gradients, exact[1], strict=True))

    assert error(is_wide=True) < 1.05 * error(is_wide=False)


def test_a_model_with_attention_of_another_kind_keeps_it() -> None:
    model: Any = build(gpt2, seed=1)
    model.set_attn_implementation("eager")
    widen_attention(model)
    assert model.config._attn_implementation == "eager"


def test_long_sequences_are_computed_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(*, is_wide: bool) -> torch.Tensor:
        model: Any = build(gpt2, seed=1).to(torch.bfloat16)
        if is_wide:
            widen_attention(model)
        return model(input_ids=tokens, labels=tokens).loss

    assert not torch.equal(losses(is_wide=True), losses(is_wide=False))
    monkeypatch.setattr(attention, "max_tokens", 15)
    assert torch.equal(losses(is_wide=True), losses(is_wide=False))
