"""What stays with an owner, as files: PEFT and transformers open it, and it is the worker's own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import problem_of
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker.test_adapters import adapted
from worker.test_replica import some_batches
from worlds import virtual_world

from potluck.cli.exporting import export_model
from potluck.clock import run_virtual
from potluck.coordinator.result import merge
from potluck.lora.places import adapted_layers, part_of
from potluck.models.adapters import initial_adapters
from potluck.models.build import build
from potluck.models.config import AdapterConfig
from potluck.simulator.exact.world import World
from potluck.storage.objects import ObjectStore
from potluck.strategies import fed_lora
from potluck.strategies.fed_lora import OWN, FedLoRA, FedLoRAConfig
from potluck.types.errors import CorruptError, PotluckError, ResourceError
from potluck.types.vector import Vector
from potluck.worker.own_model import export_own
from potluck.worker.replica import KEPT, TorchReplica, read_shape
from potluck.worker.state import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # which PEFT itself asks


def stored(config: dict[str, Any], seed: int, folder: Path) -> Path:
    build(config, seed=seed).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    return folder


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    return model.eval()(input_ids=tokens).logits


def by_peft(base: Path, adapters: Path, tokens: Tensor) -> Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapters)), tokens)


@pytest.mark.parametrize(("rule", "personal"), [("fed_sa", False), ("fed_it", True)])
def test_it_is_the_model_that_a_worker_ended_its_last_round_with(rule: str, personal: bool, tmp_path: Path) -> None:
    problem = problem_of(validate=False)
    config = FedLoRAConfig.model_validate({"rule": rule, "num_inner_steps": 2, "personal": personal})

    async def main() -> tuple[World, Tensor]:
        world = virtual_world(problem, FedLoRA(config), tmp_path / "world")
        for name in ("anna", "bert"):
            world.add(name)
        await world.clock.sleep(1.0)
        await world.start()
        state = await world.finish()
        assert world.last is not None
        return world, world.last.params.read(state.params)

    world, shared = run_virtual(main())
    base = stored(problem.config_json(), problem.seed, tmp_path / "base")
    tokens = torch.arange(16).reshape(2, 8)
    replica = TorchReplica(world.plan.spec, base=problem.base_files(ObjectStore(tmp_path / "objects")))
    replica.load(shared)
    others = [logits(AutoModelForCausalLM.from_pretrained(base), tokens), logits(replica.module, tokens)]
    for name in ("anna", "bert"):
        export_own(world.disk(name), None, adapters=tmp_path / name, merged=tmp_path / f"{name}-merged")
        states = world.disk(name).glob("runs/*/local/*.safetensors")
        replica.load(load_file(max(states, key=lambda path: path.stat().st_mtime))[KEPT + OWN])
        own = logits(replica.module, tokens)
        assert torch.allclose(by_peft(base, tmp_path / name, tokens), own, atol=2e-5)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged")
        assert torch.allclose(logits(merged, tokens), own, atol=2e-5)
        assert all((own - other).abs().max() > 2e-4 for other in others)
        others.append(own)
    with pytest.raises(PotluckError, match="anna exists; give a folder that does not"):
        export_own(world.disk("anna"), None, adapters=tmp_path / "anna")


def test_a_worker_of_a_lower_rank_keeps_its_model_at_the_runs_scale(tmp_path: Path) -> None:
    """It trains two of four components at the scale of rank 2, and validation and files are at that of rank 4."""
    adapter = AdapterConfig(rank=4, alpha=6, rslora=True, lower_ranks=(2,), target_modules=("q_proj", "v_proj"))
    spec, base = adapted("llama", "fp32", tmp_path, adapter=adapter, lr=5e-2, warmup=0.0)
    replica = TorchReplica(spec, base=base)
    layout = replica.layout
    places = list(adapted_layers(layout).values())
    part = part_of(places, ("a", "b"), 2)
    batches = some_batches(4)
    replica.feed(batches)
    first = Vector.of(initial_adapters(layout, seed=spec.seed)).part(layout.ranges(part))
    fed_lora.inner.function(
        replica, theta=[first], parts=[part], keeps=(), rank=2, trains=part, sends=part, begins_anew=False,
        num_steps=3, progress=(0.1, 0.2), personal=True, own_b=fed_lora.rescaled(adapter, places, 2),
    )  # fmt: skip
    tokens = batches[-1][:, :-1]
    trained, own = logits(replica.module, tokens), replica.kept[OWN]
    replica.use_rank(0)
    replica.load(own)
    assert torch.allclose(logits(replica.module, tokens), trained, atol=1e-5)
    run = RunFolder(tmp_path / "state" / "runs" / spec.run_id)
    run.keep_description(spec.model_dump_json())
    run.save_version("v", {KEPT + OWN: own}, {})
    export_own(tmp_path / "state", spec.run_id, adapters=tmp_path / "own")
    plain = stored(spec.model_config_json, 3, tmp_path / "plain")
    assert torch.allclose(by_peft(plain, tmp_path / "own", tokens), trained, atol=1e-5)
    assert (logits(AutoModelForCausalLM.from_pretrained(plain), tokens) - trained).abs().max() > 1e-2


def test_what_there_is_not_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PotluckError, match="no worker of a run that trains adapters has the state folder"):
        export_own(tmp_path, None, adapters=tmp_path / "own")
    spec, _ = adapted("llama", "fp32", tmp_path)
    for id in ("one-1", "one-2", "two-1"):
        run = RunFolder(tmp_path / "runs" / id)
        run.keep_description(spec.model_dump_json())
        run.save_version("v", {"exp_avg": torch.zeros(3)}, {})
    for name, says in ((None, "3 of the runs in .* name one of these: one-1, one-2, two-1"), ("one", "2 of the runs")):
        with pytest.raises(PotluckError, match=says):
            export_own(tmp_path, name, adapters=tmp_path / "own")
    with pytest.raises(PotluckError, match="this worker keeps no adapters of its own of two-1"):
        export_own(tmp_path, "two", adapters=tmp_path / "own")
    run.save_version("w", {KEPT + OWN: torch.zeros(3)}, {})
    with pytest.raises(PotluckError, match=r"has parameters \[3\] in torch.float32 and the run has 1536"):
        export_own(tmp_path, "two", adapters=tmp_path / "own")
    (path,) = [path for path in run.root.glob("local/*") if KEPT.encode() in path.read_bytes()]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(PotluckError, match=r"cannot be read .* let it end another round"):
        export_own(tmp_path, "two", adapters=tmp_path / "own")
    (run.root / "run.json").write_text("{")
    with pytest.raises(PotluckError, match="join the run once more"):
        export_own(tmp_path, "two", adapters=tmp_path / "own")
    assert not (tmp_path / "own").exists()
    for asked in ({}, {"adapters": tmp_path / "own"}):
        with pytest.raises(PotluckError, match="nothing is asked for: --merged DIR"):
            export_model(None, **{"merged": None, "adapters": None, "state": None, **asked}, say=print)


def kept(folder: Path, own: Tensor | None = None) -> Path:
    """A worker's folder with adapters of its own: as they begin, or these."""
    spec, _ = adapted("llama", "fp32", folder)
    layout, _ = read_shape(spec)
    run = RunFolder(folder / "state" / "runs" / spec.run_id)
    run.keep_description(spec.model_dump_json())
    run.save_version("v", {KEPT + OWN: initial_adapters(layout, seed=3) if own is None else own}, {})
    return folder / "state"


def test_a_target_that_cannot_be_is_one_sentence_and_nothing_is_written(tmp_path: Path) -> None:
    state, taken = kept(tmp_path), tmp_path / "taken"
    taken.write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    for target, says in ((tmp_path / "link", "link exists; give a folder"), (taken, "taken exists; give a folder")):
        with pytest.raises(PotluckError, match=says):
            export_own(state, None, adapters=target)
        with pytest.raises(PotluckError, match=says):
            merge(tmp_path, target)
    with pytest.raises(ResourceError, match=r"taken/in cannot be written .*; mend that, or choose another folder"):
        export_own(state, None, adapters=taken / "in")
    both = tmp_path / "both"
    for adapters, merged in ((both, both), (both / "in", both), (both, both / "in")):
        with pytest.raises(PotluckError, match="both is to hold two models"):
            export_own(state, None, adapters=adapters, merged=merged)
    assert sorted(tmp_path.iterdir()) == before and taken.read_text() == "mine"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda own: own.fill_(torch.nan), "hold NaN or infinity"), (lambda own: own.view(2, -1), "it is of another"),
        (lambda own: own.bfloat16(), r"\[1536\] in torch.bfloat16 and the run has 1536 in torch.float32"),
    ],
)  # fmt: skip
def test_a_state_that_is_no_adapters_is_one_sentence(
    changed: Callable[[Tensor], Tensor], says: str, tmp_path: Path
) -> None:
    spec, _ = adapted("llama", "fp32", tmp_path)
    state = kept(tmp_path, changed(initial_adapters(read_shape(spec)[0], seed=3)))
    with pytest.raises(CorruptError, match=says):
        export_own(state, None, adapters=tmp_path / "own")
    assert not (tmp_path / "own").exists()
