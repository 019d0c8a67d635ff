"""What happens in a run, for people and for logs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened. `kind` and the keys of `detail`:

    - `listening`: join_line                              the coordinator can be reached
    - `joined`, `left`: worker                            `left` has a reason
    - `waiting`: reason                                   what the run waits for
    - `round`: round, loss, workers, tokens, seconds      a round was committed
    - `discarded`: round, reason                          a round was discarded
    - `rolled_back`: round, reason                        training diverged, and the run went back to that round
    - `changed`: key, value                               an operator changed the recipe
    - `codec`: worker, reason                             another codec was chosen for a worker's updates
    - `aggregation`: rule, left_out, scaled               updates that the rule did not count whole
    - `lost`: worker, reason                              a piece of work was given up, or its result refused
    - `validation`: round, loss, owners                   `owners`: of private text, by worker, loss and personal
    - `checkpoint`: round, path
    - `model`: path                                       the model directory was written
    - `limits`: up, down, up_per_worker, down_per_worker  bytes/s of transfers, 0 for none; an operator changed them
    - `note`: worker or round, where it is about one
    """

    kind: str
    at: float
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


OnEvent = Callable[[Event], None]


def write_metrics(path: Path, event: Event) -> None:
    """Append one line to metrics.jsonl (docs/metrics.md), or nothing of it. OSError if the disk is full.

    The file is made for its owner only: it holds join lines.
    """
    line = json.dumps({"time": event.at, "kind": event.kind, "text": event.text, **event.detail}).encode() + b"\n"
    with open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        before = file.tell()
        if file.write(line) != len(line):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def progress_of(loss: float | None, figures: Mapping[str, float]) -> str:
    """Of a round, for people: its loss, or where that is withheld what the round has cost of privacy."""
    if loss is not None:
        return f"loss {loss:.4f}"
    return f"epsilon {figures['epsilon']:.3f}" if "epsilon" in figures else "loss withheld"
