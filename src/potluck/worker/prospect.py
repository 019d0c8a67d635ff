"""What taking part in a run would mean for this machine, from the run's description alone: `join --dry-run`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from potluck.codecs.bundle import flat_size
from potluck.codecs.policy import CodecPolicy
from potluck.codecs.spec import parse_spec
from potluck.lora.places import adapted_layers, merged_part
from potluck.models.device import choose_precision, this_machine
from potluck.strategies.run import RunSpec
from potluck.strategies.task import FieldKind, TaskFunction
from potluck.types.errors import PotluckError
from potluck.types.params import Layout
from potluck.types.profile import DeviceProfile
from potluck.worker.need import fitting_rank, memory_of_rank
from potluck.worker.policy import Policy
from potluck.worker.replica import read_shape

number_bytes = 24
"""Of a number as text, at most."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """Something that results hold, which leave after each task."""

    name: str
    kind: FieldKind
    tasks: tuple[str, ...]
    num_bytes: int = 0  # at most, of a vector's first version; 0 where its task decides
    codec: str = ""


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A run as a worker would do it here."""

    spec: RunSpec
    num_params: int  # that are trained
    precision: str  # that this device computes in
    memory_bytes: int  # that training takes here; 0 where devices hold no model
    outgoing: tuple[Outgoing, ...]
    profile: tuple[str, ...]  # fields that the coordinator would be told
    tells_notes: bool
    objections: tuple[str, ...]  # why the worker would not take part; none if it would


def prospect(
    spec: RunSpec, tasks: Iterable[TaskFunction], *, policy: Policy, device: str, max_memory_bytes: int,
    data: tuple[Path, ...], objections: Iterable[str],
) -> Prospect:  # fmt: skip
    """Blocks while the model is measured. ModelError or Refused where the run's description cannot be."""
    found, memory_bytes, layout = list(objections), 0, Layout.of([])
    precision = choose_precision(spec.precision, torch.device(device)).name
    if spec.devices_hold_model:
        layout, _ = read_shape(spec)
        rank = spec.adapter.ranks[0] if spec.adapter is not None else 0
        try:
            rank = fitting_rank(
                spec, layout, torch.device(device), precision, max_memory_bytes=max_memory_bytes, hardware=this_machine
            )
        except PotluckError as error:
            found.append(str(error))
        need = memory_of_rank(spec, layout, rank, precision=precision)
        memory_bytes = need.device_bytes + need.host_bytes + need.kept_bytes
    merged = {*merged_part(adapted_layers(layout).values())}  # which no step trains and nobody sends
    trained = layout.part([i for i in range(len(layout.tensors)) if i not in merged])
    if spec.data_access != "shared" and not data:
        found.append(f"the run trains on {spec.data_access} text and none was given; add --data")
    return Prospect(
        spec=spec, num_params=trained.numel, precision=precision, memory_bytes=memory_bytes,
        outgoing=_outgoing(spec, tasks, trained),
        profile=tuple(each.name for each in fields(DeviceProfile) if policy.tells(each.name)),
        tells_notes=policy.notes, objections=tuple(found),
    )  # fmt: skip


def _outgoing(spec: RunSpec, tasks: Iterable[TaskFunction], layout: Layout) -> tuple[Outgoing, ...]:
    """Each field once, in the order of the tasks that have it."""
    having: dict[tuple[str, FieldKind], list[str]] = {}
    for task in tasks:
        for field in task.fields:
            having.setdefault((field.name, field.kind), []).append(task.name)
    policy = CodecPolicy.from_json(parse_spec(spec.up_codec).codec.name, spec.up_rules)

    def num_bytes(name: str, kind: FieldKind) -> int:
        if kind == "vector":
            return flat_size(name, layout, policy)
        return number_bytes if kind == "number" else 0

    return tuple(
        Outgoing(
            name=name, kind=kind, tasks=tuple(tasks), num_bytes=num_bytes(name, kind),
            codec=spec.up_codec if kind == "vector" else "",
        )
        for (name, kind), tasks in having.items()
    )  # fmt: skip
