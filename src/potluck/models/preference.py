"""Direct preference optimisation: of two answers to a prompt, make the chosen one likelier than the rejected.

    L = -log sigma(beta [(log pi(y_w) - log pi_ref(y_w)) - (log pi(y_l) - log pi_ref(y_l))])

Rafailov et al. 2023, arXiv:2305.18290. Log-probabilities are sums over the tokens of answers. The reference is the
frozen base: adapters and what was merged from them are the policy, whatever rounds have made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from potluck.models.adapters import Merged, lora_layers
from potluck.models.loss import TokenLoss


def pair_losses(losses: TokenLoss, module: nn.Module, pairs: Tensor, *, beta: float) -> Tensor:
    """L of each pair, with gradients. pairs: int64 [pairs, 2, seq_len + 1], the chosen answer first."""
    rows = pairs.flatten(0, 1)
    with reference(module), torch.no_grad():
        before = losses.of_sequences(rows).view(-1, 2)
    gained = before - losses.of_sequences(rows).view(-1, 2)
    return -logsigmoid(beta * (gained[:, 0] - gained[:, 1]))


@contextmanager
def reference(module: nn.Module) -> Iterator[None]:
    """The model without its adapters and without dropout."""
    layers, merged = lora_layers(module), [child for child in module.modules() if isinstance(child, Merged)]
    training = module.training
    module.eval()
    _use(layers, merged, is_used=False)
    try:
        yield
    finally:
        _use(layers, merged, is_used=True)
        module.train(training)


def _use(layers: list[nn.Module], merged: list[Merged], *, is_used: bool) -> None:
    for layer in layers:
        layer._disable_adapters = not is_used  # `enable_adapters` would change what is trained too
    for each in merged:
        each.is_used = is_used
