"""Models from configurations: built the quick way where weights will follow, with random or stored weights else.

`trust_remote_code` is never set, no pickle is ever read, and a configuration cannot pick an attention kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from potluck.models.config import ModelConfig
from potluck.models.family import first_sentence, model_config, parsed_config, tokenizer_folder
from potluck.models.flat import FlatModel, layout_of
from potluck.types.errors import ModelError

__all__ = [
    "build",
    "checkpoint_activations",
    "initial_vector",
    "layout_of",
    "model_config",
    "skeleton",
    "stored_model",
    "tokenizer_folder",
]


def build(
    config: dict[str, Any],
    *,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A causal language model of that configuration, in training mode.

    With `seed`, random weights, equal for equal seeds on one version of transformers. Without, all parameters are
    zero: for a model whose weights are loaded next. ModelError if transformers cannot build it.
    """
    if seed is None:
        flat = FlatModel(skeleton(config), device="cpu")
        flat.vector.zero_()
        model = flat.module
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _made(config)
    return model.to(device=device, dtype=dtype).train()


def skeleton(config: dict[str, Any]) -> nn.Module:
    """The model with its parameters on the `meta` device, which takes no memory and no time; buffers are real."""
    with _EmptyIsMeta():
        model = _made(config)
    if any(buffer.is_meta for buffer in model.buffers()):
        model = _made(config)  # a buffer that was made empty and filled: build it the slow way
    return model.train()


def initial_vector(model: ModelConfig, config: dict[str, Any], *, seed: int) -> Tensor:
    """The run's first parameters, flat fp32 on the CPU: random from `seed`, or the stored weights. ModelError."""
    made = stored_model(model, config) if model.from_weights else build(config, seed=seed)
    layout = layout_of(made)
    vector = torch.empty(layout.numel)
    named = dict(made.named_parameters())
    with torch.no_grad():
        for spec in layout:
            vector[spec.offset : spec.stop].view(spec.shape).copy_(named[spec.name])
    if not torch.isfinite(vector).all():
        raise ModelError(f"the weights of {model.source or 'the model'} hold NaN or infinity; use other weights")
    return vector


def checkpoint_activations(module: nn.Module) -> None:
    """From now on keep one vector for each layer and compute its activations a second time. ModelError if it cannot."""
    model: Any = module
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(f"{type(module).__name__} cannot compute its activations twice; turn checkpointing off")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


class _EmptyIsMeta(TorchFunctionMode):
    """In this thread, `torch.empty` allocates nothing: what modules make their parameters with. Nor are they filled."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        elif getattr(func, "__module__", "") == "torch.nn.init":
            tensor = options["tensor"] if "tensor" in options else args[0]
            if tensor.is_meta:  # going through the motions is a tenth of a simulated run
                return tensor
        return func(*args, **options)


def _made(config: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    parsed = parsed_config(config)
    try:
        try:
            return AutoModelForCausalLM.from_config(parsed, attn_implementation="sdpa", trust_remote_code=False)
        except (ValueError, ImportError) as error:
            if "attention" not in str(error):
                raise
            return AutoModelForCausalLM.from_config(parsed, attn_implementation="eager", trust_remote_code=False)
    except Exception as error:  # each family fails in its own way
        raise ModelError(f"the model cannot be built: {first_sentence(error)}; mend its configuration") from error


def stored_model(model: ModelConfig, config: dict[str, Any]) -> nn.Module:
    """The model with its stored weights, fp32 on the CPU. ModelError if they cannot be had or are not all there."""
    from transformers import AutoModelForCausalLM

    source, options = model.source, {"revision": model.revision} if model.revision else {}
    if model.path is not None:
        options["local_files_only"] = True
        if not any(Path(model.path).glob("*.safetensors")):
            raise ModelError(f"{model.path} holds no safetensors and no other weights are read; convert them first")
    try:
        made, info = AutoModelForCausalLM.from_pretrained(
            source, config=parsed_config(config), trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, attn_implementation="sdpa", **_dtype_argument(torch.float32), **options,
        )  # fmt: skip
    except ModelError:
        raise
    except Exception as error:  # each kind of model fails in its own way
        raise ModelError(
            f"the weights of {source} cannot be loaded: {first_sentence(error)}; give another model"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the model's tensors, such as {missing[0]}; give a complete model or "
            'set model.init = "scratch"'
        )
    return made.train()


def _dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """`dtype`, or `torch_dtype` before transformers 4.56."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}
