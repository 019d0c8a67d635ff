"""Many transfers over one shared link, as a fluid: each is one operation, however many bytes it moves.

Every flow has a rate of its own that it cannot exceed; the shared link divides its capacity C max-min fair:

    rate_i = min(r_i, level)        sum_i min(r_i, level) = C, or level = inf where sum_i r_i <= C

Bertsekas and Gallager, Data Networks, 6.5. Rates change only when a flow starts or ends. Flows below the level end at a
time that is known; flows at the level all move alike, so they end in the order of bytes left, measured on a clock V
that runs at the speed of the level (as in processor sharing). So a change costs O(log n), not O(n).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.clock import Clock

tolerance = 1e-9
"""Of rates and seconds: what rounding may leave."""
least_bytes = 0.5


@dataclass(eq=False, slots=True)
class Flow:
    """One transfer under way. Made by `SharedLink.start`."""

    rate: float  # bytes per second that its own link gives
    ended: Callable[[], None]
    at_level: bool = False
    is_over: bool = False
    ends: float = 0.0  # seconds of the clock, or bytes on V where it is at the level
    number: int = 0  # changes with each change of `ends`, so that old places in heaps are known


@dataclass
class _Heap:
    """Flows by a key; those that moved elsewhere since are passed over."""

    rows: list[tuple[float, int, Flow]] = field(default_factory=list[tuple[float, int, Flow]])

    def push(self, key: float, flow: Flow) -> None:
        heapq.heappush(self.rows, (key, flow.number, flow))

    def first(self) -> tuple[float, Flow] | None:
        while self.rows and self.rows[0][1] != self.rows[0][2].number:
            heapq.heappop(self.rows)
        return (self.rows[0][0], self.rows[0][2]) if self.rows else None


class SharedLink:
    """One direction of the coordinator's link, which all flows share; `capacity` in bytes per second."""

    def __init__(self, clock: Clock, capacity: float = math.inf) -> None:
        self._clock, self._capacity = clock, capacity
        self._level, self._passed, self._since = math.inf, 0.0, 0.0  # of V, and when that was
        self._free_rate, self._num_free, self._num_level = 0.0, 0, 0  # `free`: at their own rates
        self._free_by_end, self._free_by_rate = _Heap(), _Heap()
        self._level_by_end, self._level_by_rate = _Heap(), _Heap()
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._balancing: asyncio.Handle | None = None

    def start(self, num_bytes: float, rate: float, ended: Callable[[], None]) -> Flow:
        """Begin to move bytes; `ended` is called when the last is through, from the event loop."""
        flow = Flow(rate, ended)
        self._progress()
        if math.isinf(rate) and not math.isinf(self._capacity):
            self._put_at_level(flow, num_bytes)
        else:
            self._put_free(flow, num_bytes)
        self._balance_soon()
        return flow

    def stop(self, flow: Flow) -> float:
        """End a flow; the bytes it had left."""
        if flow.is_over:
            return 0.0
        self._progress()
        left = self._take(flow)
        flow.is_over = True
        self._balance_soon()
        return left

    # Where flows are

    def _put_free(self, flow: Flow, num_bytes: float) -> None:
        self._numbers += 1
        flow.number, flow.at_level = self._numbers, False
        flow.ends = self._since + (num_bytes / flow.rate if num_bytes else 0.0)
        self._num_free += 1
        self._free_rate += flow.rate
        self._free_by_end.push(flow.ends, flow)
        if not math.isinf(self._capacity):
            self._free_by_rate.push(-flow.rate, flow)

    def _put_at_level(self, flow: Flow, num_bytes: float) -> None:
        self._numbers += 1
        flow.number, flow.at_level = self._numbers, True
        flow.ends = self._passed + num_bytes
        self._num_level += 1
        self._level_by_end.push(flow.ends, flow)
        self._level_by_rate.push(flow.rate, flow)

    def _left(self, flow: Flow) -> float:
        if flow.at_level:
            return max(flow.ends - self._passed, 0.0)
        left_s = max(flow.ends - self._since, 0.0)
        return left_s * flow.rate if left_s else 0.0

    def _take(self, flow: Flow) -> float:
        """Out of its heaps; the bytes it has left."""
        left = self._left(flow)
        flow.number = 0
        if flow.at_level:
            self._num_level -= 1
        else:
            self._num_free -= 1
            self._free_rate = self._free_rate - flow.rate if self._num_free else 0.0
        return left

    # What changes

    def _progress(self) -> None:
        now = self._clock.now()
        if self._num_level and now > self._since:
            self._passed += (now - self._since) * self._level
        self._since = now

    def _balance_soon(self) -> None:
        """Once for all that starts and ends at one time."""
        if self._balancing is None:
            self._balancing = asyncio.get_running_loop().call_soon(self._balance)

    def _balance(self) -> None:
        self._balancing = None
        self._progress()
        self._end_finished()
        self._find_level()
        at = self._next_end()
        if self._timer is not None and self._timer.when() == at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at < math.inf:
            self._timer = asyncio.get_running_loop().call_at(at, self._due)

    def _due(self) -> None:
        self._timer = None
        self._balance()

    def _find_level(self) -> None:
        """Move flows between below and at the level until each is where it belongs. Each move raises the level."""
        if math.isinf(self._capacity):
            return
        while True:
            left = self._capacity - self._free_rate
            self._level = left / self._num_level if self._num_level else (math.inf if left >= -tolerance else 0.0)
            slowest, fastest = self._level_by_rate.first(), self._free_by_rate.first()
            if slowest is not None and slowest[0] <= self._level:
                flow = slowest[1]
                self._put_free(flow, self._take(flow))
            elif fastest is not None and -fastest[0] > self._level * (1 + tolerance):
                flow = fastest[1]
                self._put_at_level(flow, self._take(flow))
            else:
                return

    def _end_finished(self) -> None:
        while (first := self._free_by_end.first()) is not None and first[0] <= self._since + tolerance:
            self._end(first[1])
        while (first := self._level_by_end.first()) is not None and first[0] <= self._passed + least_bytes:
            self._end(first[1])

    def _end(self, flow: Flow) -> None:
        self._take(flow)
        flow.is_over = True
        flow.ended()

    def _next_end(self) -> float:
        free, level = self._free_by_end.first(), self._level_by_end.first()
        at = free[0] if free is not None else math.inf
        if level is not None and self._level > 0:
            at = min(at, self._since + max(level[0] - self._passed, 0.0) / self._level)
        return at
