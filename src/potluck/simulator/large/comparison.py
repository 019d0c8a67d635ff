"""`sub_gemm` beside other ways of using the same machines, for fleets of several sizes and coordinators' links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from potluck.coordinator.plan import Plan
from potluck.planner.baselines.layered import BaselineTime, LayeredModel
from potluck.planner.baselines.mesh import mesh_time
from potluck.planner.baselines.pipeline import pipeline_time, pipelines, quickest
from potluck.planner.baselines.single import a100_flops_per_s, alone_s
from potluck.planner.memory import ModelDims
from potluck.planner.tiles.device import Head, TileDevice
from potluck.simulator.fleet_files import FleetFile
from potluck.simulator.fleets import Device, Machine, machines
from potluck.simulator.large.recovery import RecoveryTimes, recovery_times
from potluck.simulator.large.sub_gemm import Step, plannable, simulate_step, tile_devices
from potluck.strategies.sub_gemm.plans import wire_sizes
from potluck.strategies.sub_gemm.strategy import SubGEMM, spread_config
from potluck.strategies.sub_gemm.walk import Asked, asked_products
from potluck.types.errors import RecipeError

num_lost = (1, 3, 5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fleet with a coordinator's link. inf where the link counts for nothing."""

    num_devices: int
    egress_bytes_per_s: float
    ingress_bytes_per_s: float
    step: Step


@dataclass(frozen=True, kw_only=True)
class Comparison:
    model: LayeredModel
    num_micro_batches: int
    cases: tuple[Case, ...]
    baselines: tuple[tuple[int, BaselineTime], ...]  # with the devices of the fleet
    recoveries: tuple[tuple[int, RecoveryTimes], ...]  # with the fleet's own coordinator
    a100_s: float
    fastest_alone_s: float  # the fleet's fastest device, if it had the memory


class _Batch:
    """One optimizer step of a run with `sub_gemm`, before it meets a fleet. RecipeError for what is not simulated."""

    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.strategy, SubGEMM)
        config, inner = plan.strategy.config, plan.spec.inner
        if config.attention or config.checkpointing:
            raise RecipeError(
                "products of attention and repeated ones are not simulated; set strategy.attention and "
                "strategy.checkpointing to false"
            )
        self.spread = spread_config(config, inner)
        num_tokens = inner.batch_size * plan.spec.seq_len
        asked = asked_products(dict(plan.spec.model_config_json), num_tokens=num_tokens)
        self.uses = plannable(asked, wire=config.wire, num_micro_batches=self.spread.num_micro_batches)
        self.model = layered(plan, asked, num_tokens=num_tokens, wire_bytes=wire_sizes[config.wire].down)

    def on(self, found: Sequence[Machine], devices: Sequence[TileDevice], head: Head) -> Case:
        step = simulate_step(self.uses, devices, found, head=head, options=self.spread.options)
        return Case(
            num_devices=len(devices),
            egress_bytes_per_s=head.egress_bytes_per_s,
            ingress_bytes_per_s=head.ingress_bytes_per_s,
            step=step,
        )


def simulate_batch(plan: Plan, fleet: FleetFile, *, num_devices: int, seed: int) -> Case:
    """With the fleet's own coordinator, and nothing beside it. Raises as `compare` does."""
    batch = _Batch(plan)
    found = machines(resized(fleet.devices, num_devices), seed=seed)
    return batch.on(found, tile_devices(found, num_in_flight=batch.spread.num_in_flight), heads(fleet)[0])


def compare(
    plan: Plan, fleet: FleetFile, *, fleet_sizes: Sequence[int], seed: int, told: Callable[[int], None] = lambda _: None
) -> Comparison:
    """`plan` is of a run with `sub_gemm`, and `told` hears of each size that is done. RecipeError for what is not
    simulated; RoundFailed where devices are too small.
    """
    batch = _Batch(plan)
    model, spread = batch.model, batch.spread
    cases: list[Case] = []
    baselines: list[tuple[int, BaselineTime]] = []
    recoveries: list[tuple[int, RecoveryTimes]] = []
    fastest: list[float] = []
    for size in fleet_sizes:
        found = machines(resized(fleet.devices, size), seed=seed)
        fastest.append(max(machine.flops * machine.duty for machine in found))
        devices = tile_devices(found, num_in_flight=spread.num_in_flight)
        own, *others = heads(fleet)
        case = batch.on(found, devices, own)
        cases += [case, *(batch.on(found, devices, other) for other in others)]
        made = pipelines(model, devices)
        row = quickest(made)
        recoveries += [
            (size, recovery_times(case.step, devices, own, row, num_lost=num, seed=seed))
            for num in num_lost
            if num < size
        ]
        for baseline in (pipeline_time(made), mesh_time(model, devices, num_pieces=spread.num_tiles)):
            if baseline is not None:
                baselines.append((size, baseline))
        told(size)
    return Comparison(
        model=model,
        num_micro_batches=spread.num_micro_batches,
        cases=tuple(cases),
        baselines=tuple(baselines),
        recoveries=tuple(recoveries),
        a100_s=alone_s(model.flops, a100_flops_per_s),
        fastest_alone_s=alone_s(model.flops, max(fastest)),
    )


def heads(fleet: FleetFile) -> list[Head]:
    """The fleet's own coordinator, then those to compare with."""
    own = (fleet.coordinator_up_bytes_per_s, fleet.coordinator_down_bytes_per_s)
    links = [own, *((rate, rate) for rate in fleet.compared_bytes_per_s if (rate, rate) != own)]
    return [Head(egress_bytes_per_s=up, ingress_bytes_per_s=down) for up, down in links]


def resized(devices: Sequence[Device], size: int) -> list[Device]:
    """The same mixture of classes with `size` machines in all."""
    total = sum(device.count for device in devices)
    exact = [size * device.count / total for device in devices]
    counts = [math.floor(count) for count in exact]
    largest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in largest[: size - sum(counts)]:
        counts[i] += 1
    return [replace(device, count=count) for device, count in zip(devices, counts, strict=True) if count]


def layered(plan: Plan, asked: Counter[Asked], *, num_tokens: int, wire_bytes: float) -> LayeredModel:
    """For the baselines: the linear layers' parameters, each of which is multiplied with every token once."""
    config = dict(plan.spec.model_config_json)
    dims = ModelDims.of(config, plan.layout.numel)
    params = sum(a.m * a.n * a.q * a.times * n for a, n in asked.items() if a.kind == "forward") / num_tokens
    head_params = float(dims.hidden_dim * dims.vocab_size)
    return LayeredModel(
        num_layers=dims.num_layers,
        layer_params=(params - head_params) / dims.num_layers,
        head_params=head_params,
        hidden_dim=dims.hidden_dim,
        num_heads=dims.num_heads,
        num_sequences=plan.spec.inner.sequences_per_step,
        seq_len=plan.spec.seq_len,
        wire_bytes=wire_bytes,
    )
