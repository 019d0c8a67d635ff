"""What the system tells of this machine: its battery, what others use of its processors, when someone last typed.

Processors' time is that of the whole machine less this process's own, so other workers on it count as others. Typing is
seen in terminals only (logins, ssh sessions, terminal windows), by when they were last read from: what happens in the
windows of a desktop shows in nothing but the processors' time.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import psutil


class Machine:
    """Implements `terms.Surroundings`."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._last = self._used()

    def on_battery(self) -> bool:
        if not hasattr(psutil, "sensors_battery"):
            return False
        battery = psutil.sensors_battery()
        return battery is not None and battery.power_plugged is False

    def busy_share(self) -> float:
        (busy, total, own), self._last = self._last, self._used()
        now_busy, now_total, now_own = self._last
        passed = now_total - total
        return min(max((now_busy - busy - (now_own - own)) / passed, 0.0), 1.0) if passed > 0 else 0.0

    def untouched_s(self) -> float:
        terminals = [Path("/dev") / user.terminal for user in psutil.users() if user.terminal]
        ages = [time.time() - path.stat().st_atime for path in terminals if path.is_char_device()]
        return min(ages, default=math.inf)

    def _used(self) -> tuple[float, float, float]:
        """Seconds of all processors: busy, all, and this process's own."""
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # guests are in user
        own = self._own.cpu_times()
        return total - times.idle - getattr(times, "iowait", 0.0), total, own.user + own.system
