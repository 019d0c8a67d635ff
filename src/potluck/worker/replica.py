"""A device's copy of the model with its inner optimizer: what task functions call, on PyTorch.

A step does what a plain loop does, in its order: forward, backward, clip, AdamW with decay on matrices only. On a CPU
in fp32 with one micro-batch it gives the plain loop's parameters bit for bit; on CUDA the optimizer is the fused one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from potluck.lora.places import B_MARK
from potluck.models.attention import widen_attention
from potluck.models.build import checkpoint_activations, skeleton
from potluck.models.device import Hardware, choose_precision, this_machine
from potluck.models.family import has_dropout
from potluck.models.flat import FlatModel
from potluck.models.loss import HeadProducts, TokenLoss, num_predicted
from potluck.optim.inner import learning_rate
from potluck.strategies.replica import Kept, Loss, Mailbox, Step, TaskCancelled
from potluck.strategies.run import RunSpec
from potluck.types.errors import CorruptError, DataError, ModelError, NotFinite, Refused
from potluck.types.params import Layout
from potluck.types.vector import Vector
from potluck.worker.inner_optimizer import InnerOptimizer
from potluck.worker.need import fitting_rank, resting_tensors
from potluck.worker.private_training import PrivateTraining
from potluck.worker.steering import Steering

KEPT = "kept."
"""Before the names of the method's own tensors, in the files of a state."""


@dataclass(frozen=True)
class StepInfo:
    """Progress, as `TorchReplica.on_step` reports it after every step. `step` counts since the local state began."""

    step: int
    loss: float
    tokens_per_s: float


