"""From a recipe to a run: what is told when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.processes import write_recipe
from models.families import VOCAB_SIZE, save_tokenizer

from potluck.coordinator.prepare import prepare, run_identity, sketch
from potluck.coordinator.recipe import IDENTITY, load_recipe
from potluck.storage.objects import ObjectStore
from potluck.types.errors import RecipeError

CONFIG = 'config = { model_type = "gpt2", n_layer = 1, n_embd = 32, n_head = 2, n_positions = 32 }\n'


def test_what_the_strategy_refuses_is_told_before_text_is_read(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "tiny.toml", 'shared = "not-there"', model=CONFIG)
    recipe = load_recipe(path, ["fleet.balance=time", 'strategy={name="streaming_diloco"}'])
    objects, told = ObjectStore(tmp_path / "run" / "objects"), list[str]()
    with pytest.raises(RecipeError, match=r'gives every worker as many steps: set fleet.balance to "none"'):
        prepare(recipe, tmp_path / "run", objects, cache_dir=tmp_path / "cache", tell=told.append)
    assert told == []


def test_a_plan_without_data_has_the_vocabulary_of_the_tokenizer_that_the_recipe_names(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    path = write_recipe(tmp_path / "tiny.toml", "private = true", model=CONFIG)
    named = f'data.tokenizer={{path="{(tmp_path / "tokenizer").as_posix()}"}}'
    assert sketch(load_recipe(path, [named])).spec.model_config_json["vocab_size"] == VOCAB_SIZE


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("strategy.overlap_steps=16", "strategy.overlap_steps is 48 and here it is 16"),
        ("model.config.n_inner=64", "model.config.n_inner is left out and here it is 64"),
        ("seed=2", "seed is 1 and here it is 2"),
        ('name="other"', 'name is "stdlib-streaming" and here it is "other"'),
    ],
)
def test_a_run_of_another_recipe_names_what_differs(tmp_path: Path, change: str, difference: str) -> None:
    stored = {"run_id": "mine-1", "recipe": load_recipe("stdlib-streaming").to_json()}
    (tmp_path / IDENTITY).write_text(json.dumps(stored))
    assert run_identity(tmp_path, load_recipe("stdlib-streaming", ["budget.rounds=3"])) == "mine-1"
    with pytest.raises(RecipeError, match=f"holds a run whose {difference}; name that folder in place of the recipe"):
        run_identity(tmp_path, load_recipe("stdlib-streaming", [change]))
