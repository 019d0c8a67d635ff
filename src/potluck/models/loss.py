"""The loss of a causal language model: cross entropy of every next token.

Where the logits of a batch are small, this is `cross_entropy(model(x).logits, y)`, bit for bit what a plain loop has.
Where they are big (vocabulary of 50,000 and more), logits are made, turned into their gradient and dropped for a few
rows at a time, so that memory does not grow with tokens times vocabulary:

    z = h W^T        dz = softmax(z) - onehot(y)        dh = dz W        dW = dz^T h

The matrix products are the ones a plain backward pass does, so this costs no recomputation.

In records with answers only some tokens are to be predicted; the others are stored as complements (data/records.py).
Their logits are not even made where logits are made in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

MAX_WHOLE_BYTES = 64 << 20
"""Logits up to this size (fp32) are held as a whole."""
CHUNK_BYTES = 32 << 20
"""Logits held at a time where they are bigger."""
_ignored = -1


class HeadProducts(Protocol):
    """The products of the loss in chunks. hidden [rows, dim], weight [vocab, dim], grad (of logits) [rows, vocab]."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor: ...

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor: ...

    def add_weight_gradient(self, into: Tensor, grad: Tensor, hidden: Tensor) -> None: ...


def even_rows(num_rows: int, most: int) -> int:
    """Rows of a chunk where as few as can be, of `most` rows, are of about equal size."""
    return -(-num_rows // -(-num_rows // most))


def inputs_of(tokens: Tensor) -> Tensor:
    """What the model is given of tokens, some of which may be complements. integer, of the same shape."""
    return torch.maximum(tokens, ~tokens)


def num_predicted(tokens: Tensor) -> int:
    """How many tokens of these sequences are to be predicted. integer [..., seq_len + 1]"""
    return int((tokens[..., 1:] >= 0).sum())


class NativeHead:
    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden @ weight.T

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def add_weight_gradient(self, into: Tensor, grad: Tensor, hidden: Tensor) -> None:
        if grad.dtype == into.dtype:
            into.addmm_(grad.T, hidden)
        else:
            into += grad.T @ hidden


class TokenLoss:
    """Losses of one model. tokens: int64 [batch, seq_len + 1] on the model's device. `head` multiplies for chunks.

    `marked`: tokens are of records, and complements among them are not predicted.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        vocab_size: int,
        autocast: torch.dtype | None = None,
        max_whole_bytes: int = MAX_WHOLE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        head: HeadProducts | None = None,
        marked: bool = False,
    ) -> None:
        self._marked = marked
        self._module, self._vocab_size, self._autocast = module, vocab_size, autocast
        self._max_whole_bytes = max_whole_bytes
        self._head = head or NativeHead()
        self._chunk_rows = max(1, chunk_bytes // (4 * vocab_size))
        self._splits: bool | None = None  # whether the model is a base with a linear head and nothing more

    def __call__(self, tokens: Tensor, *, divisor: int) -> Tensor:
        """The sum of token losses over `divisor`, to call backward on. Autocast as the precision says."""
        device_type = tokens.device.type
        with torch.autocast(device_type, dtype=self._autocast, enabled=self._autocast is not None):
            return self._loss(tokens, divisor, self._autocast)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """The sum of token losses in fp32, also where training uses autocast; dropout off. fp64, no gradient."""
        training = self._module.training
        self._module.eval()
        try:
            return self._loss(tokens, 1, None).double()
        finally:
            self._module.train(training)

    def of_sequences(self, tokens: Tensor) -> Tensor:
        """The sum of token losses of each sequence, fp32 [batch], to go on from. Autocast as the precision says.

        In chunks, logits are made once more in the backward pass.
        """
        with torch.autocast(tokens.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            inputs, targets = inputs_of(tokens[:, :-1]), tokens[:, 1:].reshape(-1)
            is_predicted = targets >= 0
            if self._is_chunked(inputs):
                hidden, weight = self._hidden(inputs)[is_predicted], _head(self._module).weight
                rows = _RowLosses.apply(
                    hidden, weight, targets[is_predicted], self._chunk_rows, self._autocast, self._head
                )  # fmt: skip
            else:
                logits = self._module(input_ids=inputs, use_cache=False, return_dict=True).logits
                logits = logits.reshape(-1, logits.shape[-1])[is_predicted].float()
                rows = cross_entropy(logits, targets[is_predicted], reduction="none")
            number = torch.arange(len(tokens), device=tokens.device).repeat_interleave(inputs.shape[1])[is_predicted]
            return rows.new_zeros(len(tokens)).index_add(0, number, rows)

    def _is_chunked(self, inputs: Tensor) -> bool:
        return 4 * inputs.numel() * self._vocab_size > self._max_whole_bytes and self.is_split(inputs)

    def _hidden(self, inputs: Tensor) -> Tensor:
        """What the head is given, [tokens, dim]."""
        hidden = _base(self._module)(input_ids=inputs, use_cache=False, return_dict=True)[0]
        return hidden.reshape(-1, hidden.shape[-1])

    def _loss(self, tokens: Tensor, divisor: int, autocast: torch.dtype | None) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
        if self._marked:
            inputs = inputs_of(inputs)
        if self._is_chunked(inputs):
            hidden, weight = self._hidden(inputs), _head(self._module).weight
            if self._marked:
                hidden, targets = hidden[targets >= 0], targets[targets >= 0]
            return _LinearCrossEntropy.apply(hidden, weight, targets, self._chunk_rows, divisor, autocast, self._head)
        logits = self._module(input_ids=inputs, use_cache=False, return_dict=True).logits
        logits = logits.reshape(-1, logits.shape[-1]).float()
        if self._marked:
            targets = targets.clamp(min=_ignored)
        elif divisor == targets.numel():
            return cross_entropy(logits, targets)
        return cross_entropy(logits, targets, ignore_index=_ignored, reduction="sum") / divisor

    def is_split(self, inputs: Tensor) -> bool:
        """Whether head(base(x)) is the whole model: asked once, of the model itself, on two tokens."""
        if self._splits is None:
            self._splits = _splits(self._module, inputs[:1, :2])
        return self._splits


def _base(module: nn.Module) -> Any:
    return module.base_model


def _head(module: nn.Module) -> Any:
    return module.get_output_embeddings()


def _splits(module: nn.Module, inputs: Tensor) -> bool:
    base, head = _base(module), _head(module)
    if base is module or not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            hidden = base(input_ids=inputs, use_cache=False, return_dict=True)[0]
            if hidden.shape[-1] != head.in_features:
                return False
            whole = module(input_ids=inputs, use_cache=False, return_dict=True).logits
            return torch.allclose(head(hidden), whole, rtol=1e-4, atol=1e-5)
    finally:
        module.train(training)


class _RowLosses(torch.autograd.Function):
    """Cross entropy of each row of h W^T: fp32 [rows]. The head is frozen; hidden, weight, targets as below."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, autocast: torch.dtype | None,
        head: HeadProducts,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets)
        ctx.how = (chunk_rows, autocast, head)
        found = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for rows, logits, _ in _RowLosses._chunks(hidden, weight, *ctx.how):
            picked = logits.gather(-1, targets[rows, None]).squeeze(-1)
            found[rows] = logits.logsumexp(dim=-1) - picked
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        found = torch.empty_like(hidden)
        for rows, logits, w in _RowLosses._chunks(hidden, weight, *ctx.how):
            each = logits.softmax(dim=-1)
            each.scatter_add_(-1, targets[rows, None], each.new_full((len(each), 1), -1.0))
            each.mul_(grad[rows, None])
            found[rows] = ctx.how[2].input_gradient(each.to(w.dtype), w).to(found.dtype)
        return found, None, None, None, None, None

    @staticmethod
    def _chunks(
        hidden: Tensor, weight: Tensor, chunk_rows: int, autocast: torch.dtype | None, head: HeadProducts
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their logits in fp32, and the head as it was multiplied."""
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(autocast) if autocast is not None else weight
            even = even_rows(len(hidden), chunk_rows) if len(hidden) else 1
            for start in range(0, len(hidden), even):
                rows = slice(start, start + even)
                yield rows, head.logits(hidden[rows].to(w.dtype), w).float(), w


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of cross entropy of h W^T, over `divisor`; gradients are made in the forward pass.

    hidden [rows, dim], weight [vocab, dim], targets [rows].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, divisor: int,
        autocast: torch.dtype | None, head: HeadProducts,
    ) -> Tensor:  # fmt: skip
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(autocast) if autocast is not None else weight
            grad_hidden = torch.empty_like(hidden) if needs_hidden else None
            grad_weight = torch.zeros_like(weight) if needs_weight else None
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            num_rows = hidden.shape[0]
            even = even_rows(num_rows, chunk_rows) if num_rows else 1
            for start in range(0, num_rows, even):
                rows = slice(start, start + even)
                h, y = hidden[rows].to(w.dtype), targets[rows]
                logits = head.logits(h, w).float()
                log_sum = logits.logsumexp(dim=-1, keepdim=True)
                total += (log_sum.squeeze(-1) - logits.gather(-1, y[:, None]).squeeze(-1)).sum()
                if not (needs_hidden or needs_weight):
                    continue
                grad = logits.sub_(log_sum).exp_()
                grad.scatter_add_(-1, y[:, None], grad.new_full((len(y), 1), -1.0))
                grad = grad.div_(divisor).to(w.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = head.input_gradient(grad, w)
                if grad_weight is not None:
                    head.add_weight_gradient(grad_weight, grad, h)
        ctx.gradients = (grad_hidden, grad_weight)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = tuple(None if g is None else g.mul_(grad_loss) for g in ctx.gradients)
        ctx.gradients = (None, None)
        return (*grads, None, None, None, None, None)
