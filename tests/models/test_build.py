import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from potluck.models.build import build, initial_vector, layout_of, skeleton
from potluck.models.config import ModelConfig
from potluck.models.flat import FlatModel
from potluck.types.errors import ModelError
from potluck.types.params import Layout


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_gives_the_weights_that_transformers_gives(name: str) -> None:
    config = FAMILIES[name]
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    got = initial_vector(ModelConfig(config=config), config, seed=5)
    assert torch.equal(got, expected)
    assert torch.equal(got, initial_vector(ModelConfig(config=config), config, seed=5))
    assert not torch.equal(got, initial_vector(ModelConfig(config=config), config, seed=6))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_skeleton_with_loaded_weights_is_the_model(name: str) -> None:
    config = FAMILIES[name]
    model = build(config, seed=1)
    bare = skeleton(config)
    assert all(p.is_meta for n, p in bare.named_parameters() if p.dim() > 1)
    flat = FlatModel(bare)
    flat.load(initial_vector(ModelConfig(config=config), config, seed=1))
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(flat.module(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_building_leaves_the_callers_chance_alone_and_knows_no_other_thread() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build(gpt2(), seed=9)
    assert torch.equal(torch.rand(1), expected)
    made: list[torch.Tensor] = []

    def elsewhere() -> None:
        made.append(torch.empty(3))

    original = nn.Embedding.__init__

    def slow(self: nn.Embedding, *args: Any, **kwargs: Any) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Embedding, "__init__", slow)
        skeleton(gpt2())
    assert made and not any(tensor.is_meta for tensor in made)


def test_without_a_seed_parameters_are_zero() -> None:
    model = build(llama())
    assert all(not p.is_meta and not p.any() for p in model.parameters())
    assert model.training


def test_tied_weights_are_in_the_layout_once() -> None:
    untied, tied = layout_of(build(llama())), layout_of(build(llama(tie_word_embeddings=True)))
    assert untied.numel - tied.numel == 64 * 32
    flat = FlatModel(build(llama(tie_word_embeddings=True), seed=1))
    assert flat.module.get_output_embeddings().weight is flat.module.get_input_embeddings().weight


def test_a_flat_model_loads_and_reads_by_value() -> None:
    flat = FlatModel(build(gpt2(), seed=1))
    before = flat.params()
    theta = torch.arange(flat.layout.numel, dtype=torch.float32)
    flat.load(theta)
    theta.zero_()
    assert torch.equal(flat.params(), torch.arange(flat.layout.numel, dtype=torch.float32))
    spec = flat.layout.tensors[3]
    assert flat.parameters[3].flatten()[0] == spec.offset
    assert flat.parameters[3].data_ptr() == flat.vector[spec.offset :].data_ptr()
    assert not torch.equal(before, flat.params())
    with pytest.raises(ModelError, match="the coordinator runs another model"):
        flat.load(theta[:-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_flat_gradient_is_that_of_the_parameters(name: str) -> None:
    plain, flat = build(FAMILIES[name], seed=2), FlatModel(build(FAMILIES[name], seed=2))
    tokens = torch.arange(24).reshape(2, 12)
    for model in (plain, flat.module):
        model(input_ids=tokens).logits.square().mean().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
    assert torch.equal(flat.gradient(), expected)
    assert expected.abs().max() > 0
    flat.clear_gradients()
    assert not flat.gradient().any()


def test_a_layout_of_another_order_is_followed_and_of_another_model_refused() -> None:
    own = layout_of(build(gpt2()))
    turned = Layout.of([(t.name, t.shape) for t in reversed(own.tensors)])
    one, two = FlatModel(build(gpt2(), seed=1)), FlatModel(build(gpt2(), seed=1), layout=turned)
    first = own.tensors[0]
    assert torch.equal(two.params()[-first.numel :], one.params()[: first.numel])
    with pytest.raises(ModelError, match="install the version"):
        FlatModel(build(gpt2(n_embd=16)), layout=own)
    with pytest.raises(ModelError, match="install the version"):
        FlatModel(build(gpt2(n_layer=1)), layout=own)


def test_what_transformers_refuses_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="divisible by num_heads"):
        build(gpt2(n_embd=30, n_head=4))


@pytest.mark.parametrize("name", FAMILIES)
def test_stored_weights_are_read(tmp_path: Path, name: str) -> None:
    config = FAMILIES[name]
    model = build(config, seed=4)
    model.save_pretrained(tmp_path)
    for source in (ModelConfig(path=str(tmp_path)), ModelConfig(hub=str(tmp_path))):
        assert torch.equal(initial_vector(source, config, seed=0), FlatModel(build(config, seed=4)).params())
    scratch = initial_vector(ModelConfig(path=str(tmp_path), init="scratch"), config, seed=0)
    assert torch.equal(scratch, initial_vector(ModelConfig(config=config), config, seed=0))


def test_stored_weights_that_lack_a_tensor_or_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = build(gpt2(n_layer=1), seed=4)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="lacks 12 of the model's tensors"):
        initial_vector(ModelConfig(path=str(tmp_path)), gpt2(), seed=0)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="hold NaN"):
        initial_vector(ModelConfig(path=str(tmp_path)), gpt2(n_layer=1), seed=0)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    torch.save(build(gpt2(), seed=1).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds no safetensors"):
        initial_vector(ModelConfig(path=str(tmp_path)), gpt2(), seed=0)
