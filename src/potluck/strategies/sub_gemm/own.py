"""What a run has shown of the machine that it runs on: the price of its work and checks, and its link.

    s per FLOP      of products, corrected by each as in `planner/cost.py`; of checks, seconds by FLOPs of the last ones
    link            the most bytes a second of a few products in a row that it made wait

Each device's link is known by itself, the coordinator's never shows alone: it is what all devices together lack. A
product which one direction of links binds, and that takes half as long again as it would if each device had the best
rate it ever showed, waited for the coordinator's own link, and what went over that then is what it has. Where that is
seldom so, it counts for nothing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from potluck.planner.cost import correction
from potluck.planner.tiles.device import Head
from potluck.planner.tiles.plan import Load, Plan
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.tally import Tally
from potluck.types.ids import WorkerId

few_products = 3
window = 8
most_slowdown = 1.5
forgotten = 0.5
"""Of what is known of checks, when as many FLOPs again were seen."""
known_flops = 1e10
least_check_flops, least_product_s = 3e7, 1.0
"""What is smaller tells of calls, and of a busy machine, more than of FLOPs and links."""


@dataclass
class _Way:
    """One direction of the link."""

    best: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])  # bytes a second of each device
    reached: deque[float] = field(default_factory=lambda: deque[float](maxlen=window))  # by all, of slow ones
    bytes_per_s: float = math.inf

    def meet(self, worker: WorkerId, rate: float) -> None:
        self.best[worker] = max(rate, self.best.get(worker, 0.0))

    def observe(self, alone_s: float, observed_s: float, num_bytes: float) -> None:
        if observed_s <= most_slowdown * alone_s:
            self.reached.clear()
        else:
            self.reached.append(num_bytes / observed_s)
        self.bytes_per_s = max(self.reached) if len(self.reached) >= few_products else math.inf


class OwnMachine:
    """`checked` may be called by several threads."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._down, self._up = _Way(), _Way()
        self._lock = threading.Lock()  # checks run side by side
        self._check_s = self._check_flops = 0.0

    @property
    def head(self) -> Head:
        """As it is planned with."""
        return replace(
            self._head,
            egress_bytes_per_s=min(self._head.egress_bytes_per_s, self._down.bytes_per_s),
            ingress_bytes_per_s=min(self._head.ingress_bytes_per_s, self._up.bytes_per_s),
            check_s_per_flop=self._check_s / self._check_flops if self._check_flops else self._head.check_s_per_flop,
        )

    def computed(self, flops: float, seconds: float) -> None:
        """A product by itself."""
        factor = correction(observed_s=seconds, predicted_s=flops * self._head.s_per_flop)
        self._head = replace(self._head, s_per_flop=self._head.s_per_flop * factor)

    def checked(self, flops: float, seconds: float) -> None:
        """A tile."""
        if flops < least_check_flops:
            return
        with self._lock:
            if self._check_flops > known_flops:
                self._check_s, self._check_flops = forgotten * self._check_s, forgotten * self._check_flops
            self._check_s, self._check_flops = self._check_s + seconds, self._check_flops + flops

    def spread(self, plan: Plan, here: Sequence[WorkerInfo], tally: Tally, observed_s: float) -> None:
        """A product was spread by a plan, and took so long."""
        for worker in here:
            link = worker.profile.link
            self._down.meet(worker.id, link.down_bytes_per_s)
            self._up.meet(worker.id, link.up_bytes_per_s)
        if not least_product_s < observed_s < math.inf:
            return
        match plan.binds:
            case "down" | "egress":
                down_s = {id: load.down_bytes / max(self._down.best.get(id, 0.0), 1.0) - load.down_s
                          for id, load in plan.loads.items()}  # fmt: skip
                self._down.observe(_alone_s(plan.loads, down_s), observed_s, sum(tally.down_bytes.values()))
            case "up" | "ingress":
                up_s = {id: load.up_bytes / max(self._up.best.get(id, 0.0), 1.0) - load.up_s
                        for id, load in plan.loads.items()}  # fmt: skip
                self._up.observe(_alone_s(plan.loads, up_s), observed_s, sum(tally.up_bytes.values()))
            case _:
                pass


def _alone_s(loads: Mapping[WorkerId, Load], saved_s: Mapping[WorkerId, float]) -> float:
    """When all would be done if each had its best rate."""
    return max(load.finish_s + min(saved_s[id], 0.0) for id, load in loads.items())
