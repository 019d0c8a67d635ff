"""How much memory training needs on one machine: the answer to *does this model fit here*, before it is built.

Counted in full: parameters, gradients, the optimizer's moments, and what the method keeps from round to round. What
came and what is sent lies in mapped files. Estimated from the shape of a decoder-only transformer is what comes and
goes:

    activations + logits      of one micro-batch; allocators hold on to their blocks when it is over
    and the larger of V d     a second gradient of the embedding: a tied one has the head's already, one of several
                              micro-batches that of those before
    and the optimizer's step  AdamW: root and quotient of the second moment of the largest tensor, in fp32

Attention is assumed not to hold its [tokens, tokens] matrix, as `scaled_dot_product_attention` does not on CPU and
CUDA. The process itself, with its libraries, is there before the model and is not counted.

Below adapters lies a frozen base. It is counted as it is held, mapped or on the device, and has neither gradients nor
moments; what is counted as parameters are the adapters. On a CPU several workers share its pages, and each needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from potluck.types.params import type_bytes

_held_product_bytes = 64 << 20
"""At most: of a matrix of the base in the format of the activations, while it is multiplied."""
_adafactor_step_bytes = 64 << 20
"""At most: four times what it takes in fp32 at once."""


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """What the memory and the time of a decoder-only transformer depend on."""

    num_params: int
    num_layers: int
    hidden_dim: int
    ff_dim: int
    vocab_size: int
    is_gated: bool  # the feed-forward part has three matrices, as in Llama, and not two
    num_heads: int = 1  # of queries; 1 and the two zeros below stand for attention as wide as the model
    num_kv_heads: int = 0  # of keys and values: fewer with grouped queries; 0 for as many
    head_dim: int = 0  # 0 for hidden_dim / num_heads

    @property
    def query_dim(self) -> int:
        """All heads together: n_q d_h."""
        return self.num_heads * (self.head_dim or self.hidden_dim // self.num_heads)

    @property
    def kv_dim(self) -> int:
        """n_kv d_h."""
        return self.query_dim * (self.num_kv_heads or self.num_heads) // self.num_heads

    @staticmethod
    def of(config: Mapping[str, Any], num_params: int) -> ModelDims:
        """From a transformers configuration as JSON values, under any of the usual names."""

        def size(*names: str, default: int) -> int:
            return next((v for name in names if isinstance(v := config.get(name), int) and v > 0), default)

        hidden_dim = size("hidden_size", "n_embd", "d_model", default=768)
        num_heads = size("num_attention_heads", "n_head", "num_heads", default=max(1, hidden_dim // 64))
        is_gated = "intermediate_size" in config and config.get("model_type") not in ("gpt_neox", "opt", "phi")
        return ModelDims(
            num_params=num_params,
            num_layers=size("num_hidden_layers", "n_layer", "num_layers", default=12),
            hidden_dim=hidden_dim,
            ff_dim=size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_dim),
            vocab_size=size("vocab_size", default=50257),
            is_gated=is_gated or config.get("model_type") == "llama",
            num_heads=num_heads,
            num_kv_heads=size("num_key_value_heads", "num_kv_heads", default=num_heads),
            head_dim=size("head_dim", default=hidden_dim // num_heads),
        )


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes at the peak of a round."""

    device_bytes: int  # model, gradients, optimizer, activations, logits
    host_bytes: int  # beside a GPU: the moments, on their way to the disk
    kept_bytes: int = 0  # in main memory, wherever the model is: the method's own vectors


