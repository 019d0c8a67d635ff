"""Recipes: read strictly, overridden by key, and wrong in one clear sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import Recipe, load_recipe, parse_recipe
from potluck.coordinator.shipped import find_shipped, headline, shipped
from potluck.types.errors import RecipeError

GOOD = """
name = "mine"
seed = 3

[model]
config = { model_type = "gpt2", n_layer = 1 }

[data]
shared = "texts/*.txt"
seq_len = 64
tokenizer = { train = "bpe", vocab_size = 300 }

[budget]
tokens = 1_000

[strategy]
name = "diloco"
num_inner_steps = 7
inner = { lr = 1e-3, betas = [0.9, 0.99] }
"""


def write(folder: Path, text: str = GOOD) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str = GOOD, *overrides: str) -> str:
    """The sentence that a recipe is refused with."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert caught.value.exit_code == 3
    return sentence


def test_a_recipe_is_read_into_its_sections(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    assert (recipe.name, recipe.seed) == ("mine", 3)
    assert recipe.model.config == {"model_type": "gpt2", "n_layer": 1}
    assert recipe.data.seq_len == 64
    assert recipe.data.tokenizer.vocab_size == 300
    assert (recipe.budget.to_budget().tokens, recipe.budget.to_budget().rounds) == (1000, 0)
    assert recipe.strategy.name == "diloco"
    assert recipe.strategy.settings.model_dump()["num_inner_steps"] == 7
    assert recipe.strategy.settings.model_dump()["outer_lr"] == 0.7
    assert recipe.strategy.inner.betas == (0.9, 0.99)
    assert (recipe.codec.up, recipe.fleet.min_workers, recipe.checkpoint.durability) == ("fp32", 1, "process")


def test_paths_in_a_file_are_relative_to_it_and_overrides_to_here(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert load_recipe(path).data.paths == (os.path.join(str(tmp_path.resolve()), "texts", "*.txt"),)
    assert load_recipe(path, ["data.shared=other"]).data.paths == ("other",)
    assert load_recipe(path, ["data.shared=python-stdlib"]).data.paths == ("python-stdlib",)
    own = load_recipe(write(tmp_path, GOOD.replace('"texts/*.txt"', '["a.txt", "b.txt"]')))
    assert own.data.paths == tuple(str(tmp_path.resolve() / name) for name in ("a.txt", "b.txt"))


def test_the_shipped_name_of_data_is_not_a_path(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD.replace("texts/*.txt", "python-stdlib")))
    assert recipe.data.paths == ("python-stdlib",)


def test_a_recipe_survives_json(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["codec.up=bf16", "fleet.no_progress_s=7"])
    value = recipe.to_json()
    assert value["strategy"]["num_inner_steps"] == 7
    again = parse_recipe(value)
    assert again == recipe
    assert again.strategy.settings == recipe.strategy.settings
    assert type(again.strategy.settings) is type(recipe.strategy.settings)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("seed=9", lambda r: r.seed, 9),
        ("strategy.inner.lr=2e-3", lambda r: r.strategy.inner.lr, 2e-3),
        ("strategy.inner.lr = 1", lambda r: r.strategy.inner.lr, 1.0),
        ("model.config.n_layer=5", lambda r: r.model.config["n_layer"], 5),
        ("data.tokenizer=model", lambda r: (r.data.tokenizer.train, r.data.tokenizer.path), (None, None)),
        ("budget.rounds=4", lambda r: (r.budget.tokens, r.budget.rounds), (None, 4)),
        ("model.path=dir", lambda r: (r.model.config, r.model.path), (None, "dir")),
        ("fleet={min_workers = 3}", lambda r: r.fleet.min_workers, 3),
        ('checkpoint.durability="power"', lambda r: r.checkpoint.durability, "power"),
        ("checkpoint.durability=power", lambda r: r.checkpoint.durability, "power"),
    ],
)
def test_overrides(tmp_path: Path, override: str, get: object, value: object) -> None:
    recipe = load_recipe(write(tmp_path), [override])
    assert callable(get)
    assert get(recipe) == value


def test_what_the_model_library_takes_may_be_infinite(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["model.config.time_step_limit=[0.0, inf]"])
    assert recipe.model.config is not None and recipe.model.config["time_step_limit"][1] == float("inf")


