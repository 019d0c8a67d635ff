"""One optimizer step of `sub_gemm` on a modelled fleet: every product planned as the strategy plans it, and added up.

    seconds = sum over products of  first_s + (micro-batches - 1) later_s          one product after the other

A model's layers ask for the same few shapes again and again, and a fleet that does not change does them in the same
time each time: each shape is planned once, or twice where only some of its weights are kept. Tiles, bytes and seconds
are those of the planner that a real run uses (`planner/tiles/step.py`), for the devices' own links, the coordinator's
link that all share, and the memory that a device has for all products together.

Not counted, here and in the baselines: what the head does itself (attention, norms, loss, optimizer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.product import Options
from potluck.planner.tiles.step import StepPlan, Use, plan_step
from potluck.simulator.fleets import Machine
from potluck.strategies.sub_gemm.plans import planned
from potluck.strategies.sub_gemm.walk import Asked
from potluck.types.errors import RoundFailed
from potluck.types.profile import memory_share


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


def plannable(asked: Counter[Asked], *, wire: str, num_micro_batches: int) -> Counter[Use]:
    """What is asked for in a step, by what the planner tells apart, and how many weights each is done with."""
    found: Counter[Use] = Counter()
    for (m, n, q, kind, times), count in asked.items():
        has_weight = kind in ("forward", "input_gradient")
        shape = (m, n, q) if has_weight else (min(m, q), n, max(m, q))  # C and C' cost the same
        product = planned(shape, "forward" if has_weight else kind, has_weight=has_weight, wire=wire)
        found[Use(product, times * num_micro_batches)] += count
    return found


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of a plan, and what is not the planner's to say."""

    plan: StepPlan
    compute_s: float  # of all devices
    energy_j: float | None  # of the devices; None where a power is not known

    @property
    def assumptions(self) -> str:
        return f"sub_gemm: {self.plan.planned[0].plan.assumptions}; products come one after the other"

    @property
    def utilisation(self) -> float:
        """Share of the devices' time in which they compute."""
        return self.compute_s / (self.plan.num_devices * self.plan.seconds)


def simulate_step(
    uses: Mapping[Use, int],
    devices: Sequence[TileDevice],
    machines: Sequence[Machine],
    *,
    head: Head,
    options: Options,
) -> Step:
    """RoundFailed where no device has the memory for a tile of a product."""
    found = plan_step(uses, devices, head, options)
    for use, plan in ((each.use, each.plan) for each in found.planned):
        if not plan.tiles:
            m, n, q = use.product.m, use.product.n, use.product.q
            raise RoundFailed(f"{m} x {n} x {q} cannot be spread: {plan.reason}; let devices give more memory")
    computes = found.compute_s()
    knows_power = all(machine.busy_w > 0 for machine in machines)
    energy_j = sum(
        m.idle_w * found.seconds + (m.busy_w - m.idle_w) * m.duty * computes.get(m.id, 0.0) for m in machines
    )
    return Step(plan=found, compute_s=float(sum(computes.values())), energy_j=energy_j if knows_power else None)
