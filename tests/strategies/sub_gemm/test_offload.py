"""A model whose products are computed in tiles, against the plain one: loss, gradients, what is asked of whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, llama
from strategies.sub_gemm.local import TiledMultiplier
from torch import Tensor, nn

from potluck.models.build import build, checkpoint_activations, skeleton
from potluck.models.loss import TokenLoss
from potluck.strategies.sub_gemm.attention import redirect_attention
from potluck.strategies.sub_gemm.offload import Offload
from potluck.types.errors import ModelError

VOCAB_SIZE = 64


def some_tokens(num_sequences: int = 3) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (num_sequences, 13), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-4) -> None:
    """By tensor. GPT-2's key bias has a true gradient of zero: it is compared with what its neighbours have."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        have = got[name]
        if name.endswith("c_attn.bias"):
            third = len(want) // 3
            keys = slice(third, 2 * third)
            assert float((have - want)[keys].norm()) <= limit * float(want.norm()), name
            have, want = (torch.cat([x[:third], x[2 * third :]]) for x in (have, want))
        assert float((have - want).norm()) <= limit * float(want.norm()), name


def both(config: dict[str, Any], **frozen: bool) -> tuple[nn.Module, nn.Module]:
    return build(config, seed=1), build(config, seed=1)


def train(offload: Offload, loss: TokenLoss, multiplier: TiledMultiplier, *batches: Tensor) -> float:
    total = 0.0
    for index, batch in enumerate(batches):
        with offload.multiplying(multiplier, micro_batch=index):
            one = loss(batch, divisor=1)
            one.backward()
        total += float(one.detach())
    return total


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_plain_model(name: str, checkpointing: bool, attention: bool) -> None:
    plain, model = both(FAMILIES[name])
    if checkpointing:
        checkpoint_activations(model)
    offload, multiplier = Offload(model), TiledMultiplier(checks=True)
    if attention:
        redirect_attention(offload, model)
    batches = some_tokens().split(2)
    loss = train(offload, TokenLoss(model, vocab_size=VOCAB_SIZE), multiplier, *batches)
    expected = TokenLoss(plain, vocab_size=VOCAB_SIZE)(some_tokens(), divisor=1)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_same_gradients(gradients(model), gradients(plain))
    assert any(product.kind == "attention" for product in multiplier.products) == attention


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk_rows", [5, 1000])
def test_a_loss_in_chunks_sends_the_heads_products_too(name: str, chunk_rows: int) -> None:
    plain, model = both(FAMILIES[name])
    offload, multiplier = Offload(model), TiledMultiplier()
    chunked = TokenLoss(
        model, vocab_size=VOCAB_SIZE, max_whole_bytes=0, chunk_bytes=4 * VOCAB_SIZE * chunk_rows,
        head=offload.head(model.get_output_embeddings()),
    )  # fmt: skip
    assert chunked.is_split(some_tokens()[:1, :2])
    loss = train(offload, chunked, multiplier, some_tokens())
    expected = TokenLoss(plain, vocab_size=VOCAB_SIZE)(some_tokens(), divisor=1)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_same_gradients(gradients(model), gradients(plain))
    num_chunks = -(-36 // chunk_rows)
    assert multiplier.kinds("lm_head") == ["forward", "input_gradient", "weight_gradient"] * num_chunks
    assert chunked.evaluate(some_tokens()).item() == pytest.approx(loss, rel=1e-5)
    assert len(multiplier.kinds("lm_head")) == 3 * num_chunks  # evaluation is native


def test_every_layer_sends_three_products_under_names_that_hold() -> None:
    model = build(llama(), seed=1)
    offload, multiplier = Offload(model), TiledMultiplier()
    train(offload, TokenLoss(model, vocab_size=VOCAB_SIZE), multiplier, *some_tokens(2).split(1))
    layers = [name for name, child in model.named_modules() if isinstance(child, nn.Linear)]
    assert list(offload.layers) == layers
    assert all(sorted(multiplier.kinds(name)) == sorted(["forward", "input_gradient", "weight_gradient"] * 2)
               for name in layers)  # fmt: skip
    by_kind = {(p.layer, p.kind): p for p in multiplier.products}  # of the second micro-batch
    layer = "model.layers.0.mlp.up_proj"
    forward, grad_x, grad_w = (by_kind[layer, kind] for kind in ("forward", "input_gradient", "weight_gradient"))
    assert (forward.shape, grad_x.shape, grad_w.shape) == ((12, 32, 48), (12, 48, 32), (48, 12, 32))
    assert forward.a.name == "1/model.layers.0.mlp.gate_proj#1.input"  # which reads the same tensor first
    assert grad_w.b.name == forward.a.name
    assert (forward.b.name, grad_x.b.name) == (f"{layer}.weight.T", f"{layer}.weight")
    assert (grad_x.a.name, grad_w.a.name) == (f"1/{layer}#1.output_gradient", f"1/{layer}#1.output_gradient.T")
    assert forward.b.is_weight and grad_x.b.is_weight and not grad_w.a.is_weight and not grad_w.b.is_weight
    weight = dict(model.named_parameters())[f"{layer}.weight"]
    for matrix in (forward.b, grad_x.b):
        assert matrix.values.data_ptr() == weight.data_ptr()  # a view, also where it is transposed


def test_conv1d_keeps_its_own_layout() -> None:
    model = build(gpt2(), seed=1)
    offload, multiplier = Offload(model), TiledMultiplier()
    train(offload, TokenLoss(model, vocab_size=VOCAB_SIZE), multiplier, some_tokens(1))
    by_kind = {(p.layer, p.kind): p for p in multiplier.products}
    layer = "transformer.h.1.mlp.c_fc"
    forward, grad_x, grad_w = (by_kind[layer, kind] for kind in ("forward", "input_gradient", "weight_gradient"))
    assert (forward.shape, grad_x.shape, grad_w.shape) == ((12, 32, 128), (12, 128, 32), (32, 12, 128))
    assert (forward.b.name, grad_x.b.name) == (f"{layer}.weight", f"{layer}.weight.T")
    assert grad_w.a.name == f"{forward.a.name}.T" and grad_w.b.name == grad_x.a.name


def test_gradients_that_nobody_needs_are_not_computed() -> None:
    plain, model = both(llama())
    frozen = ("model.embed_tokens", "model.layers.0", "model.layers.1.mlp")
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    offload, multiplier = Offload(model), TiledMultiplier()
    loss = train(offload, TokenLoss(model, vocab_size=VOCAB_SIZE), multiplier, some_tokens())
    expected = TokenLoss(plain, vocab_size=VOCAB_SIZE)(some_tokens(), divisor=1)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_same_gradients(gradients(model), gradients(plain))
    assert multiplier.kinds("model.layers.0.mlp.up_proj") == ["forward"]
    assert multiplier.kinds("model.layers.1.mlp.up_proj") == ["forward", "input_gradient"]
    assert multiplier.kinds("model.layers.1.self_attn.q_proj") == ["forward", "input_gradient", "weight_gradient"]


def test_checkpointing_repeats_no_product_whose_result_nobody_reads() -> None:
    model = build(llama(), seed=1)
    checkpoint_activations(model)
    offload, multiplier = Offload(model), TiledMultiplier()
    train(offload, TokenLoss(model, vocab_size=VOCAB_SIZE), multiplier, some_tokens())
    assert multiplier.kinds("model.layers.0.mlp.up_proj").count("forward") == 2
    assert multiplier.kinds("model.layers.0.mlp.down_proj").count("forward") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_mixed_sends_bf16_and_is_as_close_as_autocast(name: str) -> None:
    plain, model = both(FAMILIES[name])
    exact = build(FAMILIES[name], seed=1)
    offload, multiplier = Offload(model), TiledMultiplier(wire="bf16", checks=True)
    loss = train(offload, TokenLoss(model, vocab_size=VOCAB_SIZE, autocast=torch.bfloat16), multiplier, some_tokens())
    native = TokenLoss(plain, vocab_size=VOCAB_SIZE, autocast=torch.bfloat16)(some_tokens(), divisor=1)
    native.backward()
    expected = TokenLoss(exact, vocab_size=VOCAB_SIZE)(some_tokens(), divisor=1)
    expected.backward()
    assert all(p.a.values.dtype == p.b.values.dtype == torch.bfloat16 for p in multiplier.products)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-3)
    flat = [torch.cat([g.reshape(-1) for g in gradients(m).values()]) for m in (model, plain, exact)]
    mine, theirs = (float((g - flat[2]).norm() / flat[2].norm()) for g in flat[:2])
    assert mine < 1.3 * theirs < 0.05