def test_the_last_override_counts(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("seed", ["--set seed", "key=value"]),
        ("=3", ["key=value"]),
        ("strategy..lr=3", ["key=value"]),
        ("data.seq_len.more=3", ["data.seq_len is 64", "not a table"]),
        ("strategy.inner.lr=1\nseed = 4", ["strategy.inner.lr is", "must be a number"]),
    ],
)
def test_overrides_that_cannot_be(tmp_path: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path), [override])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sed=1", ["sed is not a key", "did you mean seed?"]),
        ("seq_len=8", ["seq_len is not a key", "did you mean data.seq_len?"]),
        ("strategy.outr_lr=1.0", ["strategy.outr_lr is not a key", "did you mean strategy.outer_lr?"]),
        ("model.seq_len=8", ["model.seq_len is not a key", "did you mean data.seq_len?"]),
        ("strategy.lr=1.0", ["strategy.lr is not a key", "did you mean strategy.inner.lr?"]),
        ("strategy.inner.batchsize=1", ["strategy.inner.batchsize", "strategy.inner.batch_size?"]),
        ("fleet.minworkers=1", ["fleet.minworkers", "did you mean fleet.min_workers?"]),
        (
            "strategy.mixing=0.3",
            ["strategy.mixing is not a key of diloco, which has num_inner_steps, outer_lr,", "remove it"],
        ),
        ("strategy.betas=[0.9, 0.99]", ["strategy.betas is not a key", "did you mean strategy.inner.betas?"]),
        ("data.tokenizer.vocab=300", ["data.tokenizer.vocab is not a key"]),
        ("optimiser.lr=1", ["optimiser is not a key"]),
        ("strategy.name=dilocco", ["dilocco", "'diloco'"]),
        ("codec.down=2bit", ["codec.down", "'2bit' loses too much for parameters"]),
        ("codec.down=powersgd(4)", ["codec.down", "must; use 'int8'"]),
        (
            "aggregation.trim_fracton=0.2",
            ["aggregation.trim_fracton is not a key", "did you mean aggregation.trim_fraction?"],
        ),
        ("codec.up=int9", ["codec.up", "'int9' is not a codec", "'int8'"]),
    ],
)
def test_unknown_keys_name_the_nearest(tmp_path: Path, override: str, parts: list[str]) -> None:
    sentence = refusal(tmp_path, GOOD, override)
    assert sentence.startswith("recipe ") or override.startswith("strategy.name")
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ('data.seq_len="64"', 'data.seq_len is "64" and must be a whole number'),
        ("data.seq_len=0", "data.seq_len is 0 and must be at least 1"),
        ("budget.tokens=2e6", "budget.tokens is 2000000.0 and must be a whole number"),
        ("data.private=1", "data.private is 1 and must be true or false"),
        ("data.shared=[1]", "data.shared[0] is 1 and must be text in quotes"),
        ("data.shared=1", "data.shared is 1 and must be text in quotes or a list"),
        ("data.format=csv", "data.format is \"csv\" and must be 'auto', 'text'"),
        ("strategy.inner.lr=-1", "strategy.inner.lr is -1 and must be greater than 0"),
        ("strategy.inner.lr=nan", "strategy.inner.lr is nan and must be a finite number"),
        ("strategy.outer_lr=inf", "strategy.outer_lr is inf and must be a finite number"),
        ("strategy.inner.betas=[0.9, -inf]", "strategy.inner.betas[1] is -inf and must be a finite number"),
        ("strategy.inner.betas=[1.5, 0.9]", "`betas` are (1.5, 0.9) and must be at least 0 and below 1"),
        ("strategy.inner.betas=[0.9, 1]", "`betas` are (0.9, 1.0) and must be at least 0 and below 1"),
        ("strategy.inner.eps=1e-300", "strategy.inner.eps is 1e-300 and must be at least 1e-30"),
        ("strategy.inner.batch_size=1000000", "strategy.inner.batch_size is 1000000 and must be at most 32768"),
        ("strategy.num_inner_steps=1000000000", "strategy.num_inner_steps is 1000000000 and must be at most 1000000"),
        ("budget.hours=inf", "budget.hours is inf and must be a finite number"),
        ("fleet.reconnect_s=inf", "fleet.reconnect_s is inf and must be a finite number"),
        ("strategy.outer_momentum=1.0", "strategy.outer_momentum is 1.0 and must be less than 1"),
        ("strategy.inner.betas=[0.9]", "strategy.inner.betas"),
        ("strategy.inner=3", "strategy.inner is 3 and must be a table"),
        ("aggregation.rule=medain", "aggregation.rule is \"medain\" and must be 'mean', 'trimmed_mean', 'median'"),
        ("aggregation.trim_fraction=0.5", "aggregation.trim_fraction is 0.5 and must be less than 0.5"),
        ("model=3", "model is 3 and must be a table"),
        ('name="no spaces"', 'name is "no spaces" and must be'),
        ("name=../escape", 'name is "../escape" and must be'),
        ("seed=-1", "seed is -1 and must be at least 0"),
        ("seed=1.5", "seed is 1.5 and must be a whole number"),
        ("data.seq_len=2020-01-01", 'data.seq_len is "2020-01-01" and must be a whole number'),
    ],
)
def test_wrong_values_say_value_and_limit(tmp_path: Path, override: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, GOOD, override)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (GOOD.replace('name = "mine"', ""), ["name is missing"]),
        (GOOD.replace("[budget]\ntokens = 1_000", ""), ["budget is missing"]),
        (GOOD.replace("tokens = 1_000", "tokens = 1_000\nrounds = 3"), ["budget: give exactly one", "2 are given"]),
        (GOOD.replace("tokens = 1_000", ""), ["budget: give exactly one", "0 are given"]),
        (GOOD.replace('shared = "texts/*.txt"', ""), ["data: give exactly one of `shared`"]),
        (GOOD.replace("name = \"diloco\"", ""), ["strategy.name is missing"]),
        (GOOD.replace("seed = 3", "seed = "), ["is not valid TOML", "line 3"]),
        ("", ["is missing"]),
    ],
)  # fmt: skip
def test_what_is_missing_or_too_much(tmp_path: Path, text: str, parts: list[str]) -> None:
    sentence = refusal(tmp_path, text)
    for part in parts:
        assert part in sentence


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(RecipeError, match=r"is not text: byte 8 is not UTF-8"):
        load_recipe(path)


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe file stdlib-gtp .* did you mean stdlib-gpt\?"):
        load_recipe("stdlib-gtp")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="no shipped recipe stdlib-gpt2; did you mean stdlib-gpt"):
        find_shipped("stdlib-gpt2")


