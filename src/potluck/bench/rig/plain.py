"""A plain PyTorch loop over whole batches, to hold a run against. Nothing here is Potluck's but the learning rates.

g = grad of mean token loss;  g <- g min(1, clip / |g|);  theta <- adamw(theta, g)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from potluck.optim.inner import InnerConfig, learning_rate


def plain_steps(
    model: Any, batches: Sequence[Tensor], inner: InnerConfig
) -> Iterator[tuple[float, Mapping[str, Tensor]]]:
    """Of each step the loss, and by name the gradients of the *sum* of token losses, before they are clipped.

    batches: integer [num_sequences, seq_len + 1], one for each step; their number is the run's.
    """
    module: nn.Module = model
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps)
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, number / len(batches))
        optimizer.zero_grad()
        logits: Tensor = model(input_ids=batch[:, :-1]).logits
        targets = batch[:, 1:].reshape(-1)
        loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)
        torch.autograd.backward(loss)
        found = {n: len(targets) * p.grad for n, p in module.named_parameters() if p.grad is not None}
        yield loss.item(), found
        if inner.clip:
            nn.utils.clip_grad_norm_(module.parameters(), inner.clip)
        optimizer.step()


def gradient_errors(mine: Tensor, right: Mapping[str, Tensor]) -> dict[str, float]:
    """||mine - right|| / ||right|| by name. mine: flat, in the order of `right`.

    The gradient of GPT-2's key bias is zero but for rounding; its part counts as relative to the whole bias'.
    """
    parts = mine.split([g.numel() for g in right.values()])
    return {
        name: float((part.view_as(g) - g).norm() / g.norm())
        for part, (name, g) in zip(parts, right.items(), strict=True)
    }
