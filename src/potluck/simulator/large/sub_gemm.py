"""One optimizer step of `sub_gemm` on a modelled fleet: every product planned as the strategy plans it, and added up.

    seconds = sum over products of  first_s + (micro-batches - 1) later_s          one product after the other

A model's layers ask for the same few shapes again and again, and a fleet that does not change does them in the same
time each time: each shape is planned once. Its tiles, bytes and seconds are those of the planner that a real run uses
(`planner/tiles`), for the devices' own links, the coordinator's link that all share, and the devices' memory.

Not counted, here and in the baselines: what the head does itself (attention, norms, loss, optimizer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options, Product
from potluck.simulator.fleets import Machine
from potluck.strategies.sub_gemm.multiply import planned
from potluck.strategies.sub_gemm.walk import Asked
from potluck.types.errors import RoundFailed
from potluck.types.profile import memory_share

num_check_vectors = Head().num_check_vectors


def tile_devices(machines: Sequence[Machine], *, num_in_flight: int) -> list[TileDevice]:
    """As a run would see them; a device's memory is what a plan may count on."""
    return [
        TileDevice(
            id=machine.id,
            down_bytes_per_s=machine.down_bytes_per_s,
            up_bytes_per_s=machine.up_bytes_per_s,
            s_per_flop=1.0 / (machine.flops * machine.duty),
            rtt_s=machine.rtt_s,
            memory_bytes=memory_share * machine.memory_bytes,
            num_in_flight=num_in_flight,
        )
        for machine in machines
    ]


def plannable(asked: Counter[Asked], *, wire: str) -> Counter[Product]:
    """What is asked for in a micro-batch, by what the planner tells apart."""
    found: Counter[Product] = Counter()
    for (m, n, q, kind), count in asked.items():
        has_weight = kind in ("forward", "input_gradient")
        shape = (m, n, q) if has_weight else (min(m, q), n, max(m, q))  # C and C' cost the same
        found[planned(shape, "forward" if has_weight else kind, has_weight=has_weight, wire=wire)] += count
    return found


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: bytes, FLOPs and seconds of all its micro-batches."""

    plans: Mapping[Product, Plan]
    counts: Mapping[Product, int]  # of each in a micro-batch
    num_micro_batches: int
    seconds: float
    down_bytes: float  # of all devices
    up_bytes: float
    compute_s: float
    flops: float
    check_flops: float  # of the head, to check every tile
    energy_j: float | None  # of the devices; None where a power is not known
    num_devices: int
    num_devices_used: int  # by the product that uses most
    bindings: Mapping[str, float]  # share of the time in which each resource binds

    @property
    def assumptions(self) -> str:
        return f"sub_gemm: {next(iter(self.plans.values())).assumptions}; products come one after the other"

    @property
    def utilisation(self) -> float:
        """Share of the devices' time in which they compute."""
        return self.compute_s / (self.num_devices * self.seconds)

    @property
    def egress_bytes_per_s(self) -> float:
        return self.down_bytes / self.seconds

    @property
    def ingress_bytes_per_s(self) -> float:
        return self.up_bytes / self.seconds


def simulate_step(
    products: Mapping[Product, int],
    devices: Sequence[TileDevice],
    machines: Sequence[Machine],
    *,
    head: Head,
    options: Options,
) -> Step:
    """RoundFailed where no device has the memory for a tile of a product."""
    num = options.num_micro_batches
    plans = {product: cheapest(product, devices, head, options) for product in products}
    for product, plan in plans.items():
        if not plan.tiles:
            raise RoundFailed(
                f"{product.m} x {product.n} x {product.q} cannot be spread: {plan.reason}; let devices give more memory"
            )
    weighed = [(plans[product], count) for product, count in products.items()]
    seconds = sum(count * plan.step_s for plan, count in weighed)
    computes: Counter[str] = Counter()
    bindings: Counter[str] = Counter()
    for plan, count in weighed:
        bindings[_binding(plan)] += count * plan.step_s / seconds  # pyright: ignore[reportArgumentType]
        for id, load in plan.loads.items():
            computes[id] += num * count * load.compute_s  # pyright: ignore[reportArgumentType]
    knows_power = all(machine.busy_w > 0 for machine in machines)
    energy_j = sum(m.idle_w * seconds + (m.busy_w - m.idle_w) * m.duty * computes[m.id] for m in machines)
    return Step(
        plans=plans,
        counts=dict(products),
        num_micro_batches=num,
        seconds=seconds,
        down_bytes=sum(c * (p.first_down_bytes + (num - 1) * p.later_down_bytes) for p, c in weighed),
        up_bytes=sum(c * num * p.up_bytes for p, c in weighed),
        compute_s=float(sum(computes.values())),
        flops=num * sum(count * plan.product.flops for plan, count in weighed),
        check_flops=num * sum(count * _check_flops(plan) for plan, count in weighed),
        energy_j=energy_j if knows_power else None,
        num_devices=len(devices),
        num_devices_used=max(len(plan.loads) for plan in plans.values()),
        bindings=dict(bindings),
    )


def _check_flops(plan: Plan) -> float:
    """2 FLOPs for each random vector and element of A, B and C as tiles have them: Freivalds' check."""
    product = plan.product
    elements = plan.first_down_bytes / product.down_bytes + plan.up_bytes / product.up_bytes
    return 2.0 * num_check_vectors * elements


def _binding(plan: Plan) -> str:
    """The coordinator's egress or ingress, the head, or what binds most of the devices."""
    return plan.slowest if plan.slowest != "devices" else plan.bindings.most_common(1)[0][0]
