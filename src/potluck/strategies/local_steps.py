"""Rounds in which every worker takes several steps of its own: the steps, how they are dealt, and what they weigh.

Worker i is granted G_i steps, H on average over the fleet: H each, or by speed with `fleet.balance = "time"`. It takes
H_i of them, fewer than G_i where it is told to end early, and sends delta_i = theta - theta_i. Normalised, it sends
(H / H_i) delta_i, and the merge is that of FedNova (Wang et al. 2020, arXiv:2007.07481), so that speed is not counted
twice, once in delta_i and once in its tokens:

    theta moves as by the pseudo-gradient   (sum_j p_j H_j) sum_i p_i delta_i / H_i      p_i ~ tokens_i / G_i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from potluck.planner.balance import balanced
from potluck.strategies.fleet import Fleet, Replies, Reply, share_of, weighted_mean
from potluck.strategies.replica import Replica, Step
from potluck.strategies.state import State
from potluck.strategies.task import BoundTask, Result
from potluck.types.ids import WorkerId
from potluck.types.params import Params
from potluck.types.vector import Vector

most_steps = 1_000_000
"""Inner steps of a worker in a round: their data is dealt, and written down, when it begins."""
STEP_NUMBERS = ("num_tokens", "loss_sum", "num_steps")
"""The scalars of `summed_steps`,"""
PRIVATE_STEP_NUMBERS = ("num_tokens", "num_steps", "epsilon")
"""and where steps are private."""


def summed_steps(replica: Replica, *, num_steps: int, progress: tuple[float, float]) -> dict[str, float]:
    """As many steps as were granted, unless it is cut short: `STEP_NUMBERS` or `PRIVATE_STEP_NUMBERS`."""
    start, stop = progress
    steps: list[Step] = []
    while len(steps) < num_steps and not (steps and replica.is_cut_short):
        steps.append(replica.train_step(progress=start + (stop - start) * len(steps) / num_steps))
    sums = {"num_tokens": sum(s.num_tokens for s in steps), "num_steps": len(steps)}
    if replica.epsilon is None:
        return {**sums, "loss_sum": sum(s.loss * s.num_tokens for s in steps)}
    return {**sums, "epsilon": replica.epsilon}


def take_steps(
    replica: Replica, *, theta: Vector, num_steps: int, progress: tuple[float, float], mean_steps: int = 0,
    part: Sequence[int] = (),
) -> Result:  # fmt: skip
    """`summed_steps` from theta, and their `delta`.

    `mean_steps` is H where delta is to be normalised, 0 where it is not; `part` are the tensors that delta holds.
    """
    replica.load(theta)
    sums = summed_steps(replica, num_steps=num_steps, progress=progress)
    delta = (theta - replica.params()).part(replica.layout.ranges(part))
    if mean_steps not in (0, sums["num_steps"]):
        delta = (mean_steps / sums["num_steps"]) * delta
    return Result(sums, {"delta": delta})


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The steps of one round, by worker."""

    mean_steps: int  # H
    granted: Mapping[WorkerId, int]  # G_i
    progress: tuple[float, float]

    @staticmethod
    def deal(state: State, fleet: Fleet, num_inner_steps: int, *, equal: bool = False) -> Shares:
        """Among the workers that are here; the same to each with `equal`. The last round may be a shorter one."""
        run, workers = fleet.run, fleet.workers()
        num_steps = min(num_inner_steps, run.steps_left(state, len(workers)))
        per_step = run.inner.sequences_per_step
        paces = {w.id: w.pace.of_units(per_step) if w.pace and not equal else None for w in workers}
        return Shares(
            mean_steps=num_steps,
            granted=balanced(paces, mean_units=num_steps),
            progress=run.progress_span(state, num_steps * len(workers)),
        )

    @property
    def per_step(self) -> Mapping[WorkerId, float]:
        """H / G_i."""
        return {worker: self.mean_steps / steps for worker, steps in self.granted.items()}

    async def call(
        self,
        fleet: Fleet,
        task: Callable[[WorkerId, int], BoundTask],
        *,
        min_reply_fraction: float,
        by: str = "num_tokens",
        is_normalised: bool = True,
        may_end_early: bool = True,
        previous: Params | None = None,
        part: Sequence[int] = (),
        is_reduced: bool = True,
    ) -> Replies:
        """`task` of each worker and its steps, and the mean of their `delta`, weighted by their scalar `by`.

        `part` are the tensors of the layout that their delta holds. Unless `is_reduced` they are only checked.
        """
        reduction = weighted_mean(
            "delta", by=by, previous=previous, factors=self.per_step if is_normalised else None, part=part
        )
        per_step = fleet.run.inner.sequences_per_step
        return await fleet.call(
            {
                worker: task(worker, steps).granted(steps * per_step, per_step=per_step if may_end_early else 0)
                for worker, steps in self.granted.items()
            },
            key="inner",
            min_replies=share_of(min_reply_fraction, len(self.granted)),
            reduce=reduction if is_reduced else None,
            expects=reduction,
        )

    def stretch(self, got: Replies) -> float:
        """(sum_j p_j H_j) / H over those who replied with normalised updates."""
        weights: list[float] = []  # tokens_j / G_j, times H
        steps: list[float] = []  # each times H_j / H
        for reply in got.replies:
            num_tokens, most = float(reply.scalars["num_tokens"]), self.granted[reply.worker]
            weights.append(num_tokens * self.per_step[reply.worker])
            steps.append(num_tokens * self._taken(reply) / most)
        return math.fsum(steps) / math.fsum(weights)

    def _taken(self, reply: Reply) -> float:
        """H_j, which the worker says."""
        return min(max(float(reply.scalars["num_steps"]), 1.0), self.granted[reply.worker])
