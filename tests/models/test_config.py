import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import gpt2, llama, save_tokenizer
from pydantic import ValidationError

from potluck.models.build import build
from potluck.models.config import ModelConfig
from potluck.models.family import cleaned, has_dropout, model_config, tokenizer_folder
from potluck.types.errors import ModelError


def recipe(**config: Any) -> ModelConfig:
    return ModelConfig(config={"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, **config})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "exactly one of"),
        ({"path": "a", "hub": "b"}, "2 are given"),
        ({"config": {"model_type": "gpt2"}, "init": "weights"}, "needs stored weights"),
        ({"config": {"n_layer": 1}}, "model_type"),
        ({"path": "a", "revision": "main"}, "belongs to `hub`"),
        ({"path": "a", "precision": "fp16"}, "bf16-mixed"),
        ({"path": "a", "pth": "b"}, "Extra inputs"),
    ],
)
def test_a_section_that_says_no_model_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig.model_validate(given)


def test_weights_are_the_default_where_there_are_any() -> None:
    assert ModelConfig(path="a").from_weights
    assert ModelConfig(hub="a/b").from_weights
    assert not ModelConfig(path="a", init="scratch").from_weights
    assert not recipe().from_weights


def test_the_tokenizer_fills_in_vocabulary_and_ids_and_gpt2_does_not_drop_out(tmp_path: Path) -> None:
    config = model_config(recipe(n_positions=32), save_tokenizer(tmp_path, 50), seq_len=32)
    assert config["vocab_size"] == 50
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    assert (config["resid_pdrop"], config["embd_pdrop"], config["attn_pdrop"]) == (0.0, 0.0, 0.0)
    assert not has_dropout(config)
    json.dumps(config)


def test_what_the_recipe_sets_stays(tmp_path: Path) -> None:
    given = recipe(n_positions=32, vocab_size=128, resid_pdrop=0.2, eos_token_id=3)
    config = model_config(given, save_tokenizer(tmp_path, 50), seq_len=32)
    assert (config["vocab_size"], config["resid_pdrop"], config["eos_token_id"]) == (128, 0.2, 3)
    assert has_dropout(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"n_layers": 3}, "model.config.n_layers is not a key of a gpt2 configuration; did you mean n_layer"),
        ({"n_layer": "x"}, r"model\.config\.n_layer is 'x' and must be a whole number"),
        ({"layer_norm_epsilon": "x"}, "must be a number"),
        ({"model_type": "gpt22"}, "did you mean 'gpt2'"),
        ({"n_positions": 16}, "16 positions and data.seq_len is 32; lower data.seq_len or raise n_positions"),
        ({"vocab_size": 20}, "vocabulary of 20 and the tokenizer has 50 tokens"),
        ({"n_layer": 100_000}, "n_layer = 100000 and 4096 is the most"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        model_config(recipe(**config), save_tokenizer(tmp_path, 50), seq_len=32)


def test_without_a_tokenizer_the_vocabulary_must_be_given() -> None:
    with pytest.raises(ModelError, match="vocab_size"):
        model_config(recipe(), None, seq_len=32)
    config = model_config(recipe(vocab_size=99), None, seq_len=32)
    assert config["vocab_size"] == 99
    assert config["eos_token_id"] is None  # GPT-2's own end token, 50256, is not in this vocabulary


def test_keys_that_pick_code_or_kernels_do_not_travel() -> None:
    config = cleaned(
        gpt2(attn_implementation="org/kernel", _attn_implementation="flash_attention_2", dtype="bfloat16",
             torch_dtype="float16", quantization_config={"bits": 4}, auto_map={"AutoConfig": "org/code--x.Y"})
    )  # fmt: skip
    assert config == gpt2()


def test_a_model_that_brings_its_own_code_is_refused() -> None:
    with pytest.raises(ModelError, match="brings code of its own"):
        cleaned({"model_type": "strange", "auto_map": {"AutoConfig": "x.Y"}})


def test_rotary_settings_travel_under_both_names() -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    config = cleaned(llama(rope_parameters=scaled))
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == scaled
    assert cleaned(config) == config
    old, new = llama(rope_theta=5000.0), llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    expected = 5000.0 ** (-torch.arange(0, 8, 2) / 8)
    for config in (old, new):
        torch.testing.assert_close(build(config).model.rotary_emb.inv_freq, expected)


def test_a_directory_gives_its_configuration_and_its_tokenizer(tmp_path: Path) -> None:
    stored = {**llama(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "an_old_key": 1}
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    for model in (ModelConfig(path=str(tmp_path)), ModelConfig(hub=str(tmp_path))):
        assert tokenizer_folder(model) == tmp_path
        config = model_config(model, tokenizer_folder(model), seq_len=16)
        assert config["hidden_size"] == 32
        assert "torch_dtype" not in config and "architectures" not in config
    assert tokenizer_folder(recipe()) is None


def test_a_hub_model_that_cannot_be_had_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="nobody/nothing"):
        model_config(ModelConfig(hub="nobody/nothing"), None, seq_len=16)


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        model_config(ModelConfig(path=str(tmp_path)), None, seq_len=16)
    (tmp_path / "config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(ModelError, match="is not JSON"):
        model_config(ModelConfig(path=str(tmp_path)), None, seq_len=16)
