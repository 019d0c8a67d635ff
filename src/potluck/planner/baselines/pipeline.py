"""Pipeline and data parallelism over devices: layers in P stages, and D rows of P devices, which are copies.

A sequence is a micro-batch: its activations go from stage to stage and their gradients back, each over the sender's
uplink and the receiver's downlink. A row of stages s with d_s, c_s and u_s seconds for one sequence does m of them in

    sum_s (c_s + transfers) + (m - 1) max_s max(d_s, c_s, u_s)

which is the overlap rule for the slowest stage's m pieces, and the row filling up before it. Then the gradients of each
stage are summed over its D devices in a ring, 2 (D - 1) / D of them each way. P and D are the quickest there are.

Yuan et al. 2022, arXiv:2206.01288 ("DT-FM"): rows are devices of about equal uplink, so that slow ones hold up no fast
row, instead of their search; sequences go to rows by speed. Not counted, in the baseline's favour: embeddings,
activations that a stage keeps but those at its borders, recomputation, and how devices behind NAT reach each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from potluck.planner.baselines.layered import BaselineTime, LayeredModel, flops_per_param, held_bytes, ring_bytes
from potluck.planner.tiles.device import TileDevice
from potluck.types.ids import WorkerId

assumptions = (
    "a sequence is a micro-batch; activations from device to device over their own links; gradients summed in rings "
    "after the last one; bf16 weights and gradients, optimizer state shared out among copies of a stage"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """P devices that hold the model together, and the sequences that they train on."""

    devices: tuple[TileDevice, ...]
    num_sequences: int
    fill_s: float  # the first sequence, through all stages and back
    step_s: float  # each further one

    @property
    def seconds(self) -> float:
        return self.fill_s + (self.num_sequences - 1) * self.step_s


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """`stage_params` of each stage in a row; `rings_s` is the sum of gradients, and `seconds` the whole step."""

    model: LayeredModel
    stage_params: tuple[float, ...]
    rows: tuple[Row, ...]
    rings_s: float
    needs_bytes: float  # of the fullest device
    has_bytes: float  # the device with the least memory

    @property
    def seconds(self) -> float:
        return max(row.seconds for row in self.rows) + self.rings_s

    @property
    def link_bytes(self) -> float:
        """Down, and as many up, of all devices."""
        borders = 2 * (len(self.stage_params) - 1) * self.model.sequence_bytes * self.model.num_sequences
        rings = sum(ring_bytes(len(self.rows), p * self.model.wire_bytes) for p in self.stage_params) * len(self.rows)
        return borders + rings


def pipelines(model: LayeredModel, devices: Sequence[TileDevice]) -> list[Pipeline]:
    """One for each number of stages that the devices are enough for."""
    return [p for groups in range(1, model.num_layers + 1) if (p := _pipeline(model, devices, groups)) is not None]


def quickest(made: Sequence[Pipeline]) -> Pipeline | None:
    """Of those that fit into their devices' memory, or of all where none does."""
    return min([p for p in made if p.needs_bytes <= p.has_bytes] or made, key=lambda p: p.seconds, default=None)


def pipeline_time(made: Sequence[Pipeline]) -> BaselineTime | None:
    """The quickest of all `pipelines`. None if the devices are too few."""
    best = quickest(made)
    if best is None:
        return None
    num_stages, num_rows = len(best.stage_params), len(best.rows)
    used = num_stages * num_rows
    return BaselineTime(
        name="pipeline",
        seconds=best.seconds,
        layout=f"{num_rows} rows of {num_stages} stages",
        num_devices_used=used,
        down_bytes_per_device=best.link_bytes / used,
        up_bytes_per_device=best.link_bytes / used,
        needs_bytes=best.needs_bytes,
        least_bytes=min(p.needs_bytes for p in made),
        has_bytes=best.has_bytes,
        assumptions=assumptions,
    )


