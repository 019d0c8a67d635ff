"""The pages made from the code are current, and say what the code does."""

from pathlib import Path

import pytest

from potluck.cli.reference import exit_codes_page, policy_page, recipes_page
from potluck.coordinator.recipe import load_recipe
from potluck.types import errors

docs = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "page"),
    [("recipes.md", recipes_page), ("exit_codes.md", exit_codes_page), ("policy.md", policy_page)],
)
def test_pages_are_current(name: str, page: object) -> None:
    assert callable(page)
    assert (docs / name).read_text(encoding="utf-8") == page(), f"docs/{name} is stale; run scripts/docs"


def test_every_exit_code_is_documented() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.PotluckError)]
    assert len(kinds) >= 10
    for kind in kinds:
        assert f"| {kind.exit_code} |" in exit_codes_page()


def test_every_key_of_a_recipe_is_documented() -> None:
    page = recipes_page()
    value = load_recipe("stdlib-gpt").to_json()
    for section, keys in value.items():
        for key in keys if isinstance(keys, dict) else [section]:
            assert f"`{key}`" in page or f"strategy.{key}" in page


def test_the_override_example_works() -> None:
    line = next(line for line in recipes_page().splitlines() if "--set budget.rounds=2" in line)
    overrides = [word for word in line.split() if "=" in word]
    recipe = load_recipe("stdlib-gpt", overrides)
    assert (recipe.budget.rounds, recipe.strategy.inner.lr, recipe.data.max_bytes) == (2, 1e-3, 1_000_000)
