"""What a run would mean for a machine, in values and in words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from potluck.cli.looking import prospect_text
from potluck.codecs.bundle import flat_size
from potluck.codecs.policy import CodecPolicy
from potluck.data.config import ReadOptions
from potluck.models.config import AdapterConfig
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig
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


def test_what_is_merged_into_the_base_is_neither_trained_nor_sent() -> None:
    adapter = AdapterConfig(rank=2, alpha=4, target_modules=("q_proj",))
    sizes: dict[str, tuple[int, int]] = {}
    for rule in ("fed_it", "flora"):
        strategy = FedLoRA(FedLoRAConfig.model_validate({"rule": rule}))
        spec = Problem(family="llama", adapter=adapter).plan(strategy).spec
        found = seen("fed_lora", **{name: value for name, value in dict(spec).items() if name != "strategy"})
        (delta,) = [each for each in found.outgoing if each.name == "delta"]
        sizes[rule] = found.num_params, delta.num_bytes
        assert spec.merges_adapters == (rule == "flora")
    assert sizes["fed_it"] == sizes["flora"] and sizes["flora"][0] == 2 * 2 * (16 + 16)


def test_what_is_read_and_what_is_guaranteed_is_said() -> None:
    options = ReadOptions(format="instruct", seq_len=8, validation=0.0, fields={"output": "diagnosis"})
    privacy = PrivacyConfig(max_epsilon=8.0, delta=1e-5, noise_multiplier=1.0, clip=1.0)
    text = prospect_text(seen(data_access="private", data_options=options.model_dump(), privacy=privacy))
    assert re.search(r"^data +your own text, read as instruct, output in field 'diagnosis'; held out: 0%$", text, re.M)
    assert re.search(r"^privacy +of each record: epsilon 8 at most of the whole run, delta 1e-05$", text, re.M)
    plain = ReadOptions(format="jsonl", seq_len=8, text_field="letters").model_dump()
    text = prospect_text(seen(data_access="private", data_options=plain))
    assert "your own text, read as jsonl, text in field 'letters'; held out: 5%\n" in text and "privacy" not in text
    assert "that this version does not know\n" in prospect_text(seen(data_access="private", data_options={}))


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
