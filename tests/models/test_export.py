import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, save_tokenizer
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from potluck.models.build import build, initial_vector
from potluck.models.config import ModelConfig
from potluck.models.export import model_card, save_model_dir
from potluck.models.flat import FlatModel
from potluck.models.loss import TokenLoss
from potluck.types.errors import ModelError, ResourceError

card = {
    "name": "demo",
    "tokens": 2_000_000,
    "final_val_loss": 3.25,
    "data": {"digest": "a|b"},
    "workers": [{"id": "w|1", "tokens": 500_000}, {"id": "idle", "tokens": 0}, {"id": "w2", "tokens": 1_500_000}],
}


def save(path: Path, config: dict[str, Any], *, seed: int = 1, tokenizer: Path | None = None) -> FlatModel:
    flat = FlatModel(build(config, seed=seed))
    save_model_dir(path, config, flat.params(), flat.layout, tokenizer, card)
    return flat


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_opens_in_transformers_with_the_same_loss(tmp_path: Path, name: str) -> None:
    config = FAMILIES[name]
    flat = save(tmp_path / "model", config, tokenizer=save_tokenizer(tmp_path / "tokenizer"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(opened) is type(flat.module)
    assert next(opened.parameters()).dtype == torch.float32
    tokens = torch.arange(40).reshape(2, 20)
    logits = opened(input_ids=tokens[:, :-1]).logits
    plain = cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1), reduction="sum")
    assert plain.item() == pytest.approx(TokenLoss(flat.module, vocab_size=64).evaluate(tokens).item(), rel=1e-6)
    assert torch.equal(FlatModel(opened, layout=flat.layout).params(), flat.params())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token == "<end>"
    assert tokenizer.decode(tokenizer.encode("AB")) == "AB"


def test_a_saved_model_is_a_start_for_the_next_run(tmp_path: Path) -> None:
    flat = save(tmp_path / "model", gpt2())
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["architectures"] == ["GPT2LMHeadModel"]
    assert stored["resid_pdrop"] == 0.0
    assert torch.equal(initial_vector(ModelConfig(path=str(tmp_path / "model")), gpt2(), seed=9), flat.params())


def test_the_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    flat = save(tmp_path / "model", gpt2())
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert set(tensors) == {spec.name for spec in flat.layout}
    for spec, parameter in zip(flat.layout, flat.parameters, strict=True):
        assert torch.equal(tensors[spec.name], parameter.detach())


def test_an_older_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    save(target, gpt2(), seed=1, tokenizer=save_tokenizer(tmp_path / "tokenizer"))
    second = save(target, gpt2(), seed=2)
    assert not (target / "tokenizer.json").exists()
    opened = FlatModel(AutoModelForCausalLM.from_pretrained(target), layout=second.layout)
    assert torch.equal(opened.params(), second.params())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "tokenizer"]


def test_a_save_that_fails_leaves_the_older_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    first = save(target, gpt2(), seed=1)
    with pytest.raises(ResourceError, match=r"model cannot be written .*nowhere"):
        save_model_dir(target, gpt2(), first.params(), first.layout, tmp_path / "nowhere", card)
    with pytest.raises(ModelError, match="other tensors"):
        save_model_dir(target, gpt2(n_layer=1), first.params(), first.layout, None, card)
    with pytest.raises(ModelError, match="its layout needs"):
        save_model_dir(target, gpt2(), first.params()[1:], first.layout, None, card)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    opened = FlatModel(AutoModelForCausalLM.from_pretrained(target), layout=first.layout)
    assert torch.equal(opened.params(), first.params())


def test_the_card_has_a_header_and_every_fact() -> None:
    text = model_card(card)
    header = text.split("---")[1]
    assert "library_name: transformers" in header and "pipeline_tag: text-generation" in header
    assert "# demo" in text
    for row in (
        "| tokens | 2,000,000 |",
        "| final_val_loss | 3.25 |",
        "| data.digest | a\\|b |",
    ):
        assert row in text.splitlines()


def test_the_card_credits_everybody_who_gave_something() -> None:
    text = model_card(card)
    assert text.split("## Contributors\n\n")[1].splitlines() == [
        "| member | tokens | share |",
        "| --- | --- | --- |",
        "| w2 | 1,500,000 | 75.0% |",
        "| w\\|1 | 500,000 | 25.0% |",
    ]
    assert "Contributors" not in model_card({"name": "nobody's"})
