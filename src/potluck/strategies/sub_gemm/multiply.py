"""The multiplier of a run: each product to the fleet in tiles, or on the head where that is as quick.

Plans stand as long as the fleet is about the same (`plans.py`). A few devices that come or go are left to the bag: a
lost device's tiles are dealt to the others, and a new device takes from the slowest.

    predicted / observed        summed over a step's products, for each kind: what the user sees of the cost model
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from potluck.codecs.factors import sent_as
from potluck.planner.cost import Calibration
from potluck.planner.tiles.device import Head
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options
from potluck.strategies.bag import STAYS, Bag
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.checks import check_tile
from potluck.strategies.sub_gemm.holdings import Holdings
from potluck.strategies.sub_gemm.own import OwnMachine
from potluck.strategies.sub_gemm.pieces import Check, Terms, title
from potluck.strategies.sub_gemm.plans import Plans, wire_sizes
from potluck.strategies.sub_gemm.product import Matrix, Product, ProductKind
from potluck.strategies.sub_gemm.tally import Tally
from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId

_fleet = WorkerId("")  # all devices together


class Desk(Protocol):
    """What a step's products are computed with; `strategies.fleet.Head` is one."""

    def workers(self) -> Sequence[WorkerInfo]: ...

    def wait(self) -> None: ...

    def now(self) -> float: ...

    def spread(self, bag: Bag) -> None: ...

    def blame(self, worker: WorkerId, reason: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SpreadConfig:
    wire: str = "fp32"
    num_tiles: int = 4
    num_in_flight: int = 3  # one on its way down, one at work, one on its way up
    num_micro_batches: int = 1
    may_keep_weights: bool = True
    may_split_inner: bool = True
    least_side: int = 64
    most_failures: int = 4

    @property
    def options(self) -> Options:
        return Options(
            num_micro_batches=self.num_micro_batches,
            may_keep_weights=self.may_keep_weights,
            may_split_inner=self.may_split_inner,
            num_tiles=self.num_tiles,
            least_side=self.least_side,
        )


@dataclass
class KindLog:
    """The products of one kind in a step."""

    num_offloaded: int = 0
    num_native: int = 0
    predicted_s: float = 0.0  # of those that were offloaded
    observed_s: float = 0.0
    native_s: float = 0.0


@dataclass
class StepLog:
    kinds: dict[ProductKind, KindLog] = field(default_factory=dict[ProductKind, KindLog])
    tally: Tally = field(default_factory=Tally)
    num_plans: int = 0
    plans_s: float = 0.0  # before the first product
    checks_s: float = 0.0  # of the head, in threads beside the products, of tiles that were right
    checks_flops: float = 0.0
    checks_rows_again: int = 0  # rows of them that were multiplied again, in fp64

    def metrics(self) -> dict[str, float]:
        """For the strategy's metrics: numbers by name."""
        kinds = {kind: log for kind, log in self.kinds.items() if log.observed_s > 0}
        predicted_s = sum(log.predicted_s for log in kinds.values())
        observed_s = sum(log.observed_s for log in kinds.values())
        ratios = {f"predicted_over_observed_{kind}": log.predicted_s / log.observed_s for kind, log in kinds.items()}
        whole = {"predicted_over_observed": predicted_s / observed_s} if observed_s else {}
        return {
            **whole,
            **ratios,
            "offloaded_s": observed_s,
            **{f"offloaded_s_{kind}": log.observed_s for kind, log in kinds.items()},
            "checks_s": self.checks_s,
            "checks_flops": self.checks_flops,
            "checks_rows_again": self.checks_rows_again,
            "native_s": sum(log.native_s for log in self.kinds.values()),
            "num_products_offloaded": sum(log.num_offloaded for log in self.kinds.values()),
            "num_products_native": sum(log.num_native for log in self.kinds.values()),
            "num_plans": self.num_plans,
            "plans_s": self.plans_s,
            **self.tally.metrics(),
        }


class SpreadMultiplier:
    """A `Multiplier`. Lives as long as a run; `begin_step` before the products of each optimizer step.

    `head` is the machine that calls: s_per_flop inf where it is not to compute products. `secret` must not be known
    to devices: the checks' vectors come from it.
    """

    def __init__(self, config: SpreadConfig, *, head: Head, secret: str, check: Check | None = None) -> None:
        self.log = StepLog()
        self.times = TileTimes(num_in_flight=config.num_in_flight)
        self.own = OwnMachine(head)
        self._config, self._secret = config, secret
        self._check = check or self._check_by_vectors
        self._calibration = Calibration()
        self._holdings = Holdings()
        self._desk: Desk | None = None
        self._counting = threading.Lock()  # checks run side by side
        self._num_products = 0
        self._plans = Plans(config.options, wire=config.wire, times=self.times)

    def begin_step(self, desk: Desk) -> None:
        """The weights are new, and so is the log. `desk` serves until the next step begins."""
        self._desk, self.log = desk, StepLog()
        self._holdings.clear()
        self._plans.num_made = 0
        here, begun_at = self._here(desk), desk.now()
        self._plans.begin_step(here, self.own.head, desk.now)
        self.log.plans_s = desk.now() - begun_at

    def __call__(self, product: Product) -> Tensor:
        assert self._desk is not None, "begin_step comes first"
        kind = self.log.kinds.setdefault(product.kind, KindLog())
        here, head = self._here(self._desk), self.own.head
        plan = self._plans.of(product, here, head)
        self.log.num_plans = self._plans.num_made
        self._holdings.reserve(self._plans.kept_bytes())
        self._num_products += 1
        if plan.method == "native" and not (self._plans.fleet and math.isinf(head.s_per_flop)):
            return self._native(product, plan, self._desk, kind)
        devices_s = max((load.finish_s for load in plan.loads.values()), default=0.0)
        (m, n, q), placed = product.shape, [(tile.device, Box(*tile[1:7])) for tile in plan.tiles]
        bag = TileBag(
            _named(product, STAYS if plan.keeps_weights else f"{self._num_products}/"),
            placed or [(_fleet, Box(0, m, 0, q, 0, n))],  # too large for any plan: the bag cuts it to their memory
            terms=self._terms,
            times=self.times,
            holdings=self._holdings,
            stretch=max(1.0, max(plan.egress_s, plan.ingress_s) / devices_s) if devices_s > 0 else 1.0,
            secret=f"{self._secret}/{self._num_products}",
        )
        try:
            self._desk.spread(bag)
            spread_at = self._desk.now()
            result = bag.result()
            kind.native_s += self._desk.now() - spread_at  # what was left to the head
        finally:
            self.log.tally.add(bag.tally)
            while self.times.news:
                self._desk.blame(*self.times.news.pop(0))
        # Of devices that all vary the slowest is slower than the mean one, and that is no device's fault.
        predicted_s = self._calibration.predict_s(_fleet, product.kind, max(bag.predicted_s, 0.0))
        observed_s = bag.ended_at - bag.began_at
        self._calibration.observe(_fleet, product.kind, predicted_s=predicted_s, observed_s=observed_s)
        self.own.spread(plan, here, bag.tally, observed_s)
        kind.num_offloaded += 1
        kind.predicted_s += predicted_s
        kind.observed_s += observed_s
        return result

    def _here(self, desk: Desk) -> Sequence[WorkerInfo]:
        """Somebody, where the head does not compute."""
        here = desk.workers()
        if here or not math.isinf(self.own.head.s_per_flop):
            return here
        desk.wait()
        return desk.workers()

    def _native(self, product: Product, plan: Plan, desk: Desk, kind: KindLog) -> Tensor:
        if math.isinf(self.own.head.s_per_flop):
            raise RoundFailed(f"{title(product)} cannot be computed: {plan.reason}; let more join, or the head compute")
        began_at = desk.now()
        result = torch.mm(product.a.values.float(), product.b.values.float())
        took_s = desk.now() - began_at
        self.own.computed(plan.product.flops, took_s)
        kind.num_native += 1
        kind.native_s += took_s
        return result

    @property
    def _terms(self) -> Terms:
        return Terms(
            wire=self._config.wire,
            sizes=wire_sizes[self._config.wire],
            check=self._check,
            received=lambda values: sent_as(values, self._config.wire),
            head=self.own.head,
            most_failures=self._config.most_failures,
        )

    def _check_by_vectors(self, a: Tensor, b: Tensor, c: Tensor, generator: torch.Generator) -> None:
        assert self._desk is not None, "begin_step comes first"
        began_at = self._desk.now()
        done = check_tile(a, b, c, wire=self._config.wire, generator=generator)
        took_s = self._desk.now() - began_at
        self.own.checked(done.flops, took_s)
        with self._counting:
            self.log.checks_s += took_s
            self.log.checks_flops += done.flops
            self.log.checks_rows_again += done.num_rows_again


def _named(product: Product, prefix: str) -> Product:
    """With other names of weights, for shards that stay, or for ones that are of no other product."""

    def named(matrix: Matrix) -> Matrix:
        return replace(matrix, name=prefix + matrix.name) if matrix.is_weight and matrix.name else matrix

    return replace(product, a=named(product.a), b=named(product.b))
