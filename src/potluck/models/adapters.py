"""LoRA adapters on a frozen model: what is trained where `model.adapter` is given.

    y = W0 x + s B A x        A [rank, inputs], B [outputs, rank], s = alpha / rank, or alpha / sqrt(rank) (rsLoRA)

Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732. PEFT puts the layers in; from then on A and B
are all that is trainable, and the model's flat vector, its optimizer and its updates are of them alone. A begins as
PEFT begins it (Kaiming uniform, a = sqrt 5), from the run's seed on the CPU; B begins as zero.

Where workers have unequal ranks, factors are cut into blocks of components, each a PEFT adapter of its own: a worker of
rank r has the blocks below r, whole tensors of the layout, and zeros in the others. Where a method merges adapters into
the base, that change is a matrix of its own beside the frozen one, which no step trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from potluck.lora.factors import drawn
from potluck.lora.places import A_MARK, adapted_layers
from potluck.models.build import skeleton
from potluck.models.config import AdapterConfig
from potluck.models.held import is_linear
from potluck.types.errors import ModelError
from potluck.types.params import Layout

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_NAME = "default"
MAX_NAMED = 20


def adapted_skeleton(config: dict[str, Any], adapter: AdapterConfig, *, merges: bool = False) -> nn.Module:
    """The model with adapters, all parameters on `meta`; only those of the adapters are trainable. ModelError."""
    return inject(skeleton(config), adapter, merges=merges)


def inject(module: nn.Module, adapter: AdapterConfig, *, merges: bool = False) -> nn.Module:
    """Put adapters into the model, their parameters on `meta`, and freeze all others. ModelError for wrong targets.

    With `merges` each adapted layer has a matrix for what was merged.
    """
    from peft import LoraModel

    targets = target_layers(module, adapter)
    is_transposed = not any(isinstance(layer, nn.Linear) for layer in targets.values())
    was_training = module.training
    configs = {
        name: lora_config(adapter.model_copy(update={"rank": num, "lower_ranks": ()}), is_transposed=is_transposed)
        for name, num in blocks(adapter.ranks).items()
    }
    tuner = LoraModel(module, {ADAPTER_NAME: configs[ADAPTER_NAME]}, ADAPTER_NAME, low_cpu_mem_usage=True)
    for name in list(configs)[1:]:
        tuner.peft_config[name] = configs[name]
        tuner.inject_adapter(module, name, low_cpu_mem_usage=True)
    for layer in lora_layers(module):
        layer.set_adapter(list(configs))
        if merges:
            layer.base_layer = Merged(layer.base_layer, layer.out_features, layer.in_features)
    set_scale(module, adapter.scaling)
    return module.train(was_training)


class Merged(nn.Module):
    """y = W0 x + M x: a frozen layer with what was merged into it. M [outputs, inputs], on `meta`."""

    def __init__(self, layer: nn.Module, outputs: int, inputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.merged = nn.Parameter(torch.empty(outputs, inputs, device="meta"))
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + linear(x, self.merged) if self.is_used else y


def lora_layers(module: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)]


def set_scale(module: nn.Module, scale: float) -> None:
    """s of all adapters in the model."""
    for layer in lora_layers(module):
        layer.scaling = dict.fromkeys(layer.scaling, scale)


def blocks(ranks: Sequence[int]) -> dict[str, int]:
    """The adapters that components are cut into, by name, and how many components each has."""
    return {f"above_{low}" if low else ADAPTER_NAME: high - low for low, high in pairwise((0, *ranks))}


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
            drawn(view, generator)
    return vector


def peft_name(name: str) -> str:
    """What an adapter's tensor is called in a PEFT directory."""
    return "base_model.model." + name.replace(f".{ADAPTER_NAME}.", ".")


def pairs(layout: Layout, vector: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of each adapted layer by the layer's plain name: views of the flat vector, unless they are in blocks."""
    views = {i: vector[spec.offset : spec.stop].view(spec.shape) for i, spec in enumerate(layout)}
    return {name: layer.factors(views) for name, layer in adapted_layers(layout).items()}


def plain(layout: Layout, vector: Tensor) -> tuple[Layout, Tensor]:
    """The same adapters as PEFT has them, both factors whole and nothing else: layout and flat vector."""
    tensors: list[tuple[str, Tensor]] = []
    for name, (a, b) in pairs(layout, vector).items():
        tensors += [(f"{name}.lora_A.{ADAPTER_NAME}.weight", a), (f"{name}.lora_B.{ADAPTER_NAME}.weight", b)]
    return Layout.of([(name, t.shape) for name, t in tensors]), torch.cat([t.reshape(-1) for _, t in tensors])


def _is_a(name: str) -> bool:
    return A_MARK in name


def _kinds(linear: dict[str, nn.Module]) -> str:
    """Their names' last parts, each once."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    more = f" and {len(kinds) - MAX_NAMED} more" if len(kinds) > MAX_NAMED else ""
    return ", ".join(kinds[:MAX_NAMED]) + more