class TorchReplica:
    """Implements `strategies.replica.Replica`. One thread builds and drives it; `cancel` may come from any other."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        device: str | torch.device = "cpu",
        num_threads: int | None = None,
        max_memory_bytes: int = 0,
        hardware: Hardware = this_machine,
        now: Callable[[], float] = time.perf_counter,
        base: Sequence[Path] = (),
        private: PrivateTraining | None = None,
    ) -> None:
        """`base` are the files of the run's frozen base, where it has one; `private` takes the steps of a run with
        privacy. ModelError if the run's model cannot be built here or the base is another model's, ResourceError if it
        does not fit.
        """
        assert (private is None) == (spec.privacy is None), "a run with privacy has private steps and no others"
        self.private = private
        if num_threads:
            torch.set_num_threads(num_threads)
        self.device = torch.device(device)
        self.precision = choose_precision(spec.precision, self.device, hardware=hardware)
        self.on_step: Callable[[StepInfo], None] = lambda _: None
        self.on_evaluating: Callable[[], None] = lambda: None  # hears once of each model that a task evaluates
        self._is_announced = False
        self._inner, self._seq_len, self._seed, self._now = spec.inner, spec.seq_len, spec.seed, now
        layout, vocab_size = read_shape(spec)
        self.adapter_rank = fitting_rank(
            spec, layout, self.device, self.precision.name, max_memory_bytes=max_memory_bytes, hardware=hardware
        )
        is_bf16 = spec.inner.weights == "bf16"
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        resting = resting_tensors(layout, self.adapter_rank)
        self._flat = FlatModel(_module(spec, base), layout=layout, device=self.device, dtype=dtype, resting=resting)
        if spec.inner.checkpoint_activations:
            checkpoint_activations(self._flat.module)
        autocast = None if is_bf16 else self.precision.autocast
        if self.device.type == "cpu" and (is_bf16 or autocast is not None):
            widen_attention(self._flat.module)
        head, marked = _head_products(spec, autocast), spec.rows_per_record > 0
        self._loss = TokenLoss(
            self._flat.module, vocab_size=vocab_size, autocast=autocast, marked=marked, head=head
        )  # fmt: skip
        self._loaded: Vector | None = None  # where weights are rounded: what they were rounded from
        self._has_dropout = has_dropout(spec.model_config_json)
        self._optimizer = InnerOptimizer(self._flat, spec.inner)
        self.kept = Kept(layout.numel)
        self._num_steps = 0
        self._adapter, self._rank = spec.adapter, 0
        self._takes_pairs, self._beta = spec.rows_per_record == 2, 0.0
        self._source: Iterator[Tensor] = iter(())
        self._left_over: Tensor | None = None
        self._mailbox: Mailbox | None = None
        self._steering: Steering | None = None
        self._cancelled = threading.Event()
        self._is_cut_short: Callable[[], bool] = lambda: False

    @property
    def layout(self) -> Layout:
        return self._flat.layout

    @property
    def weights(self) -> Tensor:
        return self._flat.vector

    @property
    def module(self) -> nn.Module:
        """The transformers model; its parameters are the replica's."""
        return self._flat.module

    @property
    def mailbox(self) -> Mailbox:
        assert self._mailbox is not None, "only a session has a mailbox"
        return self._mailbox

    @mailbox.setter
    def mailbox(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    # What the runner does around a task

    def feed(self, source: Iterable[Tensor], is_cut_short: Callable[[], bool] = lambda: False) -> None:
        """The data of the next task: integer [at most batch_size, seq_len + 1]. Forgets an earlier `cancel`.

        `is_cut_short` is asked after each step whether the task should end early.
        """
        self._source, self._left_over, self._is_cut_short = iter(source), None, is_cut_short
        self._steering = self._loaded = None
        self._is_announced = False
        self._beta = 0.0
        self.train_only(())
        self.use_rank(0)
        self._cancelled.clear()

    def cancel(self) -> None:
        """From any thread: the running task raises TaskCancelled at its next micro-batch."""
        self._cancelled.set()

    def local_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The inner optimizer's state: tensors on the CPU and JSON values, enough to go on bit for bit.

        On a CPU the tensors are the live ones, which saves a copy of twice the model: write them before the next step.
        """
        return {**self._optimizer.tensors(), **self._kept_tensors()}, {"num_steps": self._num_steps}

    def _kept_tensors(self) -> dict[str, Tensor]:
        return {KEPT + name: tensor for name, tensor in self.kept.tensors().items()}

    def restore_local_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Go on from what `local_state` gave. CorruptError if it is not of this model and optimizer."""
        num_steps = scalars.get("num_steps")
        if not isinstance(num_steps, int) or num_steps < 0:
            raise CorruptError(
                f"the inner state counts {num_steps!r} steps, which is no number of steps; start it afresh"
            )
        kept = {name.removeprefix(KEPT): t for name, t in tensors.items() if name.startswith(KEPT)}
        if odd := [n for n, t in kept.items() if t.dtype != torch.float32 or t.shape != (self.layout.numel,)]:
            raise CorruptError(f"{odd[0][:50]} of the worker's state is not of the model's size; start it afresh")
        self._optimizer.restore({name: t for name, t in tensors.items() if not name.startswith(KEPT)})
        self.kept.restore(kept)
        self._num_steps = num_steps

    def whole_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What steps change: the inner optimizer's state, and the parameters under "params"."""
        tensors, scalars = self._optimizer.tensors(), {"num_steps": self._num_steps}
        return {**tensors, "params": self._flat.vector.cpu()}, scalars

    def restore_whole_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Go on from what `whole_state` gave. CorruptError, and nothing has changed, if it is not of this model."""
        inner = {**tensors, **self._kept_tensors()}
        params = inner.pop("params", torch.empty(0))
        if params.dtype != self._flat.vector.dtype or list(params.shape) != [self.layout.numel]:
            raise CorruptError(
                f"the state holds {params.dtype} {list(params.shape)} as parameters and the model has "
                f"{self.layout.numel} of {self._flat.vector.dtype}"
            )
        self.restore_local_state(inner, scalars)
        self._flat.load(params)

    def reset_local_state(self) -> None:
        """As before the first step."""
        self._optimizer.reset()
        self.kept.restore({})
        self._num_steps = 0

    # What task functions call

    @property
    def is_cut_short(self) -> bool:
        return self._is_cut_short() or (self.private is not None and self.private.is_spent)

    @property
    def epsilon(self) -> float | None:
        return None if self.private is None else self.private.epsilon

    def first(self) -> Vector:
        from potluck.models.adapters import initial_adapters

        return Vector.of(initial_adapters(self.layout, seed=self._seed))

    def load(self, theta: Vector | Tensor) -> None:
        self.begins_from(theta)
        self._flat.load(theta)
        self._is_announced = False

    def begins_from(self, theta: Vector | Tensor) -> None:
        """What the parameters were before the steps that they have had, where they are not loaded from it."""
        self._loaded = None if self._flat.vector.dtype == torch.float32 else Vector.of(theta)

    def params(self) -> Vector:
        """Rounded weights with what was lost of theta when it was rounded: so a difference to it is of steps alone."""
        now, loaded, dtype = Vector.of(self._flat.vector), self._loaded, self._flat.vector.dtype
        if loaded is None:
            return now

        def read(start: int, stop: int) -> Tensor:
            whole = loaded.read(start, stop)
            return now.read(start, stop) + (whole - whole.to(dtype).float())

        return Vector(now.numel, read)

    def steer(
        self, *, anchor: Vector | None = None, pull: float = 0.0, shift: Vector | None = None,
        pressed: Sequence[tuple[int, int]] = (), press: float = 0.0,
    ) -> None:  # fmt: skip
        self._steering = Steering(self._flat, anchor=anchor, pull=pull, shift=shift, pressed=pressed, press=press)

    def train_only(self, part: Sequence[int]) -> None:
        self._flat.train_only(part)

    def use_rank(self, rank: int) -> None:
        if self._adapter is None or rank == self._rank:
            return
        if rank not in (0, *self._adapter.ranks):
            raise Refused(
                f"the coordinator asks for adapters of rank {rank} and the run has them of rank "
                f"{', '.join(map(str, self._adapter.ranks))}; check its version"
            )
        from potluck.models.adapters import set_scale

        set_scale(self._flat.module, self._adapter.scale_of(rank or self._adapter.rank))
        self._rank = rank

    def prefer(self, *, beta: float) -> None:
        self._beta = beta

    def forget_moments(self) -> None:
        self._optimizer.reset()

    def batches(self) -> Iterator[Tensor]:
        self._require_public("records")
        for tokens in self._source:
            self._stop_if_cancelled()
            yield tokens

    def train_step(self, *, progress: float) -> Step:
        if self.private is not None:
            return self._private_step(self.private, progress=progress)
        started = self._now()
        batches = self._micro_batches()
        num_tokens = sum(map(num_predicted, batches))
        _check_predicted(num_tokens)
        lr = learning_rate(self._inner, progress)
        divisor = sum(map(len, batches)) if self._takes_pairs else num_tokens
        loss = self._backward(batches, divisor=divisor)
        if self._steering is not None:
            self._steering.before_clipping()
        norm = self._optimizer.clip(self._inner.clip)
        self._check_finite(loss, float(norm), lr)
        if self._steering is not None:
            self._steering.after_clipping()
        self._optimizer.step(lr, seed=self._chance(*(int(batch.sum()) for batch in batches)))
        self._flat.clear_gradients()
        self._stepped(loss, num_tokens, started)
        return Step(loss, num_tokens)

    def _private_step(self, private: PrivateTraining, *, progress: float) -> Step:
        """As a step, but for what tells of records: `inner.clip` is that of each record, and no loss is looked at."""
        started = self._now()
        self._stop_if_cancelled()
        private.require_counted(self._num_steps)
        sample = next(self._source, None)
        if sample is None:
            raise DataError("a private step needs records of this machine's own and was given none; check the recipe")
        factors = self._factors_trained()
        batches = [part for part in sample.split(self._inner.batch_size) if len(part)]
        gradients = private.gradients(list(factors.values()), batches, self._record_losses)
        for i, gradient in zip(factors, gradients, strict=True):
            self._flat.parameters[i].grad = gradient.to(self.device)
        if self._steering is not None:
            self._steering.before_clipping()
            self._steering.after_clipping()
        self._optimizer.step(learning_rate(self._inner, progress), seed=self._chance())
        self._flat.clear_gradients()
        step = Step(math.nan, self._inner.sequences_per_step * self._seq_len)
        self._stepped(step.loss, step.num_tokens, started)
        return step

    def _factors_trained(self) -> dict[int, nn.Linear]:
        """The layers that hold what is trained in this task, by its places. Refused if that is not B alone."""
        trained = [i for i, parameter in enumerate(self._flat.parameters) if parameter.requires_grad]
        names = {i: self.layout.tensors[i].name for i in trained}
        found: dict[int, nn.Linear] = {}
        for i, name in names.items():
            layer = self._flat.module.get_submodule(name.rpartition(".")[0])
            if B_MARK not in name or not isinstance(layer, nn.Linear):
                raise Refused(
                    f"a private step was to train {name[:200]}, and it trains the factors B of adapters only; use "
                    'strategy.rule = "ffa"'
                )
            found[i] = layer
        return found

    def _record_losses(self, batch: Tensor) -> Tensor:
        """Of each record the mean over its tokens that are predicted: fp32 [records]."""
        self._stop_if_cancelled()
        if self._has_dropout:
            assert self.private is not None
            torch.manual_seed(self.private.fresh_seed())
        given = self._on_device(batch)
        return self._loss.of_sequences(given) / (given[:, 1:] >= 0).sum(dim=1).clamp(min=1)

    def _require_public(self, what: str) -> None:
        if self.private is not None:
            raise Refused(f"the run trains with differential privacy, so that this worker gives no {what} to a task")

    def gradient(self, *, num_sequences: int) -> tuple[Tensor, Loss]:
        self._require_public("gradients without noise")
        started = self._now()
        loss_sum, num_tokens, missing = 0.0, 0, num_sequences
        self._flat.clear_gradients()
        while missing:
            batch = self._next(missing)
            if batch is None:
                raise DataError(
                    f"the task's data ended {missing} sequences short of the {num_sequences} it needs; check the data"
                )
            missing -= len(batch)
            num_tokens += num_predicted(batch)
            loss_sum += self._backward([batch], divisor=1)
        _check_predicted(num_tokens)
        summed = self._flat.gradient()
        self._flat.clear_gradients()
        self._check_finite(loss_sum, float(sum(torch.aminmax(summed))), None)
        self._stepped(loss_sum / num_tokens, num_tokens, started)
        return summed, Loss(loss_sum, num_tokens)

    def evaluate(self, tokens: Tensor) -> Loss:
        self._require_public("losses")
        if not self._is_announced:
            self._is_announced = True
            self.on_evaluating()
        loss_sum = 0.0
        for batch in tokens.split(self._inner.batch_size):
            self._stop_if_cancelled()
            given = self._on_device(batch)
            loss_sum += self._evaluate_pairs(given) if self._takes_pairs else float(self._loss.evaluate(given))
        return Loss(loss_sum, num_predicted(tokens))

    @torch.no_grad()
    def sequence_losses(self, rows: Tensor) -> list[float]:
        """Of each row, or pair, the loss summed over what is predicted, without dropout. Not for tasks.

        rows: int64 [batch, length], of pairs [batch, 2, length]; tokens that are not predicted are complements.
        """
        self._stop_if_cancelled()
        given = self._on_device(rows)
        with _evaluating(self._flat.module):
            return (self._pair_losses(given) if self._takes_pairs else self._loss.of_sequences(given)).tolist()

    # How

    def _backward(self, batches: list[Tensor], *, divisor: int) -> float:
        """Add the gradient of the sum of token losses over `divisor`; that loss."""
        losses: list[Tensor] = []
        for index, batch in enumerate(batches):
            self._stop_if_cancelled()
            if self._has_dropout:
                torch.manual_seed(self._chance(index, int(batch.sum())))
            loss = self._loss_of(self._on_device(batch), divisor=divisor)
            loss.backward()
            losses.append(loss.detach())
        return float(losses[0] if len(losses) == 1 else torch.stack(losses).sum())

    def _loss_of(self, batch: Tensor, *, divisor: int) -> Tensor:
        if self._takes_pairs:
            return self._pair_losses(batch).sum() / divisor
        return self._loss(batch, divisor=divisor)

    def _pair_losses(self, pairs: Tensor) -> Tensor:
        from potluck.models.preference import pair_losses

        if not self._beta:
            raise DataError("the run's data is pairs of answers and this task trains on single ones; check the recipe")
        return pair_losses(self._loss, self._flat.module, pairs, beta=self._beta)

    @torch.no_grad()
    def _evaluate_pairs(self, pairs: Tensor) -> float:
        with _evaluating(self._flat.module):
            num_tokens = (pairs[..., 1:] >= 0).sum(dim=(1, 2))
            return float((self._pair_losses(pairs).double() * num_tokens).sum())

    def _chance(self, *of: int) -> int:
        """A seed: a function of the run, the step and its data, of which nothing needs to be kept."""
        return hash((self._seed, self._num_steps, *of)) & (2**63 - 1)

    def _micro_batches(self) -> list[Tensor]:
        """The micro-batches of one step: fewer than `accumulation` only where the task's data ends."""
        batches: list[Tensor] = []
        for _ in range(self._inner.accumulation):
            batch = self._next(self._inner.batch_size)
            if batch is not None:
                batches.append(batch)
        if not batches:
            raise DataError("the task's data ended before its steps did; deal it more sequences or ask for fewer steps")
        return batches

    @property
    def num_left_over(self) -> int:
        """Sequences that were read and not used yet."""
        return 0 if self._left_over is None else len(self._left_over)

    def _next(self, limit: int) -> Tensor | None:
        """At most `limit` sequences that were not read before; None where the data ended."""
        batch = self._left_over if self._left_over is not None else next(self._source, None)
        self._left_over = None
        if batch is None:
            return None
        shape = [2, self._seq_len + 1] if self._takes_pairs else [self._seq_len + 1]
        if list(batch.shape[1:]) != shape or not len(batch):
            wanted = ", ".join(map(str, ["any", *shape]))
            raise DataError(f"a batch is {list(batch.shape)} and must be [{wanted}]; check the data")
        if len(batch) > limit:
            batch, self._left_over = batch[:limit], batch[limit:]
        return batch

    def _on_device(self, batch: Tensor) -> Tensor:
        return batch.to(device=self.device, dtype=torch.int64)

    def _stop_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            self._flat.clear_gradients()
            raise TaskCancelled

    def _check_finite(self, loss: float, norm: float, lr: float | None) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self._flat.clear_gradients()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        at = f" with learning rate {lr:.2e}" if lr is not None else ""
        raise NotFinite(
            f"{what} at inner step {self._num_steps + 1}{at}, and training cannot go on from there; lower "
            "strategy.inner.lr or raise strategy.inner.warmup"
        )

    def _stepped(self, loss: float, num_tokens: int, started: float) -> None:
        self._num_steps += 1
        self.on_step(StepInfo(self._num_steps, loss, num_tokens / max(self._now() - started, 1e-9)))


def read_shape(spec: RunSpec) -> tuple[Layout, int]:
    """Layout and size of the vocabulary, as the coordinator sent them. ModelError if they are none."""
    vocab_size = spec.model_config_json.get("vocab_size")
    try:
        layout = Layout.from_json(spec.layout)
    except (AssertionError, TypeError, ValueError) as error:
        raise ModelError(f"the coordinator sent a layout that cannot be read: {error}; check its version") from error
    if not isinstance(vocab_size, int) or vocab_size < 1 or not layout.numel:
        raise ModelError(f"the coordinator sent a model with a vocabulary of {vocab_size!r}; check its version")
    return layout, vocab_size


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def _check_predicted(num_tokens: int) -> None:
    if not num_tokens:
        raise DataError("the data of a step holds no token to predict; check the data")


def _module(spec: RunSpec, base: Sequence[Path]) -> nn.Module:
    """The run's model as it comes before its parameters: all on `meta`, or adapters on a base that is mapped."""
    if spec.adapter is None:
        return skeleton(spec.model_config_json)
    from potluck.models.adapters import inject
    from potluck.models.base import mapped_model

    if spec.base is None or not base:
        raise ModelError("the run trains adapters and its base did not come with it; check the coordinator's version")
    module = mapped_model(spec.model_config_json, spec.base.precision, base)
    return inject(module, spec.adapter, merges=spec.merges_adapters)


def _head_products(spec: RunSpec, autocast: torch.dtype | None) -> HeadProducts | None:
    """How chunks of logits are multiplied where the head is held in another format than they are."""
    if spec.base is None or spec.base.precision == "fp32" or autocast is not None:
        return None
    from potluck.models.held import HeldHead

    return HeldHead()
