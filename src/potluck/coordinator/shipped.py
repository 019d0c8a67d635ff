"""The recipes that come with the package: `potluck/recipes/*.toml`."""

from __future__ import annotations

import difflib
from pathlib import Path

from potluck.types.errors import RecipeError

folder = Path(__file__).resolve().parent.parent / "recipes"


def shipped() -> dict[str, Path]:
    """Every shipped recipe's file by its name, in the order of names."""
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def headline(path: Path) -> str:
    """What the recipe says of itself: its first comment line."""
    with path.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


def find_shipped(name: str) -> Path:
    """The file of a shipped recipe. RecipeError names the nearest."""
    known = shipped()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise RecipeError(f"there is no shipped recipe {name}; {hint}")
