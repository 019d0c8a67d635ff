"""Whether a run's replica fits on this machine, asked before it is built."""

from __future__ import annotations

import torch

from potluck.lora.places import adapted_layers, part_of
from potluck.models.build import skeleton
from potluck.models.device import Hardware, free_and_total_memory
from potluck.models.loss import CHUNK_BYTES, MAX_WHOLE_BYTES
from potluck.planner.memory import ModelDims, TrainingMemory, check_fits, training_memory
from potluck.strategies.merging import max_share
from potluck.strategies.run import RunSpec
from potluck.types.errors import ResourceError
from potluck.types.params import Layout, type_bytes


def replica_memory(spec: RunSpec, num_params: int, *, precision: str, num_resting: int = 0) -> TrainingMemory:
    """What a replica takes that trains `num_params` parameters on a device that computes in this precision, and holds
    `num_resting` more."""
    return training_memory(
        ModelDims.of(spec.model_config_json, num_params),
        batch_size=spec.inner.batch_size * max(1, spec.rows_per_record),
        seq_len=spec.seq_len,
        optimizer=spec.inner.optimizer,
        precision=precision,
        weights=spec.inner.weights,
        checkpoints_activations=spec.inner.checkpoint_activations,
        kept_vectors=spec.kept_vectors,
        max_logits_bytes=max(MAX_WHOLE_BYTES, CHUNK_BYTES),
        base_bytes=(
            _base_bytes(spec)
            + type_bytes * num_resting
            + _copies_bytes(spec, num_params)
            + _stack_bytes(spec, num_resting)
        ),
    )


def _stack_bytes(spec: RunSpec, num_resting: int) -> int:
    """At most, of the factors of what rounds merged, while they are added up."""
    return int(max_share * type_bytes * num_resting) if spec.merges_adapters else 0


def _copies_bytes(spec: RunSpec, num_params: int) -> int:
    """At most, of what records have of their own in a private step: what they multiply with, and its gradient."""
    return 0 if spec.privacy is None else 2 * type_bytes * spec.inner.batch_size * num_params


def _base_bytes(spec: RunSpec) -> int:
    """Of the frozen base as it is held, from the model itself: what the coordinator says of it is not asked."""
    if spec.base is None:
        return 0
    from potluck.models.base import held_bytes

    return held_bytes(skeleton(spec.model_config_json), spec.base.precision)


def fitting_rank(
    spec: RunSpec, layout: Layout, device: torch.device, precision: str, *, max_memory_bytes: int, hardware: Hardware
) -> int:
    """The highest rank of the run's adapters that there is memory for; 0 where it has none.

    ResourceError if training this model, or its adapters of the lowest rank, would need more than there is, or more
    than the owner gives.
    """
    ranks = spec.adapter.ranks if spec.adapter is not None else (0,)
    for rank in reversed(ranks):
        try:
            _check_memory(
                spec, layout, device, precision, rank, max_memory_bytes=max_memory_bytes, hardware=hardware
            )  # fmt: skip
        except ResourceError:
            if rank == ranks[0]:
                raise
        else:
            return rank
    raise AssertionError("the lowest rank is fitting or it raised")


def resting_tensors(layout: Layout, rank: int) -> set[str]:
    """Those of the run's parameters that a worker of that rank never trains: what was merged, and higher components."""
    layers = adapted_layers(layout).values()
    if not layers:
        return set()
    trained = {*part_of(layers, ("a", "b"), rank)}
    return {spec.name for i, spec in enumerate(layout) if i not in trained}


def memory_of_rank(spec: RunSpec, layout: Layout, rank: int, *, precision: str) -> TrainingMemory:
    """What a replica takes that trains this rank of the run's adapters; 0 where it has none."""
    resting = resting_tensors(layout, rank)
    num_resting = sum(each.numel for each in layout if each.name in resting)
    return replica_memory(spec, layout.numel - num_resting, precision=precision, num_resting=num_resting)


def _check_memory(
    spec: RunSpec, layout: Layout, device: torch.device, precision: str, rank: int, *, max_memory_bytes: int,
    hardware: Hardware,
) -> None:  # fmt: skip
    need = memory_of_rank(spec, layout, rank, precision=precision)
    free, _ = free_and_total_memory(device, hardware=hardware)
    host_free, _ = hardware.memory()
    limited = ""
    if max_memory_bytes and max_memory_bytes < host_free:
        host_free, limited = max_memory_bytes, " within --max-memory"
        free = free if device.type == "cuda" else min(free, max_memory_bytes)
    lacking = check_fits(need, device=str(device), device_free_bytes=free, host_free_bytes=host_free)
    if lacking:
        remedy = "raise it, or use a bigger machine" if limited else "close other programs, or use a bigger machine"
        what = f"this model of {layout.numel:,} parameters"
        if spec.base is not None:
            what = f"adapters of {layout.numel:,} parameters on this model, {_base_bytes(spec):,} bytes in "
            what += spec.base.precision
            remedy = f"hold it in fewer bits with model.base, {remedy}" if spec.base.precision != "int8" else remedy
        raise ResourceError(
            f"training {what} {lacking}{limited}; lower strategy.inner.batch_size or data.seq_len, {remedy}"
        )
