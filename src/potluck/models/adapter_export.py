"""What a run of adapters leaves: a PEFT directory; and on request the whole model with the adapters merged into it.

adapter_config.json, adapter_model.safetensors     open with `PeftModel.from_pretrained(base, folder)`
tokenizer.json, ..., README.md                     as beside any model

W = W0 + s B A                                     merged, in fp32, one tensor after another
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.lora.factors import Factors
from potluck.lora.places import adapted_layers
from potluck.lora.svd import left_out, principal
from potluck.models.adapters import ADAPTER_NAME, lora_config, pairs, peft_name, plain, target_layers
from potluck.models.base import whole_weights
from potluck.models.build import skeleton
from potluck.models.config import AdapterConfig, BasePrecision
from potluck.models.export import model_card, whole_folder, write_config, write_safetensors, write_surroundings
from potluck.models.flat import layout_of
from potluck.models.held import output_axis
from potluck.models.tensor_file import Stored, write_tensor_file
from potluck.types.errors import ModelError
from potluck.types.params import Layout

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
WEIGHT = ".weight"
MAX_LEFT_OUT = 1e-3
"""Of a layer's change, where adapters of a limited rank stand for it."""


def save_adapter_dir(
    path: Path, config_json: dict[str, Any], adapter: AdapterConfig, vector: Tensor, layout: Layout,
    tokenizer_dir: Path | None, card: Mapping[str, Any], *, base_name: str,
) -> None:  # fmt: skip
    """Write the PEFT directory. vector: fp32 [layout.numel], the adapters. `base_name`: a model directory or hub id.

    What was merged into the base goes with the adapters, whose rank grows by it: see `whole_change`.
    """
    adapter, layout, vector, facts = whole_change(adapter, layout, vector)
    module = skeleton(config_json)
    targets = target_layers(module, adapter)
    is_transposed = any(output_axis(layer) == 1 for layer in targets.values())
    settings = lora_config(adapter, is_transposed=is_transposed, base_name=base_name)
    settings.inference_mode = True
    with whole_folder(path) as scratch:
        settings.save_pretrained(str(scratch))
        _sort_targets(scratch / CONFIG_FILE)
        renamed = Layout.of([(peft_name(spec.name), spec.shape) for spec in layout])
        write_safetensors(scratch / WEIGHTS_FILE, vector, renamed)
        write_surroundings(scratch, tokenizer_dir, model_card({**card, **facts}, base_name=base_name))


def whole_change(
    adapter: AdapterConfig, layout: Layout, vector: Tensor
) -> tuple[AdapterConfig, Layout, Tensor, dict[str, Any]]:
    """The run's change of every layer, M + s B A, as adapters of one rank in PEFT's form; then what a card says of it.

    Where nothing is merged they are the run's own. Else the rank is the lowest of r, 2 r, 4 r, ... that leaves out at
    most `MAX_LEFT_OUT` of each layer's change (in the Frobenius norm).
    """
    merged = {name: each.merged for name, each in adapted_layers(layout).items() if each.merged is not None}
    if not merged:
        plain_adapter = adapter.model_copy(update={"lower_ranks": ()})
        return plain_adapter, *plain(layout, vector), {}
    changes: dict[str, tuple[Factors, Tensor]] = {}
    for name, (a, b) in pairs(layout, vector).items():
        spec = layout.tensors[merged[name]]
        change = vector[spec.offset : spec.stop].view(spec.shape).clone()
        Factors(a, b, adapter.scaling).add_to(change)
        changes[name] = principal(change, min(change.shape))
    rank = adapter.rank
    while (lost := max(left_out(values, rank) for _, values in changes.values())) > MAX_LEFT_OUT:
        rank *= 2
    whole = adapter.model_copy(update={"rank": rank, "lower_ranks": ()})
    factors = {name: best.resized(rank, scale=whole.scaling) for name, (best, _) in changes.items()}
    tensors = [
        (f"{name}.lora_{letter}.{ADAPTER_NAME}.weight", tensor)
        for name, each in factors.items() for letter, tensor in (("A", each.a), ("B", each.b))
    ]  # fmt: skip
    found = Layout.of([(name, tensor.shape) for name, tensor in tensors])
    facts = {"rank": f"{rank}, with what rounds merged", "left out of the change": f"{lost:.1e}"}
    return whole, found, torch.cat([tensor.reshape(-1) for _, tensor in tensors]), facts


