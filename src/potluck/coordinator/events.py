"""What happens in a run, for people and for logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened. `kind` and the keys of `detail`:

    - `listening`: address, join_line      the coordinator can be reached
    - `joined`, `left`: worker             `left` has a reason
    - `waiting`: reason                    what the run waits for
    - `round`: round, loss, workers, tokens, seconds    a round was committed
    - `discarded`: round, reason           a round was discarded
    - `codec`: worker, reason                 another codec was chosen for a worker's updates
    - `aggregation`: rule, left_out, scaled    updates that the rule did not count whole
    - `lost`: worker, reason             a piece of work was given up, or its result refused
    - `validation`: round, loss
    - `checkpoint`: path
    - `model`: path                        the model directory was written
    - `limits`: up, down, up_per_worker, down_per_worker    bytes/s of transfers, 0 for none; an operator changed them
    - `note`: text
    """

    kind: str
    at: float
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


OnEvent = Callable[[Event], None]
