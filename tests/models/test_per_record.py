"""Gradients of single records: against a loop over records, and against Opacus."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models.families import FAMILIES
from torch import Tensor, nn

from potluck.models.adapters import inject
from potluck.models.build import build, checkpoint_activations
from potluck.models.config import AdapterConfig
from potluck.models.loss import TokenLoss
from potluck.models.per_record import record_gradients
from potluck.types.errors import ModelError

TARGETS = {"gpt2": ("c_attn", "mlp.c_proj"), "llama": ("q_proj", "v_proj", "down_proj")}
num_records, seq_len = 5, 7


def adapted(family: str) -> tuple[nn.Module, list[nn.Linear], int]:
    """A model whose factors B are not zero, and the layers that hold them."""
    config = FAMILIES[family]
    model = inject(build(config, seed=3), AdapterConfig(rank=3, alpha=6, target_modules=TARGETS[family.split("-")[0]]))
    generator = torch.Generator().manual_seed(4)
    layers: list[nn.Linear] = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and (".lora_A." in name or ".lora_B." in name):
            weight = 0.3 * torch.randn(layer.weight.shape, generator=generator)
            layer.weight = nn.Parameter(weight, requires_grad=".lora_B." in name)
            layers += [layer] if ".lora_B." in name else []
    return model, layers, int(config["vocab_size"])


def records(vocab_size: int) -> Tensor:
    """Each of another number of tokens that are predicted."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, vocab_size, (num_records, seq_len + 1), generator=generator)
    for i, row in enumerate(rows):
        row[: i + 1] = ~row[: i + 1]
    return rows


def losses_of(model: nn.Module, vocab_size: int, rows: Tensor, **how: Any) -> Tensor:
    return TokenLoss(model, vocab_size=vocab_size, marked=True, **how).of_sequences(rows)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-tied"])
def test_they_are_those_of_a_loop_over_records(family: str, checkpointed: bool) -> None:
    model, layers, vocab_size = adapted(family)
    if checkpointed:
        checkpoint_activations(model)
    rows = records(vocab_size)
    got = record_gradients(layers, lambda: losses_of(model, vocab_size, rows), num_records)
    for record in range(num_records):
        model.zero_grad()
        losses_of(model, vocab_size, rows[record : record + 1]).sum().backward()
        for layer, gradients in zip(layers, got, strict=True):
            assert layer.weight.grad is not None and layer.weight.grad.abs().max() > 1e-4
            torch.testing.assert_close(gradients[record], layer.weight.grad, rtol=1e-4, atol=1e-6)


def test_with_logits_in_chunks_they_are_the_same() -> None:
    model, layers, vocab_size = adapted("llama")
    rows = records(vocab_size)
    plain = record_gradients(layers, lambda: losses_of(model, vocab_size, rows), num_records)
    chunked = record_gradients(
        layers, lambda: losses_of(model, vocab_size, rows, max_whole_bytes=1, chunk_bytes=16 * vocab_size), num_records
    )
    for a, b in zip(plain, chunked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_they_are_those_of_opacus(family: str) -> None:
    from opacus import GradSampleModule

    model, layers, vocab_size = adapted(family)
    rows = records(vocab_size)
    got = record_gradients(layers, lambda: losses_of(model, vocab_size, rows), num_records)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks on a module whose inputs need no gradient
        wrapped: Any = GradSampleModule(model, loss_reduction="sum", strict=False)
        losses_of(model, vocab_size, rows).sum().backward()
    for layer, gradients in zip(layers, got, strict=True):
        torch.testing.assert_close(gradients, layer.weight.grad_sample, rtol=1e-4, atol=1e-6)
    wrapped.remove_hooks()


def test_the_layers_are_as_before_afterwards() -> None:
    model, layers, vocab_size = adapted("gpt2")
    rows = records(vocab_size)
    before = losses_of(model, vocab_size, rows)
    record_gradients(layers, lambda: losses_of(model, vocab_size, rows), num_records)
    assert all(layer.weight.grad is None and "forward" not in vars(layer) for layer in layers)
    assert torch.equal(losses_of(model, vocab_size, rows), before)


def test_records_that_cannot_be_told_apart_are_refused() -> None:
    layer = nn.Linear(3, 4, bias=False)
    with pytest.raises(ModelError, match=r"given \[10, 3\] where 5 records"):
        record_gradients([layer], lambda: layer(torch.ones(10, 3)), 5)
    assert "forward" not in vars(layer)
