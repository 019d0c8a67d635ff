"""A model whose parameters are views of one flat vector, in fp32 unless asked otherwise.

Loading the model is then one copy into the vector and reading it one copy out of it, whatever its number of tensors.
A parameter that is used in two places (tied embeddings) is in the vector once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from potluck.types.errors import ModelError
from potluck.types.params import Layout
from potluck.types.vector import Vector


def layout_of(model: nn.Module) -> Layout:
    """The trainable parameters of a model in the order it names them, tied ones once."""
    return Layout.of([(name, p.shape) for name, p in model.named_parameters() if p.requires_grad])


class FlatModel:
    """`module` after its trainable parameters were moved into one vector on `device`. It owns the module from then on.

    Parameters on `meta` become zeros. `layout` gives the order (the run's; the model's own by default): ModelError
    if it does not name the model's parameters and their shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layout: Layout | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        resting: Collection[str] = (),
    ) -> None:
        """`resting` are the tensors, by name, that no step ever trains here."""
        own = layout_of(module)
        self.layout = layout or own
        _check(own, self.layout)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if device is None:
            device = next((p.device for p in named.values() if not p.is_meta), torch.device("cpu"))
        self.device = torch.device(device)
        self.vector = torch.zeros(self.layout.numel, dtype=dtype, device=self.device)
        replaced: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            for spec in self.layout:
                view = self.vector[spec.offset : spec.stop].view(spec.shape)
                old = named[spec.name]
                if not old.is_meta:
                    view.copy_(old)
                replaced[id(old)] = nn.Parameter(view, requires_grad=spec.name not in resting)
        replace_parameters(module, replaced)
        self.module = module.to(self.device)
        self.parameters = [dict(module.named_parameters())[spec.name] for spec in self.layout]
        self.trained = [p for p in self.parameters if p.requires_grad]

    def train_only(self, part: Sequence[int]) -> None:
        """Gradients for these tensors of the layout alone, as far as they are trained at all; () for all of them."""
        chosen = {id(self.parameters[i]) for i in part}
        for parameter in self.trained:
            parameter.requires_grad_(not part or id(parameter) in chosen)

    def load(self, theta: Vector | Tensor) -> None:
        """Set every parameter: one copy, rounded to the nearest where they are not fp32. theta: fp32 [layout.numel], on
        any device.
        """
        given = Vector.of(theta)
        if given.numel != self.layout.numel:
            raise ModelError(
                f"{given.numel} parameters are to be loaded and the model has {self.layout.numel}; "
                "the coordinator runs another model"
            )
        for start, part in given.slices():
            self.vector[start : start + len(part)].copy_(part)

    def params(self) -> Tensor:
        """The parameters: a new fp32 tensor [layout.numel] on the CPU, one copy."""
        return self.vector.to("cpu", torch.float32, copy=True)

    def gradient(self) -> Tensor:
        """The gradients, zero where there are none: a new fp32 tensor [layout.numel] on the CPU, one copy."""
        flat = torch.zeros(self.layout.numel, dtype=torch.float32)
        for spec, parameter in zip(self.layout, self.parameters, strict=True):
            if parameter.grad is not None:
                flat[spec.offset : spec.stop].view(spec.shape).copy_(parameter.grad)
        return flat

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """Slices of a vector of the model's size in the shapes of the parameters, without copying."""
        return [flat[spec.offset : spec.stop].view(spec.shape) for spec in self.layout]


def _check(own: Layout, asked: Layout) -> None:
    have, want = ({spec.name: spec.shape for spec in layout} for layout in (own, asked))
    if have == want and len(asked.tensors) == len(want):
        return
    for name in [*want, *have]:
        if have.get(name) != want.get(name):
            what = [str(list(shapes[name])) if name in shapes else "nothing" for shapes in (want, have)]
            raise ModelError(
                f"the run has {what[0]} as tensor {name[:200]} and this machine's transformers builds {what[1]}; "
                "install the version that the coordinator uses"
            )
    raise ModelError(f"the run names {len(asked.tensors)} tensors and {len(want)} of them once; its layout is broken")


def replace_parameters(module: nn.Module, replaced: dict[int, nn.Parameter]) -> None:
    """Put new parameters in the place of old ones, by their `id`, in every module that holds them."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                child._parameters[name] = replaced[id(parameter)]
