"""The multiplier of a run: each product to the fleet in tiles, or on the head where that is as quick.

A plan is made once for each shape and fleet. The fleet that it was made for stands until a step begins with other
devices, or speeds that have drifted; within a step only if many devices have come or gone, since a new plan has other
shards and what devices hold would be worth nothing. Fewer are left to the bag: a lost device's tiles are dealt to the
others, and a new device takes from the slowest.

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
from potluck.planner.cost import Calibration, correction
from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options
from potluck.planner.tiles.product import Product as PlannedProduct
from potluck.strategies.bag import Bag
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.checks import check_tile
from potluck.strategies.sub_gemm.deal import Sizes
from potluck.strategies.sub_gemm.holdings import Holdings
from potluck.strategies.sub_gemm.pieces import Check, Terms, title
from potluck.strategies.sub_gemm.product import Matrix, Product, ProductKind
from potluck.strategies.sub_gemm.tally import Tally
from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId

wire_sizes = {"fp32": Sizes(down=4, up=4), "bf16": Sizes(down=2, up=2), "int8": Sizes(down=1, up=2, held=5)}
drift_tolerance = 0.1
"""A plan is made anew at a step whose devices are faster or slower than it took them to be by more."""
changed_share, changed_share_keeping = 0.02, 0.25
"""Of the devices that may come and go within a step before plans are made anew, without and with kept weights."""

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
    num_kept_products: int = 1
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
            num_kept_products=self.num_kept_products,
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
    checks_s: float = 0.0  # of the head, in a thread beside the products

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
            "native_s": sum(log.native_s for log in self.kinds.values()),
            "num_products_offloaded": sum(log.num_offloaded for log in self.kinds.values()),
            "num_products_native": sum(log.num_native for log in self.kinds.values()),
            "num_plans": self.num_plans,
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
        self._config, self._head, self._secret = config, head, secret
        self._check = check or self._check_by_vectors
        self._calibration = Calibration()
        self._holdings = Holdings()
        self._desk: Desk | None = None
        self._counting = threading.Lock()  # checks run side by side
        self._num_products = 0
        self._fleet: dict[WorkerId, TileDevice] = {}  # that the plans are for
        self._plans: dict[tuple[tuple[int, int, int], bool, ProductKind], Plan] = {}

    def begin_step(self, desk: Desk) -> None:
        """The weights are new, and so is the log. `desk` serves until the next step begins."""
        self._desk, self.log = desk, StepLog()
        self._holdings.clear()
        here = self._here(desk)
        if {w.id for w in here} != set(self._fleet) or self.times.drift(self._fleet, here) > drift_tolerance:
            self._plan_for(here)

    def __call__(self, product: Product) -> Tensor:
        assert self._desk is not None, "begin_step comes first"
        kind = self.log.kinds.setdefault(product.kind, KindLog())
        plan = self._plan(product, self._here(self._desk))
        self._num_products += 1
        if plan.method == "native" and not (self._fleet and math.isinf(self._head.s_per_flop)):
            return self._native(product, plan, self._desk, kind)
        devices_s = max((load.finish_s for load in plan.loads.values()), default=0.0)
        (m, n, q), placed = product.shape, [(tile.device, Box(*tile[1:7])) for tile in plan.tiles]
        bag = TileBag(
            product if self._config.may_keep_weights else _without_weights_names(product),
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
        kind.num_offloaded += 1
        kind.predicted_s += predicted_s
        kind.observed_s += observed_s
        return result

    def _here(self, desk: Desk) -> Sequence[WorkerInfo]:
        """Somebody, where the head does not compute."""
        here = desk.workers()
        if here or not math.isinf(self._head.s_per_flop):
            return here
        desk.wait()
        return desk.workers()

    def _native(self, product: Product, plan: Plan, desk: Desk, kind: KindLog) -> Tensor:
        if math.isinf(self._head.s_per_flop):
            raise RoundFailed(f"{title(product)} cannot be computed: {plan.reason}; let more join, or the head compute")
        began_at = desk.now()
        result = torch.mm(product.a.values.float(), product.b.values.float())
        took_s = desk.now() - began_at
        factor = correction(observed_s=took_s, predicted_s=plan.product.flops * self._head.s_per_flop)
        self._head = replace(self._head, s_per_flop=self._head.s_per_flop * factor)
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
            head=self._head,
            most_failures=self._config.most_failures,
        )

    def _check_by_vectors(self, a: Tensor, b: Tensor, c: Tensor, generator: torch.Generator) -> None:
        assert self._desk is not None, "begin_step comes first"
        began_at = self._desk.now()
        try:
            check_tile(a, b, c, wire=self._config.wire, generator=generator)
        finally:
            took_s = self._desk.now() - began_at
            with self._counting:
                self.log.checks_s += took_s

    # Plans

    def _plan(self, product: Product, here: Sequence[WorkerInfo]) -> Plan:
        keeps = self._config.may_keep_weights and self._config.num_micro_batches > 1
        share = changed_share_keeping if keeps else changed_share
        changed = {w.id for w in here} ^ set(self._fleet)
        if len(changed) > share * max(len(here), len(self._fleet)):
            self._plan_for(here)
        key = (product.shape, product.b.is_weight, product.kind)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = cheapest(
                planned(product.shape, product.kind, has_weight=product.b.is_weight, wire=self._config.wire),
                list(self._fleet.values()), self._head, self._config.options,
            )  # fmt: skip
            self.log.num_plans += 1
        return plan

    def _plan_for(self, here: Sequence[WorkerInfo]) -> None:
        self._fleet = {worker.id: self.times.device(worker) for worker in here}
        self._plans.clear()


def planned(shape: tuple[int, int, int], kind: ProductKind, *, has_weight: bool, wire: str) -> PlannedProduct:
    """A product as the planner has it, for which every one without a weight is one as a weight gradient is."""
    (m, n, q), sizes = shape, wire_sizes[wire]
    known = kind if has_weight and kind != "attention" else "weight_gradient"
    return PlannedProduct(m=m, n=n, q=q, kind=known, down_bytes=sizes.down, up_bytes=sizes.up, held_bytes=sizes.held)


def _without_weights_names(product: Product) -> Product:
    """So that no device keeps parts of weights."""

    def unnamed(matrix: Matrix) -> Matrix:
        return replace(matrix, name="") if matrix.is_weight else matrix

    return replace(product, a=unnamed(product.a), b=unnamed(product.b))
