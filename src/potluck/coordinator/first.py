"""What a run begins with: all weights of its model, or adapters that are new and the frozen base below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from potluck.models.build import initial_vector, skeleton
from potluck.models.config import BaseFiles, ModelConfig
from potluck.models.device import require_memory
from potluck.storage.objects import ObjectStore
from potluck.types.params import Layout


def bare_model(model: ModelConfig, config: dict[str, Any], *, merges: bool = False) -> nn.Module:
    """The model without its values; what is trainable of it are the run's parameters. ModelError."""
    if model.adapter is None:
        return skeleton(config)
    from potluck.models.adapters import adapted_skeleton

    return adapted_skeleton(config, model.adapter, merges=merges)


def first_parameters(model: ModelConfig, config: dict[str, Any], layout: Layout, *, seed: int) -> Tensor:
    """fp32 [layout.numel] on the CPU. ModelError."""
    if model.adapter is None:
        return initial_vector(model, config, seed=seed)
    from potluck.models.adapters import initial_adapters

    return initial_adapters(layout, seed=seed)


def make_base(
    model: ModelConfig, config: dict[str, Any], objects: ObjectStore, *, seed: int, tell: Callable[[str], None]
) -> BaseFiles | None:
    """The frozen base as objects of the run; None where all weights are trained. ModelError, ResourceError."""
    if model.adapter is None:
        return None
    from potluck.models.base import held_bytes, write_base

    bare = bare_model(model, config)  # before minutes are spent on it: are there such layers?
    if not model.from_weights:
        require_memory(sum(p.numel() for p in bare.parameters()), copies=1)
    num_bytes = held_bytes(skeleton(config), model.base)
    tell(f"writing the frozen model below the adapters in {model.base}: {num_bytes:,} bytes")
    return write_base(model, config, objects, seed=seed)
