"""How a strategy sees the machines: the `Fleet` protocol.

Three verbs cover every method: `call` (one task for each named worker, a minimum of replies), `next` (whoever is
idle, first reply; `gather` takes the first few) and `map` (a bag of pure tasks, re-issued until all are done);
`enqueue` and `collect` are the two halves of a `call` for rounds that overlap; `open`, `send` and `receive` drive
sessions. Every verb takes an explicit `key`, unique within the round: after a restart the round is run again from its
top, and a verb whose key was answered before returns the logged replies in the logged order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from potluck.planner.balance import Pace
from potluck.strategies.run import RunFacts
from potluck.strategies.task import BoundTask, Result
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Params
from potluck.types.profile import DeviceProfile
from potluck.types.vector import Vector

if TYPE_CHECKING:
    from potluck.strategies.bag import Bag


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A worker that is here and healthy."""

    id: WorkerId
    profile: DeviceProfile
    pace: Pace | None = None  # for training sequences; None where work is not balanced, or nothing is known yet
    under_way: bool = False  # work that an earlier round began for it still goes on
    adapter_rank: int = 0  # to train; 0 where all train the one there is
    holds_state: bool = False  # its machine has, as far as is known, what its last committed task left there


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A valid result of one task. `tensors` are handles to what was spooled; `inline` came with the reply."""

    worker: WorkerId
    key: str
    scalars: Mapping[str, Any]
    object: str = ""  # digest of the spooled bundle, "" for none
    inline: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    round: int = 0  # of `next` and `gather`: rounds that were committed when its work was handed out


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How replies become one vector: by the run's rule of aggregation R, which is the weighted mean unless it says so.

    A mean is R(x, w): x_i is the tensor `name` of reply i and w_i its scalar `weight` (1 where that is empty).
    Otherwise x_i is itself a sum over w_i items, and the total over all items is (sum_i w_i) R(x_i / w_i, w): with the
    weighted mean that is sum_i x_i. `previous` is the aggregate before, where a rule that starts from one is to start.
    `factors` multiply the w_i of a mean, by worker, or by key where a worker may have replied more than once.
    """

    name: str
    weight: str = ""
    mean: bool = True
    previous: Params | None = None
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    part: tuple[int, ...] = ()  # the tensors of the layout that the x_i hold, () for all

    def factor(self, worker: str, key: str) -> float:
        return self.factors.get(key, self.factors.get(worker, 1.0))


def weighted_mean(
    name: str, *, by: str, previous: Params | None = None,
    factors: Mapping[WorkerId, float] | Mapping[str, float] | None = None, part: Sequence[int] = (),
) -> Reduction:  # fmt: skip
    """sum_i w_i x_i / sum_i w_i, w_i the scalar `by` of reply i, times the factor of its worker where it has one."""
    own = dict((factors or {}).items())
    return Reduction(name=name, weight=by, mean=True, previous=previous, factors=own, part=tuple(part))


def total(name: str, *, over: str = "") -> Reduction:
    """sum_i x_i, x_i a sum over as many items as the scalar `over` says; without it only the rule `mean` applies."""
    return Reduction(name=name, weight=over, mean=False)


@dataclass(frozen=True, kw_only=True)
class Replies:
    """What a `call` brought: replies in the order of their workers' ids, and the reduction if one was asked for."""

    replies: tuple[Reply, ...]
    value: Params | None = None

    @property
    def reduced(self) -> Params:
        assert self.value is not None, "this call was made without `reduce`"
        return self.value

    def sum(self, name: str) -> float:
        return summed(self.replies, name)


def summed(replies: Iterable[Reply], name: str) -> float:
    """The sum of a scalar over replies. RoundFailed if a worker did not report it."""
    found: float = 0
    for reply in replies:
        value = reply.scalars.get(name)
        if not isinstance(value, int | float):
            raise RoundFailed(f"{reply.worker} reported {value!r} as {name}, which must be a number")
        found += value
    return found


def share_of(share: float, whole: int) -> int:
    """So much of that many, rounded up, at least 1."""
    return max(math.ceil(share * whole - 1e-9), 1)  # 0.55 * 20 is a little above 11


Op = Callable[..., Sequence[Tensor]]
"""`op(*slices, layout=, offset=, **scalars)` -> new slices. Slices are fp32 [n], element `offset` on of the model."""


