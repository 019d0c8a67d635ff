"""LoRA adapters on a frozen model: what is trained where `model.adapter` is given.

    y = W0 x + s B A x        A [rank, inputs], B [outputs, rank], s = alpha / rank, or alpha / sqrt(rank) (rsLoRA)

Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732. PEFT puts the layers in; from then on A and B
are all that is trainable, and the model's flat vector, its optimizer and its updates are of them alone. A begins as
PEFT begins it (Kaiming uniform, a = sqrt 5), from the run's seed on the CPU; B begins as zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from potluck.models.build import skeleton
from potluck.models.config import AdapterConfig
from potluck.models.held import is_linear
from potluck.types.errors import ModelError
from potluck.types.params import Layout

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_NAME = "default"
MAX_NAMED = 20


def adapted_skeleton(config: dict[str, Any], adapter: AdapterConfig) -> nn.Module:
    """The model with adapters, all parameters on `meta`; only those of the adapters are trainable. ModelError."""
    return inject(skeleton(config), adapter)


def inject(module: nn.Module, adapter: AdapterConfig) -> nn.Module:
    """Put adapters into the model, their parameters on `meta`, and freeze all others. ModelError for wrong targets."""
    from peft import inject_adapter_in_model

    targets = target_layers(module, adapter)
    config = lora_config(adapter, is_transposed=not any(isinstance(layer, nn.Linear) for layer in targets.values()))
    was_training = module.training
    adapted = inject_adapter_in_model(config, module, ADAPTER_NAME, low_cpu_mem_usage=True)
    return adapted.train(was_training)


def lora_config(adapter: AdapterConfig, *, is_transposed: bool, base_name: str = "") -> LoraConfig:
    """PEFT's own settings. `is_transposed`: the layers are GPT-2's Conv1D, whose weights are [inputs, outputs]."""
    from peft import LoraConfig

    alpha = int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha
    return LoraConfig(
        r=adapter.rank, lora_alpha=alpha, use_rslora=adapter.rslora, target_modules=list(adapter.target_modules),  # pyright: ignore[reportArgumentType]
        lora_dropout=0.0, bias="none", fan_in_fan_out=is_transposed, task_type="CAUSAL_LM",
        base_model_name_or_path=base_name or None,
    )  # fmt: skip


def target_layers(module: nn.Module, adapter: AdapterConfig) -> dict[str, nn.Module]:
    """The linear layers that get an adapter, by name. ModelError naming those there are if a target is none of them."""
    linear = linear_layers(module)
    found: dict[str, nn.Module] = {}
    for target in adapter.target_modules:
        matched = {n: m for n, m in module.named_modules() if n == target or n.endswith(f".{target}")}
        if odd := next((name for name in matched if name not in linear), None):
            wrong = f"matches {odd}, which is a {type(matched[odd]).__name__}"
        elif not matched:
            wrong = "matches none of them"
        else:
            found |= matched
            continue
        raise ModelError(
            f"model.adapter.target_modules has {target[:100]!r} and it {wrong}; the model's linear layers are "
            f"{_kinds(linear)}"
        )
    if len({isinstance(layer, nn.Linear) for layer in found.values()}) > 1:
        raise ModelError(
            f"model.adapter.target_modules {', '.join(adapter.target_modules)[:200]} are layers of both Linear and "
            "Conv1D, whose weights are stored differently; name layers of one of them"
        )
    return found


def linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """By name, but for the head: what an adapter can sit on."""
    model: Any = module
    head = model.get_output_embeddings()
    return {name: layer for name, layer in module.named_modules() if is_linear(layer) and layer is not head}


def initial_adapters(layout: Layout, *, seed: int) -> Tensor:
    """The run's first adapters, flat fp32 on the CPU: the same for a seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.zeros(layout.numel)
    for spec in layout:
        if _is_a(spec.name):
            view = vector[spec.offset : spec.stop].view(spec.shape)
            nn.init.kaiming_uniform_(view, a=math.sqrt(5), generator=generator)
    return vector


def peft_name(name: str) -> str:
    """What an adapter's tensor is called in a PEFT directory."""
    return "base_model.model." + name.replace(f".{ADAPTER_NAME}.", ".")


def pairs(layout: Layout, vector: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of each adapted layer by the layer's plain name: views of the flat vector."""
    named = {spec.name: vector[spec.offset : spec.stop].view(spec.shape) for spec in layout}
    return {
        name.partition(".lora_A.")[0]: (a, named[name.replace(".lora_A.", ".lora_B.")])
        for name, a in named.items()
        if _is_a(name)
    }


def _is_a(name: str) -> bool:
    return ".lora_A." in name


def _kinds(linear: dict[str, nn.Module]) -> str:
    """Their names' last parts, each once."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    more = f" and {len(kinds) - MAX_NAMED} more" if len(kinds) > MAX_NAMED else ""
    return ", ".join(kinds[:MAX_NAMED]) + more