def save_merged_dir(
    path: Path, config_json: dict[str, Any], base: Sequence[Path], precision: BasePrecision, adapters: Adapters | None,
    tokenizer_dir: Path | None, readme: str,
) -> None:  # fmt: skip
    """Write the whole model in fp32, of the base as it was held, with the adapters or without. ModelError."""
    read = whole_weights(config_json, precision, base)
    module = skeleton(config_json)
    layout = layout_of(module)
    axes = {name: output_axis(layer) for name, layer in module.named_modules()}
    factors = adapters.factors if adapters is not None else {}
    if odd := next((name for name in factors if name not in axes), None):
        raise ModelError(f"the adapters have a layer {odd[:200]} and the model has none; give the run they are of")

    def values() -> Iterator[Tensor]:
        for spec in layout:
            weight = read(spec.name).float()
            layer = spec.name.removesuffix(WEIGHT)
            if adapters is not None and layer in factors:
                a, b = factors[layer]
                change = adapters.scaling * (b @ a)
                weight = weight + (change.T if axes[layer] == 1 else change)
            yield weight

    with whole_folder(path) as scratch:
        write_config(scratch, config_json, layout)
        tensors = [Stored(spec.name, torch.float32, spec.shape) for spec in layout]
        write_tensor_file(scratch / "model.safetensors", tensors, values())
        write_surroundings(scratch, tokenizer_dir, readme)


class Adapters:
    """A PEFT directory's LoRA factors by the plain name of their layer: A [rank, inputs], B [outputs, rank]."""

    def __init__(self, factors: dict[str, tuple[Tensor, Tensor]], scaling: float) -> None:
        self.factors, self.scaling = factors, scaling

    @staticmethod
    def load(folder: Path) -> Adapters:
        """What `save_adapter_dir` wrote. ModelError."""
        from peft import LoraConfig
        from safetensors.torch import load_file

        try:
            tensors, settings = load_file(folder / WEIGHTS_FILE), LoraConfig.from_pretrained(str(folder))
        except Exception as error:  # safetensors raises its own, OSError or ValueError
            raise ModelError(f"{folder / WEIGHTS_FILE} cannot be read: {error}; finish the run first") from error
        prefix = peft_name("")
        named = {
            name.removeprefix(prefix)
            .replace(".lora_A.", f".lora_A.{ADAPTER_NAME}.")
            .replace(".lora_B.", f".lora_B.{ADAPTER_NAME}."): tensor.float()
            for name, tensor in tensors.items()
        }
        layout = Layout.of([(name, tensor.shape) for name, tensor in named.items()])
        scaling = settings.lora_alpha / (settings.r**0.5 if settings.use_rslora else settings.r)
        return Adapters(pairs(layout, torch.cat([tensor.reshape(-1) for tensor in named.values()])), scaling)


def open_adapter_dir(folder: Path) -> Any:
    """The base with the adapters of a PEFT directory on it, for inference. ModelError.

    The base is what the directory names, or the folder `base` beside it, which a run leaves whose base is its own.
    """
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    settings = LoraConfig.from_pretrained(str(folder))
    named, beside = settings.base_model_name_or_path or "", folder.parent / "base"
    source = str(beside) if beside.is_dir() and not Path(named).is_dir() else named
    if not source:
        raise ModelError(f"{folder} holds adapters and names no base; set base_model_name_or_path in {CONFIG_FILE}")
    model = AutoModelForCausalLM.from_pretrained(
        source, local_files_only=Path(source).is_dir(), trust_remote_code=False, use_safetensors=True
    )
    inject_adapter_in_model(settings, model)
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS_FILE))
    return model.eval()


def _sort_targets(path: Path) -> None:
    """PEFT keeps them as a set: without this no two directories would be alike."""
    settings = json.loads(path.read_bytes())
    settings["target_modules"] = sorted(settings["target_modules"])
    path.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
