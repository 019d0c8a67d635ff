"""What a run would mean for a machine, in values and in words."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.cli.looking import prospect_text
from potluck.codecs.bundle import flat_size
from potluck.codecs.policy import CodecPolicy
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.registry import strategy_type, tasks_of
from potluck.types.errors import ModelError
from potluck.types.params import Layout
from potluck.worker.policy import Policy
from potluck.worker.prospect import Outgoing, Prospect, prospect

SPEC = Problem().plan(DiLoCo(DiLoCoConfig())).spec.model_copy(update={"strategy": "diloco", "up_codec": "int8+ef"})


def seen(strategy: str = "diloco", policy: Policy | None = None, max_memory_bytes: int = 0, **run: Any) -> Prospect:
    return prospect(
        SPEC.model_copy(update={"strategy": strategy, **run}), tasks_of(strategy_type(strategy)),
        policy=policy or Policy(), device="cpu", max_memory_bytes=max_memory_bytes, data=(), objections=("it is late",),
    )  # fmt: skip


def test_what_leaves_is_named_with_its_size() -> None:
    layout = Layout.from_json(SPEC.layout)
    found = seen()
    assert found.num_params == layout.numel and found.memory_bytes > 16 * layout.numel
    both, inner = ("diloco.inner", "evaluation.loss"), ("diloco.inner",)
    assert found.outgoing == (
        Outgoing(name="num_tokens", kind="number", tasks=both, num_bytes=24),
        Outgoing(name="loss_sum", kind="number", tasks=both, num_bytes=24),
        Outgoing(name="num_steps", kind="number", tasks=inner, num_bytes=24),
        Outgoing(
            name="delta", kind="vector", tasks=inner, num_bytes=flat_size("delta", layout, CodecPolicy(default="int8")),
            codec="int8+ef",
        ),
    )  # fmt: skip
    assert found.objections == ("it is late",), "data is dealt"
    assert "host_name" in found.profile and found.tells_notes


def test_what_would_keep_the_worker_away_is_added() -> None:
    assert seen(data_access="private").objections[1] == (
        "the run trains on private text and none was given; add --data"
    )
    (_, memory) = seen(max_memory_bytes=1000).objections
    assert "within --max-memory" in memory
    with pytest.raises(ModelError, match="the coordinator sent a layout that cannot be read"):
        seen(layout=[["a", -1]])


def test_devices_without_a_model_are_told_so() -> None:
    found = seen("sub_gemm", policy=Policy(profile=(), notes=False), devices_hold_model=False, layout=[])
    assert found.outgoing[0] == Outgoing(name="c", kind="tensor", tasks=("sub_gemm.tile",))
    text = prospect_text(found)
    assert "trains        gpt2, on the coordinator: devices compute products for it\n" in text
    assert "memory        what --max-memory gives\n" in text
    assert "c (tensor) of sub_gemm.tile\n" in text
    assert "of this machine: nothing\n" in text and "failed tasks: no\n" in text
    assert "would take part" not in text


def test_what_a_coordinator_writes_is_printable() -> None:
    text = prospect_text(seen(name="\x1b[2J evil", strategy_digest="blake3:\x07"))
    assert all(line.isprintable() for line in text.splitlines())
