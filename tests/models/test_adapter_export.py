"""A PEFT directory opens in PEFT with the logits of the replica, and so does the merged model in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import save_tokenizer
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker.test_adapters import adapted, adapters

from potluck.models.adapter_export import Adapters, save_adapter_dir, save_merged_dir
from potluck.models.adapters import pairs
from potluck.models.build import build
from potluck.models.config import BasePrecision
from potluck.models.generate import generate
from potluck.types.errors import ModelError
from potluck.worker.replica import TorchReplica

tokens = torch.arange(40).reshape(2, 20) % 60
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # which PEFT itself asks


def trained(family: str, base: BasePrecision, folder: Path) -> tuple[TorchReplica, Tensor, list[Path]]:
    spec, paths = adapted(family, base, folder)
    replica = TorchReplica(spec, base=paths)
    vector = 0.1 * torch.randn(replica.layout.numel, generator=torch.Generator().manual_seed(2))
    replica.load(vector)
    return replica, vector, paths


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-tied"])
@pytest.mark.parametrize("base", ["fp32", "int8"])
def test_the_directory_opens_in_peft_with_the_same_logits(family: str, base: BasePrecision, tmp_path: Path) -> None:
    replica, vector, paths = trained(family, base, tmp_path)
    config, adapter = dict(replica.module.config.to_dict()), adapters[family.partition("-")[0]]
    config = adapted(family, base, tmp_path)[0].model_config_json
    with torch.no_grad():
        expected = replica.module.eval()(input_ids=tokens).logits
    tokenizer = save_tokenizer(tmp_path / "tok")
    save_merged_dir(tmp_path / "base", config, paths, base, None, tokenizer, "of the run")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if base == "fp32":
        made = build(config, seed=3)
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), made.parameters(), strict=True))
    save_adapter_dir(
        tmp_path / "model", config, adapter, vector, replica.layout, tokenizer, {"name": "r"}, base_name="elsewhere"
    )
    peft_model = PeftModel.from_pretrained(plain, str(tmp_path / "model"))
    with torch.no_grad():
        assert torch.allclose(peft_model(input_ids=tokens).logits, expected, atol=1e-5)
    settings = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (settings["r"], settings["use_rslora"]) == (adapter.rank, adapter.rslora)
    assert settings["base_model_name_or_path"] == "elsewhere" and settings["inference_mode"]
    assert settings["target_modules"] == sorted(adapter.target_modules)
    merged = tmp_path / "merged"
    save_merged_dir(merged, config, paths, base, Adapters.load(tmp_path / "model"), tokenizer, "merged")
    whole = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        assert torch.allclose(whole(input_ids=tokens).logits, expected, atol=1e-5)
    by_peft = peft_model.merge_and_unload().state_dict()
    for name, tensor in load_file(merged / "model.safetensors").items():
        assert torch.allclose(tensor, by_peft[name], atol=1e-6)
    assert generate(merged, "AB", max_new_tokens=5, temperature=0.0, device="cpu") == generate(
        tmp_path / "model", "AB", max_new_tokens=5, temperature=0.0, device="cpu"
    )


@pytest.mark.parametrize(("family", "lower_ranks", "merges"), [("llama", (1, 2), False), ("gpt2", (3,), True)])
def test_blocks_and_what_was_merged_are_plain_adapters_there(
    family: str, lower_ranks: tuple[int, ...], merges: bool, tmp_path: Path
) -> None:
    adapter = adapters[family].model_copy(update={"lower_ranks": lower_ranks})
    spec, paths = adapted(family, "fp32", tmp_path, adapter=adapter, merges=merges)
    replica = TorchReplica(spec, base=paths)
    vector = 0.1 * torch.randn(replica.layout.numel, generator=torch.Generator().manual_seed(2))
    replica.load(vector)
    with torch.no_grad():
        expected = replica.module.eval()(input_ids=tokens).logits
    config = spec.model_config_json
    tokenizer = save_tokenizer(tmp_path / "tok")
    save_merged_dir(tmp_path / "base", config, paths, "fp32", None, tokenizer, "of the run")
    save_adapter_dir(
        tmp_path / "model", config, adapter, vector, replica.layout, tokenizer, {"name": "r"}, base_name="elsewhere"
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert (plain(input_ids=tokens).logits - expected).abs().max() > 1e-2
        peft_model = PeftModel.from_pretrained(plain, str(tmp_path / "model"))
        assert torch.allclose(peft_model(input_ids=tokens).logits, expected, atol=1e-2 if merges else 1e-5)
    settings = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert settings["r"] > adapter.rank if merges else settings["r"] == adapter.rank
    assert ("left out of the change" in (tmp_path / "model" / "README.md").read_text()) == merges


def test_adapters_of_another_model_are_not_merged(tmp_path: Path) -> None:
    replica, vector, paths = trained("llama", "fp32", tmp_path)
    config: dict[str, Any] = adapted("llama", "fp32", tmp_path)[0].model_config_json
    with pytest.raises(ModelError, match="cannot be read"):
        Adapters.load(tmp_path / "nowhere")
    other = Adapters({"model.layers.9.mlp": next(iter(pairs(replica.layout, vector).values()))}, 1.0)
    with pytest.raises(ModelError, match=r"a layer model\.layers\.9\.mlp and the model has none"):
        save_merged_dir(tmp_path / "x", config, paths, "fp32", other, None, "")
    assert not (tmp_path / "x").exists()
