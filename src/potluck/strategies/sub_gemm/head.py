"""The model on the head: it holds parameters, activations and the loss, and its products are computed elsewhere.

    g = sum over micro-batches of d(sum of token losses) / d theta

as `worker.replica.TorchReplica.gradient` computes it, to the order of sums. Memory: parameters and gradient, fp32, once
each, and the activations of one micro-batch; with `checkpointing` those of one layer and a vector for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.models.build import checkpoint_activations, skeleton
from potluck.models.device import choose_precision
from potluck.models.family import has_dropout
from potluck.models.flat import FlatModel
from potluck.models.loss import MAX_WHOLE_BYTES, TokenLoss
from potluck.strategies.replica import Loss
from potluck.strategies.sub_gemm.attention import redirect_attention
from potluck.strategies.sub_gemm.offload import Offload
from potluck.strategies.sub_gemm.product import Multiplier
from potluck.types.errors import DataError, NotFinite
from potluck.types.params import Layout
from potluck.types.vector import Vector

LOGITS_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    batch_size: int  # sequences in a micro-batch
    seq_len: int
    precision: str = "fp32"  # or bf16-mixed
    device: str = "cpu"
    attention: bool = False  # its products are computed elsewhere too
    checkpointing: bool = False  # compute activations twice and keep few
    logits_bytes: int = LOGITS_BYTES  # held at once where the whole is larger than 64 MB; fewer, larger products
    seed: int = 0  # of dropout


class HeadModel:
    """One thread builds and drives it."""

    def __init__(self, model_config: dict[str, Any], layout: Layout, config: HeadConfig) -> None:
        """ModelError if transformers cannot build the model, the layout is another's, or it has no linear layers."""
        self._config = config
        self._flat = FlatModel(skeleton(model_config), layout=layout, device=config.device)
        module: Any = self._flat.module
        self._offload = Offload(module)
        if config.attention:
            redirect_attention(self._offload, module)
        if config.checkpointing:
            checkpoint_activations(module)
        self._loss = TokenLoss(
            module,
            vocab_size=model_config["vocab_size"],
            autocast=choose_precision(config.precision, config.device).autocast,
            max_whole_bytes=min(MAX_WHOLE_BYTES, config.logits_bytes),
            chunk_bytes=config.logits_bytes,
            head=self._offload.head(module.get_output_embeddings()),
        )
        self._has_dropout = has_dropout(model_config)

    @property
    def layout(self) -> Layout:
        return self._flat.layout

    def load(self, theta: Vector | Tensor) -> None:
        """Set every parameter. theta: fp32 [layout.numel], on any device."""
        self._flat.load(theta)

    def gradient(
        self, batches: Iterable[Tensor], *, num_sequences: int, multiplier: Multiplier, step: int = 0
    ) -> tuple[Tensor, Loss]:
        """The gradient of the *sum* of token losses over the next sequences, and the loss.

        Returns fp32 [layout.numel] on the CPU. batches: integer [any, seq_len + 1]. Chance (dropout) is a function of
        the seed and `step`. DataError if the batches end too soon, NotFinite, and whatever `multiplier`
        raises; then nothing of the step is left.
        """
        tokens = self._taken(batches, num_sequences)
        self._loss.is_split(tokens[:1, :2])  # asked of the model here, not of devices in the first product
        summed = torch.zeros_like(self._flat.vector)
        for parameter, view in zip(self._flat.parameters, self._flat.views(summed), strict=True):
            parameter.grad = view

        loss_sum = 0.0
        try:
            for index, batch in enumerate(tokens.split(self._config.batch_size)):
                with (
                    self._offload.multiplying(multiplier, micro_batch=index),
                    torch.random.fork_rng(self._rng_devices()),
                ):
                    if self._has_dropout:
                        torch.manual_seed(hash((self._config.seed, step, index)) & (2**63 - 1))
                    loss = self._loss(batch, divisor=1)
                    loss.backward()
                loss_sum += float(loss.detach())
        finally:
            self._flat.clear_gradients()
        _check_finite(loss_sum, summed)
        return summed.cpu(), Loss(loss_sum, num_sequences * self._config.seq_len)

    def evaluate(self, tokens: Tensor) -> Loss:
        """Loss over whole sequences, computed here. tokens: integer [num_sequences, seq_len + 1]."""
        loss_sum = 0.0
        for batch in tokens.split(self._config.batch_size):
            loss_sum += float(self._loss.evaluate(batch.to(self._flat.device, torch.int64)))
        return Loss(loss_sum, tokens.shape[0] * (tokens.shape[1] - 1))

    def _taken(self, batches: Iterable[Tensor], num_sequences: int) -> Tensor:
        """int64 [num_sequences, seq_len + 1] on the model's device."""
        taken: list[Tensor] = []
        missing = num_sequences
        for batch in batches:
            if batch.dim() != 2 or batch.shape[1] != self._config.seq_len + 1:
                raise DataError(
                    f"a batch is {list(batch.shape)} and must be [any, {self._config.seq_len + 1}]; check the data"
                )
            taken.append(batch[:missing].to(self._flat.device, torch.int64))
            missing -= len(taken[-1])
            if not missing:
                return torch.cat(taken)
        raise DataError(
            f"the step's data ended {missing} sequences short of the {num_sequences} it needs; check the data"
        )

    def _rng_devices(self) -> list[torch.device]:
        return [self._flat.device] if self._flat.device.type == "cuda" else []


def _check_finite(loss_sum: float, gradient: Tensor) -> None:
    size = float(sum(torch.aminmax(gradient)))
    if not (math.isfinite(loss_sum) and math.isfinite(size)):
        what = f"the loss is {loss_sum}" if not math.isfinite(loss_sum) else "the gradient holds NaN or infinity"
        raise NotFinite(
            f"{what}, and training cannot go on from there; lower strategy.inner.lr or raise strategy.inner.warmup"
        )
