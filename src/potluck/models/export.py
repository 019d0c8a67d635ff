"""The model directory a run leaves: opens with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`.

    config.json, generation_config.json     of this transformers version
    model.safetensors                       the flat model as it is: tensors follow each other in the layout's order
    tokenizer.json, ...                     where the run has a tokenizer
    README.md                               the model card with the run's facts

It is written beside its place and then renamed, so a directory of that name is always whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.models.build import skeleton
from potluck.models.flat import layout_of
from potluck.models.tensor_file import Stored, write_tensor_file
from potluck.storage.files import fsync_folder
from potluck.types.disk import full_disk_named
from potluck.types.errors import ModelError, PotluckError, ResourceError
from potluck.types.params import Layout


def save_model_dir(
    path: Path,
    config_json: dict[str, Any],
    vector: Tensor,
    layout: Layout,
    tokenizer_dir: Path | None,
    card: Mapping[str, Any],
) -> None:
    """Write the model. vector: fp32 [layout.numel] on the CPU, never copied. `card` is what the model card tells."""
    if vector.shape != (layout.numel,) or vector.dtype != torch.float32:
        raise ModelError(
            f"the model to save is {vector.dtype} {list(vector.shape)} and its layout needs torch.float32 "
            f"[{layout.numel}]; save the parameters of this run"
        )
    with whole_folder(path) as scratch:
        write_config(scratch, config_json, layout)
        write_safetensors(scratch / "model.safetensors", vector, layout)
        write_surroundings(scratch, tokenizer_dir, model_card(card))


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` at the end of the block, or is gone if that fails.

    ResourceError where it cannot be written.
    """
    scratch, before = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    try:
        with full_disk_named(path):
            for leftover in (scratch, before):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch.mkdir(parents=True)
            yield scratch
            _put_in_place(scratch, path, before)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written ({error}); mend that, or choose another folder") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_targets(*folders: Path | None) -> None:
    """PotluckError unless there is nothing of these names, and none is in another."""
    given = [folder for folder in folders if folder is not None]
    if taken := next((folder for folder in given if os.path.lexists(folder)), None):
        raise PotluckError(f"{taken} exists; give a folder that does not")
    for one, other in permutations(given, 2):
        if one.absolute() in (other.absolute(), *other.absolute().parents):
            raise PotluckError(f"{one} is to hold two models, one of them in {other}; give each a folder of its own")


def write_surroundings(folder: Path, tokenizer_dir: Path | None, readme: str) -> None:
    """What goes with any model: its tokenizer and its card."""
    if tokenizer_dir is not None:
        for file in sorted(tokenizer_dir.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(readme, encoding="utf-8", newline="\n")


def write_safetensors(path: Path, vector: Tensor, layout: Layout) -> None:
    """A flat model as a safetensors file. Synced to the disk."""
    tensors = [Stored(spec.name, torch.float32, spec.shape) for spec in layout]
    write_tensor_file(path, tensors, (vector[spec.offset : spec.stop].view(spec.shape) for spec in layout))


def model_card(card: Mapping[str, Any], *, base_name: str | None = None) -> str:
    """README.md: a YAML header that the hub reads, the run's facts as a table (nested ones flattened), contributors.

    `card["workers"]` are the contributors: each with `id` and `tokens`. With `base_name` it is of adapters on that.
    """
    if base_name is None:
        library, opens = ["library_name: transformers"], "`AutoModelForCausalLM.from_pretrained`."
    else:
        library = ["library_name: peft", *([f"base_model: {json.dumps(base_name)}"] if base_name else [])]
        opens = f"`PeftModel.from_pretrained` on {base_name or 'the model it was trained on'}."
    facts = {name: value for name, value in card.items() if name != "workers"}
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in _flattened("", facts)]
    title = _cell(card.get("name") or card.get("run_id") or "model")
    return "\n".join(
        [
            "---", *library, "pipeline_tag: text-generation", "tags:", "- potluck", "---", "",
            f"# {title}", "",
            "Trained with Potluck across machines that belong to different people. Opens with", opens, "",
            "| fact | value |", "| --- | --- |", *rows, "",
            *_contributors(card.get("workers", ())),
        ]
    )  # fmt: skip


def _contributors(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everybody whose work is in the model, those who gave most first."""
    given = sorted((w for w in workers if w["tokens"]), key=lambda w: (-w["tokens"], w["id"]))
    total = sum(w["tokens"] for w in given)
    rows = [f"| {_cell(w['id'])} | {_cell(w['tokens'])} | {w['tokens'] / total:.1%} |" for w in given]
    if not rows:
        return []
    return ["## Contributors", "", "| member | tokens | share |", "| --- | --- | --- |", *rows, ""]


def write_config(folder: Path, config_json: dict[str, Any], layout: Layout) -> None:
    """config.json and generation_config.json as this version of transformers writes them."""
    model: Any = skeleton(config_json)
    shapes = {spec.name: spec.shape for spec in layout}
    if {spec.name: spec.shape for spec in layout_of(model)} != shapes:
        raise ModelError("the model's configuration builds other tensors than the run has; use one version")
    config = model.config
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", torch.float32)
    config.save_pretrained(str(folder))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))


def _put_in_place(scratch: Path, path: Path, before: Path) -> None:
    if path.exists():
        path.rename(before)
    scratch.rename(path)
    shutil.rmtree(before, ignore_errors=True)
    fsync_folder(path.parent)


def _flattened(prefix: str, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, inner in value.items():
        full = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            found += _flattened(f"{full}.", inner)
        elif isinstance(inner, list | tuple) and inner and all(isinstance(item, Mapping) for item in inner):
            for item in inner:
                found.append((full, ", ".join(f"{k} {v}" for k, v in item.items())))
        elif inner is not None and inner != "":
            found.append((full, inner))
    return found


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    text = f"{value:.6g}" if isinstance(value, float) else text
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