def test_int8_on_the_wire_has_about_the_plain_gradient() -> None:
    plain, model = both(llama())
    train(
        Offload(model),
        TokenLoss(model, vocab_size=VOCAB_SIZE),
        TiledMultiplier(wire="int8", checks=True),
        some_tokens(),
    )
    TokenLoss(plain, vocab_size=VOCAB_SIZE)(some_tokens(), divisor=1).backward()
    got, expected = (torch.cat([g.reshape(-1) for g in gradients(m).values()]) for m in (model, plain))
    assert 0.999 < float(torch.cosine_similarity(got, expected, dim=0)) < 1


def test_fp16_autocast_is_refused() -> None:
    model = build(llama(), seed=1)
    offload = Offload(model)
    with (
        offload.multiplying(TiledMultiplier(), micro_batch=0),
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ModelError, match="float16 are not offloaded; use bf16-mixed or fp32"),
    ):
        model(input_ids=some_tokens())


def test_without_a_multiplier_the_model_is_the_plain_one_bit_for_bit() -> None:
    for config in FAMILIES.values():
        plain, model = both(config)
        redirect_attention(Offload(model), model)
        assert torch.equal(model(input_ids=some_tokens()).logits, plain(input_ids=some_tokens()).logits)


def test_what_a_multiplier_raises_comes_out_as_it_is() -> None:
    model = build(llama(), seed=1)
    offload, multiplier = Offload(model), TiledMultiplier()

    def failing(product: Any) -> Tensor:
        if product.kind == "weight_gradient":
            raise ConnectionError("no device is left")
        return multiplier(product)

    with offload.multiplying(failing, micro_batch=0):
        loss = TokenLoss(model, vocab_size=VOCAB_SIZE)(some_tokens(), divisor=1)
        with pytest.raises(ConnectionError, match="no device is left"):
            loss.backward()
    assert not offload.is_multiplying


def test_a_model_on_meta_asks_for_its_products_without_memory() -> None:
    model = skeleton(llama(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32))
    model.to("meta")
    shapes: list[tuple[int, int, int]] = []

    def empty(product: Any) -> Tensor:
        shapes.append(product.shape)
        return torch.empty(product.shape[0], product.shape[2], device="meta")

    offload = Offload(model)
    with offload.multiplying(empty, micro_batch=0):
        hidden = model(input_ids=torch.zeros(8, 16, dtype=torch.int64, device="meta")).logits
        hidden.sum().backward()
    assert (128, 4096, 11008) in shapes and (128, 11008, 4096) in shapes and (11008, 128, 4096) in shapes
    assert len(shapes) == 3 * len(offload.layers)


def test_models_that_cannot_be_offloaded_are_refused() -> None:
    with pytest.raises(ModelError, match="no linear layer"):
        Offload(nn.LayerNorm(3))
    with pytest.raises(ModelError, match="only fp32 ones are offloaded"):
        Offload(nn.Sequential(nn.Linear(2, 2).bfloat16()))
    module = nn.Sequential(nn.Linear(2, 2))
    offload = Offload(module)
    with pytest.raises(ModelError, match="does not let its attention be replaced"):
        redirect_attention(offload, module)
