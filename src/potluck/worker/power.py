"""What the processor draws, where the system tells: Linux, Intel's and AMD's RAPL counters, mostly for root only.

power = difference of the counters / time; the counters of all packages are summed, and each starts again at 0 beyond
its range.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

powercap = Path("/sys/class/powercap")


class PowerMeter:
    def __init__(self, root: Path = powercap, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        found = sorted(root.glob("intel-rapl:*")) if root.is_dir() else []
        self._packages = [path for path in found if re.fullmatch(r"intel-rapl:\d+", path.name)]

    def watts_over(self, work: Callable[[], object]) -> float:
        """Do it, and the mean power meanwhile; 0 where the system does not tell."""
        before, begun = self._read(), self._now()
        work()
        passed_s, after = self._now() - begun, self._read()
        if not before or len(before) != len(after) or passed_s <= 0:
            return 0.0
        used = ((y - x) % full if full else max(y - x, 0) for (x, full), (y, _) in zip(before, after, strict=True))
        return sum(used) / 1e6 / passed_s

    def _read(self) -> list[tuple[int, int]]:
        """Microjoules so far, and where the counter starts again, of each package."""
        try:
            return [
                (int((p / "energy_uj").read_text()), int((p / "max_energy_range_uj").read_text()))
                for p in self._packages
            ]
        except (OSError, ValueError):
            return []
