"""A worker whose computation takes modelled time: what it computes is real, how long that takes is charged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from potluck.protocol import pb
from potluck.strategies.task import Result, TaskFunction
from potluck.worker.resumable import TaskSuspended
from potluck.worker.runner import Runner
from potluck.worker.session import lease_id
from potluck.worker.snapshots import task_name


class ModelledRunner(Runner):
    """`cost_s` gives the seconds of a task; 0 for what its computation takes by the clock. `passed` hears from when to
    when time of a task passed, also where the process then dies.

    A task of which snapshots are taken is done in pieces: each ends with a snapshot and is computed once its time has
    passed, so that who dies meanwhile loses that piece. Of one that may be cut short the time passes step by step.
    """

    def __init__(
        self,
        *,
        cost_s: Callable[[pb.Lease], float],
        passed: Callable[[float, float], None] = lambda _began, _ended: None,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        self._cost_s, self._passed = cost_s, passed
        self._begun_at, self._num_before, self._step_s = 0.0, 0, 0.0  # of the steps whose time passes

    async def _train(
        self, function: TaskFunction, lease: pb.Lease, arguments: Mapping[str, Any]
    ) -> tuple[Result, float]:
        cost_s = self._cost_s(lease)
        if not cost_s:
            return await super()._train(function, lease, arguments)
        total = max(-(-lease.num_sequences // self._spec.inner.sequences_per_step), 1)
        step_s = cost_s / total
        every = self._spec.snapshot_every_steps if lease.kind == "pinned" else 0
        done, stop = 0, total
        while True:
            if every:
                before, done = stop, await self._files.run(self.folder.snapshot.num_steps, task_name(lease))
                stop = min(done + every, total) if before == total or done == before else total
            started, cut_after = self._clock.now(), 0
            if lease.sequences_per_step:
                cut_after = await self._pass_until_cut(lease, step_s, done, stop) or total
            else:
                await self._pass(step_s, done, stop)
            stop_after = stop if stop < total and cut_after in (0, total) else 0
            try:
                result = await self._compute.run(
                    self._perform, function, lease, arguments, started, stop_after, cut_after
                )
            except TaskSuspended:
                if self.held:
                    raise
                continue
            if stop_after:  # it is not one that stops
                await self._pass(step_s, stop, total)
            return result, self._clock.now() - started + self.trainer.seconds_before

    async def _pass_until_cut(self, lease: pb.Lease, step_s: float, done: int, stop: int) -> int:
        """Let the time of a task's steps pass; after how many of all it was cut short, 0 if it was not."""
        num_steps = done
        while not (num_steps and self._is_cut_short(lease_id(lease))):
            if num_steps == stop:
                return 0
            await self._pass(step_s, num_steps, num_steps + 1)
            num_steps += 1
        return num_steps

    async def _pass(self, step_s: float, done: int, stop: int) -> None:
        """Let the time of these steps pass; how many have, its reports say meanwhile."""
        self._begun_at, self._num_before, self._step_s = self._clock.now(), done, step_s
        try:
            await self._compute.run(_nothing, cost_s=step_s * (stop - done))
        finally:
            self._step_s = 0.0
            self._passed(self._begun_at, self._clock.now())

    def _num_steps(self) -> int:
        if not self._step_s:
            return super()._num_steps()
        return self._num_before + int((self._clock.now() - self._begun_at) / self._step_s)


def _nothing() -> None:
    """To spend time on."""
