"""A library in which each owner has functions, so small that it is read at once."""

from pathlib import Path

from potluck.bench.rig.owners import packages


def write_library(root: Path, *, num_functions: int) -> Path:
    for number, names in enumerate(packages.values()):
        (root / f"{min(names)}.py").parent.mkdir(parents=True, exist_ok=True)
        (root / f"{min(names)}.py").write_text("\n\n".join(function(number, i) for i in range(num_functions)))
    return root


def function(owner: int, number: int) -> str:
    name = "fghij"[owner]
    given = f'def {name}{number}(x):\n    """Add {number} to x."""\n'
    return given + f"    found = x + {number}\n    return {name}(found, {owner})"
