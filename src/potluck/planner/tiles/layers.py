"""Whole layers: three products apart, or rectangles of tokens x features that stay where they are; and MLPs in one.

A device that has rows of X [T, d] and columns of W [d, f] can do more than its part of Y = X W before it lets go:

    stay      dX' = dY W'  and  dW = X' dY  of the same rectangle, X and W still there: down come only its cells of dY,
              up go a partial sum of its rows of dX, and one of its columns of dW once per optimizer step
    fused     act(X U) V with columns of U and the same rows of V: one partial sum comes back, nothing in between

In both a result's rows are summed over all devices that share them, on the head. So both trade downlink for uplink and
pay where links are about symmetric, rectangles large or the inner results wide. What a fused device returns went
through an activation, which Freivalds' check cannot see through: the head can only check such a tile by doing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.planner.tiles.bound import select
from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import Head, TileDevice, rates_of
from potluck.planner.tiles.plan import Load, Plan, Tile
from potluck.planner.tiles.plane import Demand, Plane
from potluck.planner.tiles.pricing import Part, Price, loads_of, price, tiles_of
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.tiling import tile_plane
from potluck.planner.tiles.verify import boxes_of, tiling_fault
from potluck.types.ids import WorkerId


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Y[T, f] = X[T, d] W[d, f] for T tokens of one micro-batch. Bytes as in `Product`."""

    num_tokens: int
    in_dim: int
    out_dim: int
    down_bytes: float = 4.0
    up_bytes: float = 4.0
    held_bytes: float = 4.0

    def products(self) -> tuple[Product, Product, Product]:
        """Forward, input gradient, weight gradient."""
        sizes = {"down_bytes": self.down_bytes, "up_bytes": self.up_bytes, "held_bytes": self.held_bytes}
        tokens, d, f = self.num_tokens, self.in_dim, self.out_dim
        return (
            Product(m=tokens, n=d, q=f, kind="forward", **sizes),
            Product(m=tokens, n=f, q=d, kind="input_gradient", **sizes),
            Product(m=d, n=tokens, q=f, kind="weight_gradient", **sizes),
        )


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """act(X U) V, or (act(X G) * X U) V with three matrices: d -> f -> d. Bytes as in `Product`."""

    num_tokens: int
    hidden_dim: int
    ff_dim: int
    num_matrices: int = 2
    down_bytes: float = 4.0
    up_bytes: float = 4.0
    held_bytes: float = 4.0

    def linears(self) -> tuple[Linear, ...]:
        """Those from d to f, then the one back."""
        up = Linear(
            num_tokens=self.num_tokens, in_dim=self.hidden_dim, out_dim=self.ff_dim,
            down_bytes=self.down_bytes, up_bytes=self.up_bytes, held_bytes=self.held_bytes,
        )  # fmt: skip
        return (*[up] * (self.num_matrices - 1), replace(up, in_dim=self.ff_dim, out_dim=self.hidden_dim))


@dataclass(frozen=True, kw_only=True)
class Rectangles:
    """A whole layer in rectangles of tokens x features.

    A tile's rows are tokens, its columns features; k is all of d.
    """

    tiles: tuple[Tile, ...]
    loads: dict[WorkerId, Load]
    first_s: float
    later_s: float
    first_down_bytes: float
    later_down_bytes: float
    up_bytes: float

    def step_s(self, num_micro_batches: int) -> float:
        return self.first_s + (num_micro_batches - 1) * self.later_s


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """The three products apart, and the rectangles that stay where that is quicker, else None."""

    products: tuple[Plan, Plan, Plan]
    stay: Rectangles | None
    apart_s: float  # of an optimizer step
    stay_s: float  # inf where no device has the memory


@dataclass(frozen=True, kw_only=True)
class MlpPlan:
    """The forward products apart, and the fused rectangles where those are quicker, else None."""

    products: tuple[Plan, ...]
    fused: Rectangles | None
    apart_s: float  # of an optimizer step
    fused_s: float


def cheapest_linear(
    linear: Linear, devices: Sequence[TileDevice], head: Head | None = None, options: Options | None = None
) -> LinearPlan:
    """Forward and backward of a linear layer."""
    head, options = head or Head(), options or Options()
    forward, input_gradient, weight_gradient = (cheapest(p, devices, head, options) for p in linear.products())
    apart_s = forward.step_s + input_gradient.step_s + weight_gradient.step_s
    stay = _laid_out(_stay_planes(linear, options), devices, head, options, inner=linear.in_dim)
    stay_s = stay.step_s(options.num_micro_batches) if stay else float("inf")
    is_quicker = stay_s < (1 - options.least_gain) * apart_s
    return LinearPlan(
        products=(forward, input_gradient, weight_gradient),
        stay=stay if is_quicker else None,
        apart_s=apart_s,
        stay_s=stay_s,
    )


