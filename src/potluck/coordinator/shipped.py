"""The recipes that come with the package: `potluck/recipes/*.toml`."""

from __future__ import annotations

from pathlib import Path

folder = Path(__file__).resolve().parent.parent / "recipes"


def shipped() -> dict[str, Path]:
    """Every shipped recipe's file by its name, in the order of names."""
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def headline(path: Path) -> str:
    """What the recipe says of itself: its first comment line."""
    with path.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