def _pipeline(model: LayeredModel, devices: Sequence[TileDevice], num_groups: int) -> Pipeline | None:
    stages = _stages(model, num_groups)
    num_rows = min(len(devices) // len(stages), model.num_sequences)
    if not num_rows:
        return None
    strongest = sorted(devices, key=lambda d: -d.up_bytes_per_s)
    groups = [tuple(strongest[r * len(stages) : (r + 1) * len(stages)]) for r in range(num_rows)]
    times = [_row_times(model, stages, group) for group in groups]
    counts = _dealt(times, model.num_sequences)
    rows = tuple(
        Row(devices=group, num_sequences=count, fill_s=fill_s, step_s=step_s)
        for group, (fill_s, step_s), count in zip(groups, times, counts, strict=True)
    )
    in_flight = min(len(stages), max(counts))
    return Pipeline(
        model=model,
        stage_params=stages,
        rows=rows,
        rings_s=_rings_s(model, stages, groups),
        needs_bytes=held_bytes(max(stages), num_rows) + in_flight * model.sequence_bytes,
        has_bytes=min(device.memory_bytes for group in groups for device in group),
    )


def _stages(model: LayeredModel, num_groups: int) -> tuple[float, ...]:
    """Parameters of each: layers in groups as equal as can be, and the head for itself."""
    each, more = divmod(model.num_layers, num_groups)
    layers = [(each + (group < more)) * model.layer_params for group in range(num_groups)]
    return (*layers, *[model.head_params] * (model.head_params > 0))


def _row_times(model: LayeredModel, stages: Sequence[float], row: Sequence[TileDevice]) -> tuple[float, float]:
    """Seconds until one sequence is through, and of each further one."""
    fill_s = slowest_s = 0.0
    for number, (params, device) in enumerate(zip(stages, row, strict=True)):
        compute_s = flops_per_param * params * model.seq_len * device.s_per_flop
        beside = [row[i] for i in (number - 1, number + 1) if 0 <= i < len(row)]
        down_s = sum(model.sequence_bytes / min(other.up_bytes_per_s, device.down_bytes_per_s) for other in beside)
        up_s = sum(model.sequence_bytes / min(device.up_bytes_per_s, other.down_bytes_per_s) for other in beside)
        fill_s += compute_s + up_s + device.rtt_s * len(beside) / 2  # a transfer is its sender's here
        slowest_s = max(slowest_s, down_s, compute_s, up_s)
    return fill_s, slowest_s


def _dealt(times: Sequence[tuple[float, float]], num_sequences: int) -> list[int]:
    """Each sequence to the row that would be done with it first, one to each row at least."""
    counts = [1] * len(times)
    ends = [(fill_s + step_s, row) for row, (fill_s, step_s) in enumerate(times)]
    heapq.heapify(ends)
    for _ in range(num_sequences - len(times)):
        end_s, row = heapq.heappop(ends)
        counts[row] += 1
        heapq.heappush(ends, (end_s + times[row][1], row))
    return counts


def _rings_s(model: LayeredModel, stages: Sequence[float], rows: Sequence[Sequence[TileDevice]]) -> float:
    if len(rows) == 1:
        return 0.0
    slowest_s = 0.0
    for number, params in enumerate(stages):
        members = [row[number] for row in rows]
        rate = min(min(d.up_bytes_per_s, d.down_bytes_per_s) for d in members)
        rounds_s = 2 * (len(rows) - 1) * max(d.rtt_s for d in members) / 2
        slowest_s = max(slowest_s, ring_bytes(len(rows), params * model.wire_bytes) / rate + rounds_s)
    return slowest_s


@dataclass(frozen=True)
class Recovery:
    """After a loss was noticed: weights to whoever takes the place, and the row's work of this step again."""

    reload_s: float
    replay_s: float

    @property
    def seconds(self) -> float:
        return self.reload_s + self.replay_s


def recovery(pipeline: Pipeline, lost: Collection[WorkerId], *, reload_bytes_per_s: float) -> Recovery:
    """Mean over when in a step it happens: the sums of gradients of a lost stage are gone with it, so its row does
    again what it had done of the step, half on average. Optimizer state is taken to come for free.
    """
    reload_s = replay_s = 0.0
    for row in pipeline.rows:
        for number, device in enumerate(row.devices):
            if device.id in lost:
                weights = pipeline.stage_params[number] * pipeline.model.wire_bytes
                reload_s = max(reload_s, weights / reload_bytes_per_s)
                replay_s = max(replay_s, row.seconds / 2)
    return Recovery(reload_s, replay_s)