def training_memory(
    dims: ModelDims,
    *,
    batch_size: int,
    seq_len: int,
    optimizer: str,
    precision: str,
    max_logits_bytes: int,
    weights: str = "fp32",
    checkpoints_activations: bool = False,
    kept_vectors: float = 0.0,
    base_bytes: int = 0,
) -> TrainingMemory:
    """The need of one replica. `batch_size` is that of a micro-batch; `max_logits_bytes` bounds logits held at once;
    `kept_vectors` are those of a method (`strategies.strategy.kept_vectors`). With a frozen base of `base_bytes`,
    `dims.num_params` are those of the adapters on it.
    """
    weight_bytes = 2 if weights == "bf16" else type_bytes
    model_bytes = weight_bytes * dims.num_params
    moments_bytes = _moments_bytes(dims, optimizer)
    tokens = batch_size * seq_len
    logits_bytes = 3 * min(type_bytes * tokens * dims.vocab_size, max_logits_bytes)
    is_mixed = precision == "bf16-mixed" and weights == "fp32"
    cast_bytes = model_bytes // 2 if is_mixed else 0  # autocast keeps weights in both formats
    per_layer = kept_bytes(dims, "bf16-mixed" if weights == "bf16" else precision)
    if checkpoints_activations:  # the input of each layer, and all of the one that is computed again
        activation_bytes = int(tokens * (dims.num_layers * type_bytes * dims.hidden_dim + per_layer))
    else:
        activation_bytes = int(tokens * dims.num_layers * per_layer)
    head_bytes = weight_bytes * min(dims.vocab_size * dims.hidden_dim, dims.num_params)
    if base_bytes:
        largest = type_bytes * dims.hidden_dim * max(dims.vocab_size, dims.ff_dim)
        head_bytes = min(largest, _held_product_bytes)
    passing_bytes = activation_bytes + logits_bytes + max(head_bytes, _step_bytes(dims, optimizer))
    return TrainingMemory(
        device_bytes=base_bytes + 2 * model_bytes + moments_bytes + cast_bytes + passing_bytes,
        host_bytes=moments_bytes,
        kept_bytes=int(kept_vectors * type_bytes * dims.num_params),
    )


def _moments_bytes(dims: ModelDims, optimizer: str) -> int:
    """fp32: two moments with AdamW; one with Muon, but two of embedding and head; rows and columns with Adafactor."""
    match optimizer:
        case "adamw":
            return 2 * type_bytes * dims.num_params
        case "muon":
            return type_bytes * (dims.num_params + min(dims.num_params, 2 * dims.vocab_size * dims.hidden_dim))
        case "adafactor":  # 12 is more than the matrices of a layer
            sides = 12 * dims.num_layers * (dims.hidden_dim + dims.ff_dim) + 2 * (dims.vocab_size + dims.hidden_dim)
            return type_bytes * min(dims.num_params, sides)
        case _:
            return 0


def _step_bytes(dims: ModelDims, optimizer: str) -> int:
    """What a step holds in fp32 beside the state: two copies of the largest tensor with AdamW, which Muon has for the
    embedding; one, the decayed gradient, with SGD; of a few rows with Adafactor.
    """
    largest = min(dims.hidden_dim * max(dims.vocab_size, dims.ff_dim), dims.num_params)
    match optimizer:
        case "adamw" | "muon":
            return 2 * type_bytes * largest
        case "adafactor":
            return min(4 * type_bytes * largest, _adafactor_step_bytes)
        case _:
            return type_bytes * largest


def check_fits(need: TrainingMemory, *, device: str, device_free_bytes: int, host_free_bytes: int) -> str:
    """An empty string if it fits, else what is too small: a part of a sentence, with the need and what there is."""
    kept = f", {_gib(need.kept_bytes)} of it for what the method keeps," if need.kept_bytes else ""
    beside = need.host_bytes + need.kept_bytes
    if device.startswith(("cpu", "mps")):
        total = need.device_bytes + (beside if device.startswith("mps") else need.kept_bytes)
        return "" if total <= device_free_bytes else f"needs {_gib(total)}{kept} and {_gib(device_free_bytes)} are free"
    if need.device_bytes > device_free_bytes:
        return f"needs {_gib(need.device_bytes)} on {device} and {_gib(device_free_bytes)} are free there"
    if beside > host_free_bytes:
        return f"needs {_gib(beside)}{kept} of main memory beside {device} and {_gib(host_free_bytes)} are free"
    return ""


def kept_bytes(dims: ModelDims, precision: str) -> float:
    """What one layer keeps for its backward pass, per token. Counted on GPT-2 and Llama of transformers 5.24."""
    if dims.is_gated:  # norms in fp32 with their inputs, q k v before and after rotation; gate, silu, up and product
        elements = 10.5 * dims.hidden_dim + 4.2 * dims.ff_dim
    else:  # GELU is written out in steps and keeps each of them
        elements = 8.5 * dims.hidden_dim + 5.2 * dims.ff_dim
    return elements * (0.7 if precision == "bf16-mixed" else 1.0) * type_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
