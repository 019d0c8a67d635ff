"""The frozen base below adapters: written once on the coordinator, mapped on every machine.

    fp32    all as it is
    bf16    matrices of embeddings and linear layers in bf16, the rest in fp32
    int8    matrices of linear layers but the head as int8, with `NAME_scale` for each output; the rest as in bf16

It is objects of the run: safetensors files of bounded size, so that a broken transfer costs little. Names are those of
the model without adapters, and in fp32 and bf16 the files are what `from_pretrained` reads. Whoever maps them shares
their pages with every other process of the machine that does, so a second worker costs no second base.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from potluck.models.build import build, skeleton, stored_model
from potluck.models.config import BaseFiles, BaseObject, BasePrecision, ModelConfig
from potluck.models.flat import replace_parameters
from potluck.models.held import SCALE, can_hold, dequantised, hold, is_linear, output_axis, quantised
from potluck.models.tensor_file import Stored, file_bytes, write_tensor_file
from potluck.storage.objects import ObjectStore
from potluck.types.errors import ModelError

OBJECT_BYTES = 256 << 20
"""Of an object of the base, unless a single tensor is larger."""
_scale_suffix = SCALE.removeprefix("weight")


def write_base(
    model: ModelConfig, config: dict[str, Any], objects: ObjectStore, *, seed: int, object_bytes: int = OBJECT_BYTES
) -> BaseFiles:
    """Make the base of a run: from the stored weights, or random from `seed`, in the precision `model.base`.

    Blocks. Beside what the weights themselves take where they are random (fp32), one tensor at a time is in memory.
    ModelError if the weights cannot be had or are not finite; ResourceError on a full disk.
    """
    module = skeleton(config)
    kinds = _held_as(module, model.base)
    read, close = _stored_weights(model, config, module) if model.from_weights else _random_weights(config, seed)
    found: list[BaseObject] = []
    try:
        for tensors in _files(module, kinds, object_bytes):
            size = file_bytes(tensors)
            with objects.scratch("base", size) as path:
                write_tensor_file(path, tensors, _values(tensors, read, kinds, module))
                found.append(BaseObject(digest=objects.adopt(path), num_bytes=size))
    finally:
        close()
        gc.collect()
    return BaseFiles(precision=model.base, objects=tuple(found))


def mapped_model(config: dict[str, Any], precision: BasePrecision, paths: Sequence[Path]) -> nn.Module:
    """The model on the CPU with frozen parameters that are mapped from the files of the base. ModelError if the files
    are not the base of this model in this precision: in names, shapes and number formats.
    """
    module = skeleton(config)
    kinds = _held_as(module, precision)
    expected = {tensor.name: tensor for tensor in _stored(module, kinds)}
    values = _mapped(paths, expected)
    owners = _owners(module)
    for name, dtype in kinds.items():
        if dtype != torch.float32:
            for owner in owners[name]:
                if can_hold(owner):  # not twice, where one layer is at two places
                    hold(owner)
        if dtype == torch.int8:
            scale = nn.Parameter(values[name + _scale_suffix], requires_grad=False)
            for owner in owners[name]:
                owner._parameters[SCALE] = scale
    named = dict(module.named_parameters())
    frozen = {id(named[name]): nn.Parameter(values[name], requires_grad=False) for name in kinds}
    replace_parameters(module, frozen)
    return module


def whole_weights(config: dict[str, Any], precision: BasePrecision, paths: Sequence[Path]) -> Callable[[str], Tensor]:
    """Reads a parameter of the base by its name, int8 ones as the fp32 matrix that they stand for. ModelError."""
    module = skeleton(config)
    kinds, owners = _held_as(module, precision), _owners(module)
    values = _mapped(paths, {tensor.name: tensor for tensor in _stored(module, kinds)})

    def read(name: str) -> Tensor:
        if kinds[name] != torch.int8:
            return values[name]
        return dequantised(values[name], values[name + _scale_suffix], output_axis(owners[name][0]))

    return read


def held_bytes(module: nn.Module, precision: BasePrecision) -> int:
    """Bytes of the model's base in that precision. `module` may be a skeleton."""
    return sum(tensor.num_bytes for tensor in _stored(module, _held_as(module, precision)))


# What is held how


def _owners(module: nn.Module) -> dict[str, list[nn.Module]]:
    """By the name of a parameter, the layers that have it: several where it is tied."""
    first: dict[int, str] = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, list[nn.Module]] = {name: [] for name in first.values()}
    for layer in module.modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                found[first[id(parameter)]].append(layer)
    return found


def _held_as(module: nn.Module, precision: BasePrecision) -> dict[str, torch.dtype]:
    """By the name of each parameter, tied ones once, its number format in the base."""
    model: Any = module
    head = model.get_output_embeddings()
    owners = _owners(module)
    kinds: dict[str, torch.dtype] = {}
    for name, parameter in module.named_parameters():
        layers = owners[name]
        is_matrix = parameter.dim() == 2 and name.endswith(".weight") and all(can_hold(layer) for layer in layers)
        kinds[name] = torch.float32
        if is_matrix and precision != "fp32":
            is_inner = all(is_linear(layer) and layer is not head for layer in layers)
            kinds[name] = torch.int8 if precision == "int8" and is_inner else torch.bfloat16
    return kinds


