"""How long somebody is left alone who was trusted and gave nothing: longer each time, up to a limit.

    0 for the first `num_forgiven` faults, then max(first_s, least_s) 2^k, at most longest_s      k = 0, 1, …

`good_in_a_row` good turns without a fault between them make up for one. So whoever fails more often than that waits
ever longer, and in T seconds costs others num_forgiven + log2(longest_s / first_s) + T / longest_s faults at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(kw_only=True)
class BackOff:
    """Of one machine. Times are any clock's seconds."""

    first_s: float = 1.0
    longest_s: float = 600.0
    num_forgiven: int = 2
    good_in_a_row: int = 16
    num_faults: int = 0
    until: float = -math.inf
    _num_good: int = 0

    def fault(self, now: float, *, least_s: float = 0.0) -> float:
        """For how many seconds it is to be left alone from now on."""
        self._num_good = 0
        self.num_faults += 1
        k = self.num_faults - self.num_forgiven - 1
        length_s = min(max(self.first_s, least_s) * 2.0 ** min(k, 64), self.longest_s) if k >= 0 else 0.0
        self.until = max(self.until, now + length_s)
        return length_s

    def good(self) -> None:
        """It gave what it was to give."""
        self._num_good += 1
        if self._num_good >= self.good_in_a_row:
            self._num_good, self.num_faults = 0, max(self.num_faults - 1, 0)

    def is_over(self, now: float) -> bool:
        return now >= self.until