def cheapest_mlp(
    mlp: Mlp, devices: Sequence[TileDevice], head: Head | None = None, options: Options | None = None
) -> MlpPlan:
    """The forward pass of an MLP."""
    head, options = head or Head(), options or Options()
    linears = mlp.linears()
    plans = {linear: cheapest(linear.products()[0], devices, head, options) for linear in set(linears)}
    products = tuple(plans[linear] for linear in linears)
    apart_s = sum(plan.step_s for plan in products)
    fused = _laid_out((_fused_plane(mlp, options),), devices, head, options, inner=mlp.hidden_dim)
    fused_s = fused.step_s(options.num_micro_batches) if fused else float("inf")
    is_quicker = fused_s < (1 - options.least_gain) * apart_s
    return MlpPlan(products=products, fused=fused if is_quicker else None, apart_s=apart_s, fused_s=fused_s)


def _stay_planes(linear: Linear, options: Options) -> tuple[Plane, Plane]:
    """Forward, and backward; the weight's gradient goes up once for all micro-batches."""
    d, kept_for = linear.in_dim, options.num_micro_batches
    down, up, held = linear.down_bytes, linear.up_bytes, linear.held_bytes
    kept = d * down if kept_for > 1 and options.may_keep_weights else 0.0
    forward = Plane(
        rows=linear.num_tokens,
        cols=linear.out_dim,
        down_row=d * down,
        down_col=d * down,
        up_area=up,
        flops_area=2.0 * d,
        held_row=2 * d * held,
        held_col=2 * d * held,
        held_area=2 * held,
        kept_col=kept,
        check_side=2.0 * d,
        check_area=2.0,
        strips="rows",
    )
    backward = replace(
        forward,
        down_row=0.0,
        down_col=0.0,
        down_area=down,
        up_row=d * up,
        up_col=d * up / kept_for,
        up_area=0.0,
        flops_area=4.0 * d,
        check_side=4.0 * d,
        check_area=4.0,
    )
    return forward, backward


def _fused_plane(mlp: Mlp, options: Options) -> Plane:
    d, num = mlp.hidden_dim, mlp.num_matrices
    keeps = options.num_micro_batches > 1 and options.may_keep_weights
    return Plane(
        rows=mlp.num_tokens,
        cols=mlp.ff_dim,
        down_row=d * mlp.down_bytes,
        down_col=num * d * mlp.down_bytes,
        up_row=d * mlp.up_bytes,
        flops_area=2.0 * num * d,
        held_row=2 * d * mlp.held_bytes,
        held_col=num * d * mlp.held_bytes,
        held_area=(num - 1) * mlp.held_bytes,
        kept_col=num * d * mlp.down_bytes if keeps else 0.0,
        strips="rows",
    )


def _laid_out(
    planes: Sequence[Plane], devices: Sequence[TileDevice], head: Head, options: Options, *, inner: int
) -> Rectangles | None:
    """The same rectangles for passes that follow each other. Their columns are kept where the planes say so."""
    if not devices:
        return None
    rates = rates_of(devices, num_tiles=options.num_tiles, room_share=options.room_share, kept_part=options.kept_part)
    keeps = planes[0].kept_col > 0
    num = options.num_micro_batches if keeps else 1
    demand = Demand(_mean(planes, num), rates, serial=1.0 / options.num_tiles if options.num_tiles else 0.0)
    found = select(demand, head, least_side=options.least_side)
    rectangles = tile_plane(demand.take(found.chosen), found.seconds) if found else None
    if found is None or rectangles is None:
        return None

    def parts(planes: Sequence[Plane]) -> list[Part]:
        own = rates.take(found.chosen)
        return [
            Part(
                demand=Demand(plane, own, serial=demand.serial),
                members=found.chosen,
                rectangles=rectangles,
                k0=0,
                k1=inner,
            )
            for plane in planes
        ]

    def total(planes: Sequence[Plane]) -> Price:
        prices = [price([part], head, options.num_tiles) for part in parts(planes)]
        return sum(prices[1:], prices[0])

    first = total(planes)
    later = total([replace(plane, down_col=0.0) for plane in planes]) if keeps else first
    whole = parts([_mean(planes, 1)])
    tiles = tiles_of(whole, devices, options.num_tiles)
    fault = tiling_fault(boxes_of(tiles), (0, planes[0].rows, 0, planes[0].cols, 0, inner))
    assert not fault, f"rectangles of {planes[0]} are wrong: {fault}"
    return Rectangles(
        tiles=tiles,
        loads=loads_of(whole, devices, first.seconds),
        first_s=first.most_s,
        later_s=later.most_s,
        first_down_bytes=first.shared.down_bytes,
        later_down_bytes=later.shared.down_bytes,
        up_bytes=first.shared.up_bytes,
    )


def _mean(planes: Sequence[Plane], num_micro_batches: int) -> Plane:
    """All passes as one, with what is kept spread over the micro-batches."""
    return replace(
        planes[0],
        down_row=sum(plane.down_row for plane in planes),
        down_col=sum(plane.down_col for plane in planes) / num_micro_batches,
        down_area=sum(plane.down_area for plane in planes),
        up_row=sum(plane.up_row for plane in planes),
        up_col=sum(plane.up_col for plane in planes),
        up_area=sum(plane.up_area for plane in planes),
        flops_area=sum(plane.flops_area for plane in planes),
        check_side=sum(plane.check_side for plane in planes),
        check_area=sum(plane.check_area for plane in planes),
    )
