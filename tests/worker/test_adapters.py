"""A replica whose trainable part is adapters: against plain PEFT, step by step, and against finite differences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, llama
from models.test_device import Machine
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.functional import cross_entropy
from worker.test_replica import seq_len, some_batches

from potluck.models.adapters import adapted_skeleton, initial_adapters, linear_layers, pairs, peft_name
from potluck.models.base import write_base
from potluck.models.build import build, layout_of, skeleton
from potluck.models.config import AdapterConfig, BasePrecision, ModelConfig
from potluck.models.flat import FlatModel
from potluck.models.held import is_linear
from potluck.optim.inner import InnerConfig, learning_rate
from potluck.storage.objects import ObjectStore
from potluck.strategies.run import RunSpec
from potluck.types.errors import ModelError, Refused, ResourceError
from potluck.types.ids import Digest
from potluck.worker.need import replica_memory
from potluck.worker.replica import TorchReplica

adapters = {
    "gpt2": AdapterConfig(rank=4, alpha=8, target_modules=("c_attn", "mlp.c_proj")),
    "llama": AdapterConfig(rank=4, alpha=6, rslora=True, target_modules=("q_proj", "v_proj", "gate_proj")),
}


def adapted(family: str, base: BasePrecision, folder: Path, **changes: Any) -> tuple[RunSpec, list[Path]]:
    config = changes.pop("config", None) or FAMILIES[family]
    adapter = changes.pop("adapter", adapters[family.partition("-")[0]])
    merges = changes.pop("merges", False)
    objects = ObjectStore(folder / "objects")
    files = write_base(ModelConfig(config=config, adapter=adapter, base=base), config, objects, seed=3)
    spec = RunSpec.model_validate(
        {
            "run_id": "r", "name": "r", "seed": 3, "strategy": "fed_avg", "model_config_json": config,
            "layout": layout_of(adapted_skeleton(config, adapter, merges=merges)).to_json(), "seq_len": seq_len,
            "inner": InnerConfig(**{"lr": 1e-2, "batch_size": 4, "warmup": 0.1, **changes}), "data_access": "shared",
            "adapter": adapter, "base": files, "merges_adapters": merges,
        }
    )  # fmt: skip
    return spec, [objects.path(Digest(each.digest)) for each in files.objects]


def plain_peft(spec: RunSpec) -> nn.Module:
    """What anybody would build: transformers' model, PEFT's layers, the run's first A."""
    assert spec.adapter is not None
    model = build(spec.model_config_json, seed=3)
    settings = LoraConfig(
        r=spec.adapter.rank, lora_alpha=spec.adapter.alpha, use_rslora=spec.adapter.rslora,  # pyright: ignore[reportArgumentType]
        target_modules=list(spec.adapter.target_modules), fan_in_fan_out=spec.model_config_json["model_type"] == "gpt2",
    )  # fmt: skip
    inject_adapter_in_model(settings, model)
    flat = FlatModel(model)
    flat.load(initial_adapters(flat.layout, seed=spec.seed))
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-tied"])
def test_each_step_has_the_loss_of_plain_peft(family: str, tmp_path: Path) -> None:
    spec, base = adapted(family, "fp32", tmp_path, weight_decay=0.1)
    replica = TorchReplica(spec, base=base)
    replica.load(initial_adapters(replica.layout, seed=spec.seed))
    batches = some_batches(12)
    replica.feed(batches)
    got = [replica.train_step(progress=i / 12).loss for i in range(12)]
    model = plain_peft(spec)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=spec.inner.betas, eps=spec.inner.eps, weight_decay=0.1)
    expected: list[float] = []
    for i, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = learning_rate(spec.inner, i / 12)
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, spec.inner.clip)
        optimizer.step()
        expected.append(loss.item())
    assert got == pytest.approx(expected, abs=1e-5)
    whole = torch.cat([p.detach().reshape(-1) for p in trained])
    assert torch.allclose(replica.params().read(0, replica.layout.numel), whole, atol=1e-5)
    assert (whole - initial_adapters(replica.layout, seed=3)).abs().max() > 0.02


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_gradients_are_those_of_finite_differences(
    family: str, base: BasePrecision, checkpoint: bool, tmp_path: Path
) -> None:
    spec, paths = adapted(family, base, tmp_path, checkpoint_activations=checkpoint)
    replica = TorchReplica(spec, base=paths)
    generator = torch.Generator().manual_seed(5)
    at = 0.1 * torch.randn(replica.layout.numel, generator=generator)
    direction = torch.randn(replica.layout.numel, generator=generator)
    replica.load(at)
    batch = some_batches(1)[0]
    replica.feed([batch])
    gradient, loss = replica.gradient(num_sequences=4)
    sums: list[float] = []
    for sign in (1, -1):
        replica.load(at + sign * 2e-3 * direction)
        sums.append(replica.evaluate(batch).loss_sum)
    assert (sums[0] - sums[1]) / 4e-3 == pytest.approx(float(gradient @ direction), rel=0.01, abs=0.02)
    assert gradient.abs().max() > 0.01
    replica.load(torch.zeros_like(at))
    plain = TorchReplica(adapted(family, "fp32", tmp_path)[0], base=adapted(family, "fp32", tmp_path)[1])
    plain.load(torch.zeros_like(at))
    assert replica.evaluate(batch).loss_sum == pytest.approx(plain.evaluate(batch).loss_sum, rel=1e-3)
    assert loss.num_tokens == 4 * seq_len


