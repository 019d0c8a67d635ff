"""What happened to the tiles of one product, or of many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from potluck.types.ids import WorkerId


@dataclass
class Tally:
    num_issued: int = 0
    num_reissued: int = 0  # of them, what somebody else had been given before
    num_copies: int = 0  # of those, near the end, while nothing was wrong
    num_late: int = 0
    num_lost: int = 0  # their device left or failed, or sent what was refused
    num_refused: int = 0
    num_ignored: int = 0  # replies that nobody waited for any more
    num_by_head: int = 0
    down_bytes: Counter[WorkerId] = field(default_factory=Counter[WorkerId])  # without what devices held
    up_bytes: Counter[WorkerId] = field(default_factory=Counter[WorkerId])  # of what counted

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, Counter):
                mine.update(value)
            else:
                setattr(self, name, mine + value)

    def metrics(self) -> dict[str, float]:
        return {
            f"tiles_{name.removeprefix('num_')}": sum(value.values()) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }
