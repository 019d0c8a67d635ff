"""From a recipe with adapters to a run: what is made of it, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.processes import write_corpus, write_recipe
from models.families import gpt2, llama, save_tokenizer
from transformers import AutoModelForCausalLM

from potluck.coordinator.events import Event
from potluck.coordinator.host import serve
from potluck.coordinator.options import HostOptions, Listening, RunResult
from potluck.coordinator.prepare import prepare, sketch
from potluck.coordinator.recipe import Recipe, load_recipe
from potluck.coordinator.result import merge
from potluck.models.build import build
from potluck.models.export import save_model_dir
from potluck.models.flat import FlatModel
from potluck.models.generate import generate
from potluck.storage.objects import ObjectStore
from potluck.types.errors import ModelError, PotluckError, RecipeError
from potluck.types.ids import Digest
from potluck.worker.join import work
from potluck.worker.need import replica_memory
from potluck.worker.options import JoinOptions

CONFIG = 'config = { model_type = "gpt2", n_layer = 2, n_embd = 32, n_head = 2, n_positions = 32 }\n'
ADAPTER = 'adapter = { rank = 4, alpha = 8, target_modules = ["c_attn"] }\n'


def recipe_of(folder: Path, model: str = CONFIG + ADAPTER, *overrides: str, **sections: str) -> Recipe:
    path = write_recipe(folder / "tiny.toml", 'shared = "texts"', model=model, **sections)
    return load_recipe(path, overrides)


def prepared(recipe: Recipe, folder: Path) -> tuple[Any, ObjectStore]:
    objects = ObjectStore(folder / "run" / "objects")
    return prepare(recipe, folder / "run", objects, cache_dir=folder / "cache", tell=lambda _: None), objects


def test_the_plan_is_of_adapters_and_names_its_base(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    recipe = recipe_of(tmp_path, CONFIG + ADAPTER + 'base = "int8"')
    plan, objects = prepared(recipe, tmp_path)
    plan = plan.plan
    base = plan.spec.base
    assert base.precision == "int8" and plan.spec.adapter == recipe.model.adapter
    assert next(name for name, _ in plan.spec.layout) == "transformer.h.0.attn.c_attn.lora_A.default.weight"
    assert plan.layout.numel == 2 * 4 * (32 + 96)
    assert {Digest(each.digest) for each in base.objects} <= set(plan.open_objects)
    first = plan.initial()
    assert first.shape == (plan.layout.numel,) and first.any()
    again, _ = prepared(recipe, tmp_path)
    assert again.plan.spec == plan.spec and torch.equal(again.plan.initial(), first)
    objects.remove(Digest(base.objects[0].digest))
    mended, objects = prepared(recipe, tmp_path)
    assert mended.plan.spec == plan.spec and objects.has(Digest(base.objects[0].digest))
    with pytest.raises(RecipeError, match=r'holds a run whose model\.base is "int8" and here it is "bf16"'):
        prepared(recipe_of(tmp_path, CONFIG + ADAPTER + 'base = "bf16"'), tmp_path)


def test_a_sketch_says_what_a_replica_takes(tmp_path: Path) -> None:
    big = CONFIG.replace("n_embd = 32", "n_embd = 512").replace("n_layer = 2", "n_layer = 8")
    sizes: dict[str, int] = {}
    for model in (big, *(f'{big}{ADAPTER}base = "{base}"' for base in ("fp32", "bf16", "int8"))):
        plan = sketch(recipe_of(tmp_path, model))
        name = plan.spec.base.precision if plan.spec.base else "whole"
        sizes[name] = replica_memory(plan.spec, plan.layout.numel, precision="fp32").device_bytes
    num_params = 8 * 12 * 512**2
    assert sizes["whole"] - sizes["fp32"] == pytest.approx(4 * 3 * num_params, rel=0.1)
    assert sizes["fp32"] - sizes["bf16"] == pytest.approx(2 * num_params, rel=0.05)
    assert sizes["bf16"] - sizes["int8"] == pytest.approx(num_params, rel=0.05)


def test_the_shipped_recipe_is_of_the_demos_model(tmp_path: Path) -> None:
    config = gpt2(n_positions=128)
    flat = FlatModel(build(config, seed=1))
    save_model_dir(tmp_path / "model", config, flat.params(), flat.layout, save_tokenizer(tmp_path / "tok"), {})
    plan = sketch(load_recipe("private-adapters", [f"model.path={tmp_path / 'model'}"]))
    assert load_recipe("private-adapters").model.path == "runs/demo/model"
    assert plan.spec.data_access == "private" and plan.spec.base is not None
    assert 0 < plan.layout.numel < 0.5 * flat.layout.numel


@pytest.mark.parametrize(
    ("model", "sections", "words"),
    [
        (CONFIG + 'base = "bf16"', {}, 'base = "bf16"` is of a frozen model; give `adapter` too'),
        (CONFIG + "adapter = { rank = 4 }", {}, r"model\.adapter\.target_modules is missing"),
        (CONFIG + "adapter = { rank = 0, target_modules = ['c_attn'] }", {}, r"model\.adapter\.rank is 0 and must be"),
        (CONFIG + "adapter = { r = 4, target_modules = ['c_attn'] }", {}, r"model\.adapter\.r is not a key"),
        (CONFIG + "adapter = { ranks = 4, target_modules = ['c_attn'] }", {}, r"did you mean model\.adapter\.rank\?"),
        (CONFIG + "adapter = { target_modules = ['q_proj'] }", {}, "linear layers are c_attn, c_proj, c_fc"),
        (CONFIG + ADAPTER, {"strategy": 'name = "sub_gemm"'}, "trains all weights of a model; remove model.adapter"),
        (
            CONFIG + ADAPTER,
            {"strategy": 'name = "diloco"\ninner = { weights = "bf16", optimizer = "adafactor" }'},
            r'strategy\.inner\.weights is "bf16" and adapters are trained in fp32',
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    model: str, sections: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises((RecipeError, ModelError), match=words):
        sketch(recipe_of(tmp_path, model, **sections))


def test_a_run_leaves_adapters_and_two_workers_of_a_machine_one_base(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    build(llama(vocab_size=512), seed=4).save_pretrained(tmp_path / "stored")  # pyright: ignore[reportCallIssue]
    model = f'path = "{tmp_path / "stored"}"\nbase = "bf16"\n' + ADAPTER.replace("c_attn", "q_proj")
    recipe = recipe_of(tmp_path, model)
    events: list[Event] = []

    async def main() -> RunResult:
        working: list[asyncio.Task[str]] = []

        def listening(run: Listening) -> None:
            for name in ("anna", "bert"):
                options = JoinOptions(
                    link=run.join_line, state_dir=tmp_path / name, name=name, num_threads=1,
                    base_share_dir=tmp_path / "shared",
                )  # fmt: skip
                working.append(asyncio.create_task(work(options, told=lambda _: None)))

        options = HostOptions(recipe=recipe, run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
        result = await serve(options, on_event=events.append, on_listening=listening)
        await asyncio.gather(*working)
        return result

    result = asyncio.run(main())
    assert result.rounds == 4 and result.num_parameters == 2 * 4 * (32 + 32)
    (held,) = json.loads((tmp_path / "run" / "prepared.json").read_text())["base"]["objects"]
    copies = list(tmp_path.glob(f"*/runs/*/objects/{held['digest'].replace(':', '-')}"))
    copies = [path for path in copies if "run" not in path.relative_to(tmp_path).parts[0]]
    assert len(copies) == 2 and len({os.stat(path).st_ino for path in copies}) == 1
    settings = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "stored")
    assert not (tmp_path / "run" / "base").exists()
    merge(tmp_path / "run", tmp_path / "merged")
    with pytest.raises(PotluckError, match="exists; give a folder that does not"):
        merge(tmp_path / "run", tmp_path / "merged")
    plain, merged = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).model.layers[0].self_attn.q_proj.weight
        for name in ("stored", "merged")
    )
    assert 1e-4 < (plain - merged).abs().max() < 0.1
    texts = [generate(tmp_path / name, "ka", max_new_tokens=4, device="cpu") for name in ("run/model", "merged")]
    assert all(text.startswith("ka") for text in texts)