def test_bf16_mixed_multiplies_what_is_held_as_it_is(tmp_path: Path) -> None:
    spec, base = adapted("llama", "bf16", tmp_path)
    mixed = spec.model_copy(update={"precision": "bf16-mixed"})
    losses = []
    for each in (spec, mixed):
        replica = TorchReplica(each, base=base, hardware=Machine(free=1 << 30))
        replica.load(initial_adapters(replica.layout, seed=3))
        replica.feed(some_batches(3))
        losses.append([replica.train_step(progress=0.0).loss for _ in range(3)])
    assert replica.precision.name == "bf16-mixed"
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and losses[0] != losses[1]


def test_adapters_begin_as_peft_begins_them() -> None:
    layout = layout_of(adapted_skeleton(gpt2(n_embd=64), AdapterConfig(rank=16, target_modules=("c_attn",))))
    first = initial_adapters(layout, seed=4)
    assert torch.equal(first, initial_adapters(layout, seed=4))
    assert not torch.equal(first, initial_adapters(layout, seed=5))
    for a, b in pairs(layout, first).values():
        assert not b.any() and b.shape == (192, 16) and a.shape == (16, 64)
        assert 0.95 / 8 < a.abs().max() < 1 / 8  # uniform up to 1 / sqrt(inputs)
    assert list(pairs(layout, first)) == ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"]
    assert [peft_name(spec.name) for spec in layout][1] == "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"


@pytest.mark.parametrize(
    ("config", "targets", "words"),
    [
        (llama(), ["q_proj", "c_attn"], "'c_attn' and it matches none of them.* q_proj, k_proj, v_proj, o_proj, gate"),
        (llama(), ["embed_tokens"], "matches model.embed_tokens, which is a Embedding; .* q_proj"),
        (llama(), ["self_attn"], "which is a LlamaAttention"),
        (llama(), ["lm_head"], "matches lm_head, which is a Linear"),
        (gpt2(), ["q_proj"], "the model's linear layers are c_attn, c_proj, c_fc"),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(config: dict[str, Any], targets: list[str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        adapted_skeleton(config, AdapterConfig(target_modules=tuple(targets)))


def test_the_head_gets_no_adapter() -> None:
    module: Any = skeleton(llama())
    assert is_linear(module.lm_head) and "lm_head" not in linear_layers(module)
    assert len(linear_layers(module)) == 2 * 7


def test_what_does_not_fit_is_said_of_the_base_as_it_is_held(tmp_path: Path) -> None:
    spec, base = adapted("llama", "int8", tmp_path, config=llama(hidden_size=256, intermediate_size=512))
    layout = layout_of(adapted_skeleton(spec.model_config_json, adapters["llama"]))
    need = replica_memory(spec, layout.numel, precision="fp32")
    assert TorchReplica(spec, base=base, max_memory_bytes=need.device_bytes + 1).layout
    with pytest.raises(
        ResourceError, match=r"adapters of 1\d,\d+ parameters on this model, 1,\d+,\d+ bytes in int8 needs"
    ):
        TorchReplica(spec, base=base, max_memory_bytes=need.device_bytes - 1)


def test_a_run_whose_base_is_missing_or_whose_ranks_differ_is_refused(tmp_path: Path) -> None:
    spec, base = adapted("llama", "int8", tmp_path)
    with pytest.raises(ModelError, match="its base did not come with it"):
        TorchReplica(spec)
    with pytest.raises(ModelError, match="its base did not come with it"):
        TorchReplica(spec.model_copy(update={"base": None}), base=base)
    assert spec.adapter is not None
    other = spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"rank": 8})})
    with pytest.raises(ModelError, match=r"the run has \[4, 32\] as tensor .*lora_A.* builds \[8, 32\]"):
        TorchReplica(other, base=base)


def test_a_rank_that_the_run_has_not_is_refused(tmp_path: Path) -> None:
    lower = adapters["llama"].model_copy(update={"lower_ranks": (2,)})
    spec, base = adapted("llama", "fp32", tmp_path, adapter=lower)
    replica = TorchReplica(spec, base=base)
    for rank in (2, 4, 0):
        replica.use_rank(rank)
    for rank in (3, 8, -2):
        with pytest.raises(Refused, match=f"of rank {rank} and the run has them of rank 2, 4"):
            replica.use_rank(rank)
