"""What a worker tells its owner of canaries: their exposure in each model that is validated. Nothing of it is sent.

    STATE/runs/RUN/canaries/seed.json         what the canaries follow from; stays here
    STATE/runs/RUN/canaries/exposures.jsonl   {"round": 12, "model": "shared", "exposures": [1.2, 8.0], "most": 8.0}

"shared" is the run's model, with what its method has the worker keep of it; "personal" the worker's own beside that.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from potluck.data.canaries import Canaries, CanaryConfig, plant
from potluck.data.config import ReadOptions
from potluck.data.prepared import PreparedData

FOLDER, EXPOSURES = "canaries", "exposures.jsonl"
chance_bits = math.log2(math.e)
"""The mean exposure of canaries that a model knows nothing of, among many candidates."""


class CanaryWatch:
    """Of one run on one machine."""

    def __init__(self, canaries: Canaries, folder: Path, told: Callable[[str], None]) -> None:
        self.canaries, self._folder, self._told = canaries, folder, told

    @staticmethod
    def open(
        own: PreparedData, config: CanaryConfig, options: ReadOptions, run_dir: Path, told: Callable[[str], None]
    ) -> CanaryWatch:
        """Blocks. What is wrong as `data.canaries.plant` has it."""
        canaries = plant(own, config, options, run_dir / FOLDER)
        where = run_dir / FOLDER / EXPOSURES
        told(
            f"{canaries.count} canaries, {config.repeats} times each, are among the {own.num_sequences:,} sequences "
            f"trained on here; their exposure after each validation goes to {where}"
        )
        return CanaryWatch(canaries, run_dir / FOLDER, told)

    def watching(
        self, num_rounds: int, losses: Callable[[Tensor], list[float]], *, batch_size: int
    ) -> Callable[[], None]:
        """To call with each model of a validation after so many rounds in place; `losses` are of rows by that model."""
        models = iter(("shared", "personal"))

        def measure() -> None:
            if (model := next(models, "")) != "":
                batches = self.canaries.rows.split(batch_size)
                self._note(num_rounds, model, self.canaries.exposures([x for batch in batches for x in losses(batch)]))

        return measure

    def _note(self, num_rounds: int, model: str, exposures: list[float]) -> None:
        most = math.log2(len(self.canaries.rows) - self.canaries.count + 1)
        line = {"round": num_rounds, "model": model, "exposures": exposures, "most": most}
        try:
            _append(self._folder / EXPOSURES, json.dumps(line).encode() + b"\n")
        except OSError as error:  # the owner reads the sentence, and the task goes on
            self._told(f"{self._folder / EXPOSURES} cannot be written ({error.strerror or error})")
        whose = "the run's model" if model == "shared" else "this worker's own model"
        self._told(f"canaries after round {num_rounds}: {whose} has {exposure_sentence(exposures, most)}")


def _append(path: Path, line: bytes) -> None:
    """Also after a line that a process which was killed left torn."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else b"\n" + line
        file.write(line)


def exposure_sentence(exposures: list[float], most: float) -> str:
    return (
        f"exposures of {sum(exposures) / len(exposures):.1f} bits on average and {max(exposures):.1f} at most; "
        f"{chance_bits:.1f} is chance and {most:.1f} memorised"
    )
