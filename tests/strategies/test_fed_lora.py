"""Tasks of federated LoRA on a replica: what they do not send, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker.test_adapters import adapted
from worker.test_replica import some_batches

from potluck.lora.places import Factor, adapted_layers, part_of
from potluck.models.adapters import initial_adapters
from potluck.models.config import AdapterConfig
from potluck.strategies.fed_lora import inner
from potluck.types.errors import Refused
from potluck.types.vector import Vector
from potluck.worker.replica import TorchReplica

of_a: tuple[Factor, ...] = ("a",)
of_b: tuple[Factor, ...] = ("b",)


def test_what_stays_with_a_workers_owner_is_not_sent_whatever_the_coordinator_asks_for(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=2, alpha=4, target_modules=("q_proj",))
    spec, base = adapted("llama", "fp32", tmp_path, adapter=adapter)
    replica = TorchReplica(spec, base=base)
    layers = list(adapted_layers(replica.layout).values())
    a, b, whole = (part_of(layers, factors, 2) for factors in (of_a, of_b, of_a + of_b))
    first = Vector.of(initial_adapters(replica.layout, seed=3))
    num = len(replica.layout.tensors)
    from_the_end = tuple(i - num for i in b)
    for sends, says in (
        (whole, stays := r"\S+lora_B\S+ stays with its owner; leave it out"), ((), stays),
        (from_the_end, f"tensor {from_the_end[0]} of a layout of {num} is asked for"),
    ):  # fmt: skip
        replica.feed(some_batches(1))
        with pytest.raises(Refused, match=says):
            inner.function(
                replica, theta=[first.part(replica.layout.ranges(a))], parts=[a], keeps=b, rank=2, trains=whole,
                sends=sends, begins_anew=False, num_steps=1, progress=(0.2, 0.5),
            )  # fmt: skip