class Head(Protocol):
    """What work on the head has before it. Used in the thread of that work."""

    def batches(self) -> Iterator[Tensor]:
        """The data that it was given, as integer [at most batch_size, seq_len + 1]."""
        ...

    def vector(self, handle: Params) -> Vector:
        """The values of a handle, fp32, read where they lie."""
        ...

    def update(self, reply: Reply, name: str, part: Sequence[int] = ()) -> Tensor:
        """The vector of a reply that this round has: fp32, of these tensors of the layout. UnusableUpdates."""
        ...

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Who could do a piece at this moment."""
        ...

    def wait(self) -> None:
        """Stand still until somebody could do a piece. RunStopped where only quarantined workers are left."""
        ...

    def now(self) -> float:
        """Seconds on the fleet's clock."""
        ...

    def secret(self) -> str:
        """What nobody else can know; the same again only where the whole run is played from a seed."""
        ...

    def blame(self, worker: WorkerId, reason: str) -> None:
        """Tell people what a worker costs the others; nothing follows from it."""
        ...

    def spread(self, bag: Bag) -> None:
        """Hand out a bag of pieces, and stand still until it is done. RoundFailed where the bag raises it."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """What work on the head brought; its vectors as handles."""

    scalars: Mapping[str, Any]
    handles: Mapping[str, Params]


class Fleet(Protocol):
    @property
    def run(self) -> RunFacts: ...

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Who is here, in the order of ids. Logged: a replay of the round sees the same answer."""
        ...

    async def call(
        self,
        tasks: Mapping[WorkerId, BoundTask],
        *,
        key: str,
        min_replies: int,
        reduce: Reduction | None = None,
        expects: Reduction | None = None,
    ) -> Replies:
        """One task for each worker. Ends when every worker replied or was lost.

        Replies are checked so that `reduce` can be made, or where that is not asked for, so that `expects` could.

        RoundFailed if fewer than `min_replies` valid replies came, or too few for the run's rule of aggregation;
        RecipeError if that rule cannot make this reduction.
        """
        ...

    async def enqueue(
        self,
        tasks: Mapping[WorkerId, BoundTask],
        *,
        key: str,
        reduce: Reduction | None = None,
        afresh: Collection[WorkerId] = (),
    ) -> None:
        """Hand out pinned work that may outlive this round, and do not wait for it. Each worker does what was begun for
        it in order; every task goes on from the state that the one before it left, committed or not; those of workers
        that begin `afresh`, from the last committed state.

        What was begun under this key stays as it was begun. Once a task is lost, those after it are lost too. A round
        that is discarded takes all that was begun with it: workers go back to their last committed states.
        """
        ...

    async def collect(self, keys: Sequence[str], *, min_replies: int, reduce: Reduction | None = None) -> Replies:
        """What was begun under these keys, in the order in which it was: it ends when everyone has replied or was lost.

        Of a worker all of it counts or nothing; the reduction is over the replies under the last key, and in a mean
        each weighs what all replies of its worker weigh. Replies are in the order of keys, then workers. RoundFailed as
        for `call`. A key is collected in one round that commits.
        """
        ...

    async def next(self, offer: Callable[[WorkerInfo], BoundTask | None], *, key: str) -> Reply:
        """Give every idle worker what `offer` says; the first valid reply not yet consumed in this round."""
        ...

    async def gather(
        self,
        offer: Callable[[WorkerInfo], BoundTask | None],
        *,
        key: str,
        min_replies: int,
        expects: Reduction,
        grace: float | None = None,
        max_staleness: int | None = None,
    ) -> tuple[Reply, ...]:
        """Give every idle worker what `offer` says, until so many valid replies are here that no commit has used.

        Without `grace` the first `min_replies` of them, in the order in which they came. Who delivers while more must
        come goes on at once; whose reply is the last of them, or comes after that, is idle until the round is committed
        and the next one has published what it offers: with `min_replies` 1 that is everybody, each time. With `grace`
        at most one of each worker, who then waits for the next round; once `min_replies` are here the others are waited
        for `grace` times as long again as those took, and all that are here then count. Fewer where nobody else is at
        work. What comes later is for the next round; what comes more than `max_staleness` commits after it was handed
        out is dropped and its data dealt again. Replies are checked so that `expects` can be made.
        """
        ...

    async def reduce(self, replies: Sequence[Reply], reduction: Reduction) -> Params:
        """One vector of replies that this round gathered. RoundFailed if they are too few for the run's rule."""
        ...

    async def map(self, tasks: Sequence[BoundTask], *, key: str) -> tuple[Reply, ...]:
        """Pure tasks, done by anyone; replies in the order of `tasks`. Re-issued until all are done."""
        ...

    async def head(
        self, work: Callable[[Head], Result], *, key: str, num_sequences: int = 0, held_out_parts: int = 0
    ) -> HeadResult:
        """Work on this machine, with so many sequences of training data (or all of the held-out data) of its own.

        Not logged but for its data: after a restart it is done again with the same.
        """
        ...

    def credit(self, key: str, num_tokens: Mapping[WorkerId, int]) -> None:
        """Which workers did so much of what the head's work `key` brought."""
        ...

    def report(self, figures: Mapping[str, float]) -> None:
        """Numbers by name for the run's metrics, if this round is committed."""
        ...

    async def open(self, worker: WorkerId, task: BoundTask, *, key: str) -> None:
        """Start a session on a worker, or find it running. It may outlive the round: keep its key in the state."""
        ...

    async def send(self, key: str, step: int, arguments: Mapping[str, Any]) -> None:
        """An input for a session; delivered once, however often the link breaks."""
        ...

    async def receive(self, key: str, step: int) -> Reply:
        """What a session emitted at a step. Consumed when a state that used it commits. RoundFailed if it is gone."""
        ...

    async def close(self, key: str) -> None:
        """End a session."""
        ...

    async def apply(
        self, op: Op, *handles: Params, num_outputs: int = 1, part: Sequence[int] = (), **scalars: Any
    ) -> tuple[Params, ...]:
        """Run `op` over the handles slice by slice into new handles: costs disk, not memory.

        The handles are of the model's layout, or of these tensors of it.

        `op` is called in several threads at once, each with slices of its own, so it keeps nothing between calls. A
        mean that `call` gave is computed here, within the pass, and read again each time it is used.
        """
        ...

    async def norm(self, handle: Params) -> float:
        """The L2 norm of the whole vector, accumulated in fp64."""
        ...
