"""The model on the head against a plain loop: its gradient, its loss, what stops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, llama
from strategies.sub_gemm.local import TiledMultiplier
from torch import Tensor
from torch.nn.functional import cross_entropy

from potluck.clock.conversation import Stopped
from potluck.models.build import build, layout_of
from potluck.strategies.sub_gemm.head import HeadConfig, HeadModel
from potluck.strategies.sub_gemm.product import Product
from potluck.types.errors import DataError, ModelError, NotFinite, RoundFailed

SEQ_LEN = 12


def some_tokens(num_sequences: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 64, (num_sequences, SEQ_LEN + 1), generator=generator, dtype=torch.int32)


def head_of(config: dict[str, Any], **changes: Any) -> tuple[HeadModel, Tensor]:
    """A head of two sequences a micro-batch, and parameters for it."""
    model = build(config, seed=1)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    head = HeadModel(config, layout_of(model), HeadConfig(**{"batch_size": 2, "seq_len": SEQ_LEN, **changes}))
    head.load(theta)
    return head, theta


def plain_gradient(config: dict[str, Any], tokens: Tensor) -> tuple[Tensor, float]:
    model = build(config, seed=1)
    logits = model(input_ids=tokens[:, :-1].long()).logits
    loss = cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1).long(), reduction="sum")
    loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]), float(loss.detach())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "changes", [{}, {"logits_bytes": 0}, {"checkpointing": True, "attention": True, "batch_size": 5}]
)
def test_gradient_and_loss_are_those_of_the_plain_model(name: str, changes: dict[str, Any]) -> None:
    head, _ = head_of(FAMILIES[name], **changes)
    multiplier = TiledMultiplier()
    batches = some_tokens().split(3)
    gradient, loss = head.gradient(batches, num_sequences=5, multiplier=multiplier)
    expected, expected_loss = plain_gradient(FAMILIES[name], some_tokens())
    assert loss.num_tokens == 5 * SEQ_LEN and loss.loss_sum == pytest.approx(expected_loss, rel=1e-5)
    assert gradient.dtype == torch.float32 and gradient.shape == (head.layout.numel,)
    assert float((gradient - expected).norm()) <= 1e-4 * float(expected.norm())
    again, _ = head.gradient(batches, num_sequences=5, multiplier=TiledMultiplier())
    assert torch.equal(again, gradient)  # nothing of a step is left for the next


def test_only_the_sequences_that_were_asked_for_are_used() -> None:
    head, _ = head_of(llama())
    gradient, loss = head.gradient(iter(some_tokens().split(2)), num_sequences=3, multiplier=TiledMultiplier())
    expected, _ = plain_gradient(llama(), some_tokens()[:3])
    assert loss.num_tokens == 3 * SEQ_LEN
    assert float((gradient - expected).norm()) <= 1e-4 * float(expected.norm())


def test_evaluation_asks_nobody() -> None:
    head, _ = head_of(llama(), batch_size=3)
    loss = head.evaluate(some_tokens())
    assert loss.num_tokens == 5 * SEQ_LEN
    assert loss.loss_sum == pytest.approx(plain_gradient(llama(), some_tokens())[1], rel=1e-6)


def stopping(error: type[BaseException], at: int) -> Callable[[Product], Tensor]:
    """Ends the step at that product, because it is not wanted any more or fails."""
    multiplier = TiledMultiplier()

    def multiply(product: Product) -> Tensor:
        if len(multiplier.products) == at:
            raise error("no device is left")
        return multiplier(product)

    return multiply


@pytest.mark.parametrize("error", [Stopped, RoundFailed])
@pytest.mark.parametrize("at", [0, 14, 30, 60])  # forward and backward passes of either micro-batch
def test_a_step_that_ends_early_leaves_nothing(error: type[BaseException], at: int) -> None:
    head, _ = head_of(llama())
    with pytest.raises(error):
        head.gradient([some_tokens(3)], num_sequences=3, multiplier=stopping(error, at))
    gradient, _ = head.gradient([some_tokens(3)], num_sequences=3, multiplier=TiledMultiplier())
    expected, _ = plain_gradient(llama(), some_tokens(3))
    assert float((gradient - expected).norm()) <= 1e-4 * float(expected.norm())


def test_dropout_is_a_function_of_seed_and_step() -> None:
    config = gpt2(resid_pdrop=0.5)
    before = torch.get_rng_state()
    gradients = [
        head_of(config, seed=seed)[0].gradient(
            [some_tokens(2)], num_sequences=2, multiplier=TiledMultiplier(), step=step
        )[0]
        for seed, step in ((1, 1), (1, 1), (1, 2), (2, 1))
    ]
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2]) and not torch.equal(gradients[0], gradients[3])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_trained_is_refused() -> None:
    head, theta = head_of(llama())
    with pytest.raises(DataError, match="ended 2 sequences short of the 4"):
        head.gradient([some_tokens(2)], num_sequences=4, multiplier=TiledMultiplier())
    with pytest.raises(DataError, match=r"a batch is \[2, 9\] and must be \[any, 13\]"):
        head.gradient([some_tokens(2)[:, :9]], num_sequences=2, multiplier=TiledMultiplier())
    head.load(theta.index_fill(0, torch.tensor([len(theta) - 1]), torch.nan))  # of the head
    with pytest.raises(NotFinite, match="the loss is nan"):
        head.gradient([some_tokens(2)], num_sequences=2, multiplier=lambda p: p.a.values @ p.b.values)
    with pytest.raises(ModelError, match="the run has"):
        HeadModel(llama(hidden_size=64), head.layout, HeadConfig(batch_size=2, seq_len=SEQ_LEN))
