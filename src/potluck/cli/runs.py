"""Where runs lie: `runs/NAME` under the current directory, or where --dir says."""

from __future__ import annotations

from pathlib import Path

from potluck.storage.ledger import MARK
from potluck.types.errors import PotluckError
from potluck.types.mistakes import nearest


def new_run(folder: Path) -> Path:
    """The folder for a run that begins. PotluckError where one is already."""
    if (folder / MARK).exists():
        raise PotluckError(
            f"{folder} holds a run already; continue it with --resume, or give another folder with --dir"
        )
    return folder


def free_run(folder: Path) -> Path:
    """The folder itself or, where it exists, the first free one of the same name with a number."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def find_run(name: str | None, root: Path | None = None) -> Path:
    """The folder of a run: given by path, by its name under `runs`, or the last one used. PotluckError."""
    root = root or Path("runs")
    if name:
        for candidate in (Path(name), root / name):
            if (candidate / MARK).exists():
                return candidate
        near = nearest(name, (mark.parent.name for mark in root.glob(f"*/{MARK}")))
        hint = f"did you mean {near}?" if near else "give the run's folder"
        raise PotluckError(f"there is no run at {name} nor at {root / name}; {hint}")
    found = [mark.parent for mark in root.glob(f"*/{MARK}")]
    if not found:
        raise PotluckError(f"there is no run under {root.resolve()}; give the run's folder")
    return max(found, key=last_used)


def last_used(folder: Path) -> float:
    """When the run's ledger was last written. SQLite writes beside it until it checkpoints."""
    return max(path.stat().st_mtime for path in folder.glob(f"{MARK}*"))