def _stored(module: nn.Module, kinds: dict[str, torch.dtype]) -> list[Stored]:
    """All tensors of the base, in the model's order."""
    owners = _owners(module)
    found: list[Stored] = []
    for name, parameter in module.named_parameters():
        found.append(Stored(name, kinds[name], tuple(parameter.shape)))
        if kinds[name] == torch.int8:
            found.append(Stored(name + _scale_suffix, torch.float32, (parameter.shape[output_axis(owners[name][0])],)))
    return found


def _files(module: nn.Module, kinds: dict[str, torch.dtype], object_bytes: int) -> list[list[Stored]]:
    """Files of at most `object_bytes`, but for a tensor that is larger. A matrix and its scales are in one file, and
    wider numbers come first in each, so that all are aligned.
    """
    files: list[list[Stored]] = [[]]
    size = 0
    for group in _groups(_stored(module, kinds)):
        num_bytes = sum(tensor.num_bytes for tensor in group)
        if files[-1] and size + num_bytes > object_bytes:
            files.append([])
            size = 0
        files[-1] += group
        size += num_bytes
    return [sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize) for tensors in files]


def _groups(tensors: list[Stored]) -> Iterator[list[Stored]]:
    waiting: list[Stored] = []
    for tensor in tensors:
        if waiting and not tensor.name.endswith(SCALE):
            yield waiting
            waiting = []
        waiting.append(tensor)
    yield waiting


def _values(
    tensors: list[Stored], read: Callable[[str], Tensor], kinds: dict[str, torch.dtype], module: nn.Module
) -> Iterator[Tensor]:
    """What a file holds, in its order. int8 matrices are read twice: for their scales, and for themselves."""
    owners = _owners(module)
    for tensor in tensors:
        name = tensor.name.removesuffix(_scale_suffix) if tensor.name not in kinds else tensor.name
        weight = read(name)
        if not torch.isfinite(weight).all():
            raise ModelError(f"the weights of the base hold NaN or infinity in {name}; use other weights")
        if kinds[name] == torch.int8:
            q, scale = quantised(weight, output_axis(owners[name][0]))
            yield q if tensor.name == name else scale
        else:
            yield weight.to(tensor.dtype)


# Where weights come from


def _random_weights(config: dict[str, Any], seed: int) -> tuple[Callable[[str], Tensor], Callable[[], None]]:
    named = {name: p.detach() for name, p in build(config, seed=seed).named_parameters()}
    return named.__getitem__, named.clear


def _stored_weights(
    model: ModelConfig, config: dict[str, Any], module: nn.Module
) -> tuple[Callable[[str], Tensor], Callable[[], None]]:
    """From the model's files, tensor by tensor where their names are the model's; else as transformers loads them."""
    from safetensors import safe_open

    files = sorted(Path(model.path).glob("*.safetensors")) if model.path is not None else []
    where: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                where |= dict.fromkeys(file.keys(), path)
        except Exception as error:  # safetensors raises its own, OSError or ValueError
            raise ModelError(f"the weights {path} cannot be read: {error}; give another model") from error
    names = _names_in_files(module, set(where))
    if names is None:
        named = {name: p.detach() for name, p in stored_model(model, config).named_parameters()}
        return named.__getitem__, named.clear
    shapes = {name: p.shape for name, p in module.named_parameters()}

    def read(name: str) -> Tensor:
        with safe_open(where[names[name]], framework="pt") as file:
            found = file.get_tensor(names[name])
        if found.shape != shapes[name]:
            raise ModelError(
                f"{model.source} has {list(found.shape)} as tensor {name[:200]} and its configuration says "
                f"{list(shapes[name])}; give a whole model directory"
            )
        return found

    return read, lambda: None


def _names_in_files(module: nn.Module, stored: set[str]) -> dict[str, str] | None:
    """What each of the model's parameters is called in its files; None where one cannot be found by name.

    Files of a bare base model leave the prefix out that the language model puts before it.
    """
    prefix = f"{module.base_model_prefix}."
    found: dict[str, str] = {}
    for name, _ in module.named_parameters():
        bare = name.removeprefix(prefix)
        known = name if name in stored else bare if bare in stored else ""
        if not known:
            return None
        found[name] = known
    return found


# Mapping


def _mapped(paths: Sequence[Path], expected: dict[str, Stored]) -> dict[str, Tensor]:
    """The tensors, each a view of its file. ModelError if they are not those that are expected."""
    found: dict[str, Tensor] = {}
    for name, tensor in _tensors(paths):
        want = expected.get(name)
        if want is None or name in found:
            again = "twice" if want is not None else "and the run's model has none of that name"
            raise ModelError(f"the base holds {name[:200]!r} {again}; the coordinator sent another model's base")
        if (tensor.dtype, tuple(tensor.shape)) != (want.dtype, want.shape):
            raise ModelError(
                f"the base holds {tensor.dtype} {list(tensor.shape)} as {name[:200]} and the run's model has "
                f"{want.dtype} {list(want.shape)} there; the coordinator sent another model's base"
            )
        found[name] = tensor
    if missing := [name for name in expected if name not in found]:
        raise ModelError(
            f"the base lacks {len(missing)} of the model's tensors, such as {missing[0]}; the coordinator sent another "
            "model's base"
        )
    return found


def _tensors(paths: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the files: mapped, so none of them takes memory yet."""
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the base's file {path.name[:40]} cannot be read: {error}; fetch it again") from error
