"""`export`: models and adapters for others to open, of a run's folder or of a worker's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from potluck.cli.quiet import quiet_libraries
from potluck.cli.runs import find_run
from potluck.types.errors import PotluckError


def export_model(
    run: str | None, *, merged: Path | None, adapters: Path | None, state: Path | None, say: Callable[[str], None]
) -> None:
    """Blocks. PotluckError with what is wrong."""
    quiet_libraries()
    if merged is None and (adapters is None or state is None):
        raise PotluckError(
            "nothing is asked for: --merged DIR writes the whole model, and on a worker --state FOLDER --adapters DIR "
            "writes its own adapters; those of a run are in the folder `model` of its own"
        )
    if state is not None:
        from potluck.worker.own_model import export_own

        export_own(state, run, adapters=adapters, merged=merged)
    else:
        from potluck.coordinator.result import merge

        if adapters is not None:
            raise PotluckError("the adapters of a run are in its folder `model` already; --adapters goes with --state")
        assert merged is not None, "one of the two is asked for"
        merge(find_run(run), merged)
    if adapters is not None:
        say(f"the adapters are in {adapters}; `PeftModel.from_pretrained` opens them on the model they were trained on")
    if merged is not None:
        say(f"the model is in {merged}; let it write: potluck generate {merged}")
