"""Validation: the loss of one model over held-out text, as sums that add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from potluck.strategies.fleet import Fleet, Replies, Reply, WorkerInfo
from potluck.strategies.replica import Loss, Replica
from potluck.strategies.task import BoundTask, Result, task
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Params, Part
from potluck.types.vector import Vector

Pieces = Sequence[tuple[int, ...]]
"""The model in the parts by which it comes to workers, each by its tensors: a part that a worker has does not come."""
whole: Pieces = ((),)


@dataclass(frozen=True, kw_only=True)
class OwnersLoss:
    """Per token, on the text that one worker holds out itself; None where it holds out none, or has no such model."""

    shared: float | None = None  # of the run's model, with what the method has the worker keep of it
    personal: float | None = None  # of the worker's own


@dataclass(frozen=True, kw_only=True)
class OwnersValidation(Loss):
    """Over the text that all workers hold out themselves, and of each by itself."""

    owners: Mapping[WorkerId, OwnersLoss]


@task("evaluation.loss", kind="pure", numbers=("num_tokens", "loss_sum"))
def loss(replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]]) -> Result:
    """`theta` has the tensors in each of `parts`, which together are the model."""
    pieces = [(replica.layout.ranges(part), vector) for part, vector in zip(parts, theta, strict=True)]
    replica.load(theta[0] if len(theta) == 1 else Vector.joined(replica.layout.numel, pieces))
    return over(replica)


def over(replica: Replica, *, personal: Vector | None = None) -> Result:
    """The loss of the parameters that are loaded, on the validation data that the task was given; and of others."""
    batches = replica.batches() if personal is None else list(replica.batches())
    losses = [replica.evaluate(tokens) for tokens in batches]
    scalars = {"loss_sum": sum(x.loss_sum for x in losses), "num_tokens": sum(x.num_tokens for x in losses)}
    if personal is not None:
        replica.load(personal)
        scalars["personal_loss_sum"] = sum(replica.evaluate(tokens).loss_sum for tokens in batches)
    return Result(scalars)


async def of_model(fleet: Fleet, params: Params, num_parts: int, *, pieces: Pieces = whole) -> Loss:
    """On so many parts of shared data, each once by whoever is free; with 0 by every worker on what it holds out.

    Only sums leave a worker.
    """
    ranges = fleet.run.layout.ranges
    theta = [Part(params.part(ranges(part)), part) if part else params for part in pieces]
    work = loss.bind(theta=theta, parts=pieces)
    if num_parts:
        replies = await fleet.map([work.held_out(part) for part in range(num_parts)], key="validation")
        return total(Replies(replies=replies))
    own = work.held_out(0)
    return of_owners(await fleet.call({w.id: own for w in fleet.workers()}, key="validation", min_replies=1))


async def by_members(fleet: Fleet, work: Callable[[WorkerInfo], BoundTask], num_parts: int) -> Loss:
    """`work` of each worker, which may go by what it keeps, on so many parts of shared data; with 0 on its own.

    A part whose worker was lost is done by another. RoundFailed where nobody answers.
    """
    parts = list(range(num_parts))
    replies: list[Reply] = []
    for attempt in count():
        workers = fleet.workers()
        own = {w.id: part for w, part in zip(workers, parts or [0] * len(workers), strict=False)}
        tasks = {w.id: work(w).held_out(own[w.id]) for w in workers if w.id in own}
        got = await fleet.call(tasks, key=f"validation-{attempt}", min_replies=1)
        replies += got.replies
        done = {own[reply.worker] for reply in got.replies}
        parts = [part for part in parts if part not in done]
        if not parts:
            got = Replies(replies=tuple(replies))
            return total(got) if num_parts else of_owners(got)
    raise AssertionError("it ends when all parts are done")


def of_owners(got: Replies) -> OwnersValidation:
    """Of each worker's own text. RoundFailed where nobody holds out any."""
    whole = total(got)
    owners: dict[WorkerId, OwnersLoss] = {}
    for reply in got.replies:
        num_tokens = int(reply.scalars["num_tokens"])
        if num_tokens > 0:
            personal = reply.scalars.get("personal_loss_sum")
            owners[reply.worker] = OwnersLoss(
                shared=float(reply.scalars["loss_sum"]) / num_tokens,
                personal=personal / num_tokens if isinstance(personal, int | float) else None,
            )
    return OwnersValidation(loss_sum=whole.loss_sum, num_tokens=whole.num_tokens, owners=owners)


def total(got: Replies) -> Loss:
    """RoundFailed where nobody holds out any text."""
    num_tokens = int(got.sum("num_tokens"))
    if num_tokens <= 0:
        raise RoundFailed("no worker holds out any text for validation; raise `data.validation`")
    return Loss(got.sum("loss_sum"), num_tokens)
