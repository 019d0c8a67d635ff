"""Recipes with differential privacy: what is refused, each with a sentence, and what becomes of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.processes import write_recipe

from potluck.coordinator.changes import changed
from potluck.coordinator.deck import Deck
from potluck.coordinator.divergence import Diverged, DivergenceConfig, DivergenceWatch, RoundFigures
from potluck.coordinator.events import progress_of
from potluck.coordinator.prepare import run_identity, sketch
from potluck.coordinator.recipe import IDENTITY, Recipe, load_recipe
from potluck.strategies.run import RunSpec
from potluck.types.errors import RecipeError

SHAPE = "hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4"
MODEL = f'config = {{ model_type = "llama", {SHAPE}, vocab_size = 300, max_position_embeddings = 64 }}'
ADAPTER = '\nadapter = { rank = 4, target_modules = ["q_proj"] }'
DATA = 'private = true\nformat = "instruct"\nseq_len = 32\nvalidation = 0'
STRATEGY = """name = "fed_lora"
rule = "ffa"
num_inner_steps = 2
privacy = { max_epsilon = 8.0, delta = 1e-5, noise_multiplier = 1.0, clip = 1.0 }
inner = { lr = 1e-3, batch_size = 4 }"""


def recipe_of(folder: Path, *overrides: str, model: str = MODEL + ADAPTER, data: str = DATA) -> Recipe:
    path = write_recipe(
        folder / "tiny.toml", "", model=model, data=data, strategy=STRATEGY, budget="rounds = 3",
        fleet='balance = "none"',
    )  # fmt: skip
    return load_recipe(path, overrides)


def test_workers_are_told_the_guarantee(tmp_path: Path) -> None:
    spec = sketch(recipe_of(tmp_path)).spec
    told = RunSpec.model_validate_json(spec.model_dump_json())
    assert told.privacy is not None and told.tasks == ("fed_lora.private_inner",)
    assert told.privacy.model_dump() == {"max_epsilon": 8.0, "delta": 1e-5, "noise_multiplier": 1.0, "clip": 1.0}
    assert sketch(load_recipe(tmp_path / "tiny.toml", ["strategy.rule=ffa", "strategy.privacy.clip=0.1"])).spec.privacy


@pytest.mark.parametrize("key", ["max_epsilon", "delta", "noise_multiplier", "clip"])
@pytest.mark.parametrize("value", ["0", "-1.0", "nan", "inf"])
def test_settings_without_meaning_are_refused(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"strategy\.privacy\.{key}"):
        recipe_of(tmp_path, f"strategy.privacy.{key}={value}")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["strategy.privacy.delta=1.0"], r"strategy\.privacy\.delta is 1\.0"),
        (["strategy.rule=fed_it"], r'of strategy\.rule "ffa", .* and the rule is "fed_it": noise in both'),
        (["strategy.rule=fed_sa"], r'the rule is "fed_sa"'),
        (["data.validation=0.1"], r"holds out 0\.1 of its text for losses; set data\.validation = 0"),
        (["data.max_bytes=100000"], r"stops reading after 100,000 bytes, .* set data\.max_bytes = 0"),
        (["data.format=preference", "strategy.name=fed_dpo"], r"`privacy` is of single .* or use fed_lora"),
        (["data.format=auto"], r"the run has private data of format 'auto'; set data\.private"),
        (["data.shared=python-stdlib"], r"the run has shared data of format 'instruct'"),
        (["strategy.personal=true"], r"strategy\.personal is told by losses .*, which strategy\.privacy withholds"),
        (["fleet.balance=time"], r'strategy\.privacy gives every worker as many steps: set fleet\.balance to "none"'),
    ],
)
def test_what_does_not_go_with_it_is_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=sentence):
        sketch(recipe_of(tmp_path, *overrides))


def test_whole_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"and no model\.adapter; set"):
        sketch(recipe_of(tmp_path, model=MODEL))


def test_robust_rules_take_what_is_noised_already(tmp_path: Path) -> None:
    plan = sketch(recipe_of(tmp_path, "aggregation.rule=norm_clipping"))
    assert plan.aggregation.rule == "norm_clipping" and plan.spec.privacy is not None


@pytest.mark.parametrize("change", ["max_epsilon=9", "noise_multiplier=0.5", "clip=2", "delta=1e-4"])
def test_a_run_that_goes_on_keeps_its_privacy(change: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    stored = {"run_id": "tiny-1", "recipe": recipe.to_json()}
    (tmp_path / IDENTITY).write_text(json.dumps(stored))
    assert run_identity(tmp_path, recipe) == "tiny-1"
    with pytest.raises(RecipeError, match=rf"strategy\.privacy\.{change.partition('=')[0]} is .* and here it is"):
        run_identity(tmp_path, recipe_of(tmp_path, f"strategy.privacy.{change}"))
    with pytest.raises(RecipeError, match=r"strategy\.privacy\.\w+ cannot change while a run goes on"):
        changed(recipe, f"strategy.privacy.{change}")


def test_nobody_is_asked_for_a_loss() -> None:
    assert Deck([], [], seed=1, shared=False, private=True, owners_hold_out=False).num_held_out == 0
    assert Deck([], [], seed=1, shared=False, private=True).num_held_out == 1


def test_a_round_tells_its_loss_or_what_it_cost() -> None:
    assert progress_of(2.5, {"epsilon": 1.0}) == "loss 2.5000"
    assert progress_of(None, {"epsilon": 1.23456}) == "epsilon 1.235"
    assert progress_of(None, {}) == "loss withheld"


def test_divergence_goes_by_the_step_alone_where_there_is_no_loss() -> None:
    def figures(round: int, step_norm: float) -> RoundFigures:
        return RoundFigures(round=round, loss=None, step_norm=step_norm)

    watch = DivergenceWatch(DivergenceConfig(), [figures(i, 1.0 + 0.01 * (i % 3)) for i in range(1, 15)])
    watch.judge(figures(15, 1.3))
    watch.commit(figures(15, 1.3))
    assert not watch.suspects
    with pytest.raises(Diverged, match="the step of round 16 has the norm 500") as diverged:
        watch.judge(figures(16, 500.0))
    assert diverged.value.good_round == 15
    with pytest.raises(Diverged, match="must be finite"):
        watch.judge(figures(16, float("inf")))