def test_a_strategy_of_ones_own_is_found_beside_the_recipe(tmp_path: Path) -> None:
    method = """
from pydantic import BaseModel
from potluck.strategies.diloco import DiLoCo

class Settings(BaseModel, extra="forbid"):
    power: int = 2
    radius: float = float("inf")

class Mine(DiLoCo):
    Config = Settings
"""
    (tmp_path / "my_method.py").write_text(method)
    text = GOOD.replace('name = "diloco"\nnum_inner_steps = 7', 'name = "my_method.py:Mine"\npower = 3')
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.strategy.file == tmp_path.resolve() / "my_method.py"
    assert recipe.strategy.settings.model_dump() == {"power": 3, "radius": float("inf")}
    assert parse_recipe(json.loads(json.dumps(recipe.to_json()))) == recipe  # as a run's folder keeps it
    assert "strategy.powr is not a key; did you mean strategy.power?" in refusal(tmp_path, text, "strategy.powr=1")


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_can_be_read(name: str) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert len(headline(shipped()[name])) > 20
    assert headline(shipped()[name]).endswith(".")  # the whole of it is on that line
    assert recipe.seed == 1


@pytest.mark.parametrize(("name", "num_kept"), [("stdlib-streaming", 2), ("stdlib-scaffold", 1), ("stdlib-gpt", 0)])
def test_workers_are_told_what_their_method_keeps(name: str, num_kept: int) -> None:
    assert sketch(load_recipe(name)).spec.kept_vectors == num_kept


@pytest.mark.parametrize(
    ("name", "format", "why"),
    [
        ("stdlib-tiles", "chat", "predicts every token and data.format is 'chat'"),
        ("stdlib-gpt", "preference", 'trains on single sequences and data.format "preference" gives pairs'),
    ],
)
def test_records_are_for_methods_that_can_train_on_them(name: str, format: str, why: str) -> None:
    recipe = load_recipe(name)
    data = recipe.data.model_copy(update={"format": format})
    with pytest.raises(RecipeError, match=why):
        sketch(recipe.model_copy(update={"data": data}))


def test_no_shipped_recipe_is_lost() -> None:
    assert {"stdlib-gpt", "stdlib-sync", "private-text", "private-chat", "listed-tokens", "llama-small"} <= set(
        shipped()
    )
