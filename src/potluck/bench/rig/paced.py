"""Strategies for workers of a chosen speed, so that one machine stands for several whatever else it does.

`Paced` is DiLoCo whose inner steps take at least `step_s` each, `PacedStreaming` the same of streaming DiLoCo, and
`Bag` hands out pure tasks of `piece_s` and leaves the model as it is. Used by their file, as a user's own would be:
`strategy.name = "…/paced.py:Paced"`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict

from potluck.strategies import diloco, streaming_diloco
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig, DiLoCoState
from potluck.strategies.fleet import Fleet, Replies
from potluck.strategies.replica import Replica, Step
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig, StreamingDiLoCoState
from potluck.strategies.task import BoundTask, Result, task
from potluck.types.ids import WorkerId

least_step_s = 1e-3
"""What a worker takes for less it did not compute: it goes on from a snapshot and repeats what it has noted."""


class _Slow:
    """A replica whose steps take `step_s`."""

    def __init__(self, replica: Replica, step_s: float) -> None:
        self._replica, self._step_s = replica, step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def train_step(self, *, progress: float) -> Step:
        begun = time.perf_counter()
        step = self._replica.train_step(progress=progress)
        if (taken_s := time.perf_counter() - begun) > least_step_s:
            time.sleep(max(0.0, self._step_s - taken_s))
        return step


@task("paced.inner", kind="pinned", numbers=diloco.inner.numbers)
def inner(replica: Replica, *, step_s: float, **arguments: Any) -> Result:
    return diloco.inner.function(_Slow(replica, step_s), **arguments)


@task("paced.streaming", kind="pinned", numbers=streaming_diloco.inner.numbers)
def streaming(replica: Replica, *, step_s: float, **arguments: Any) -> Result:
    return streaming_diloco.inner.function(_Slow(replica, step_s), **arguments)


@dataclass(frozen=True)
class _SlowFleet:
    """A fleet whose workers take `step_s` for each inner step."""

    fleet: Fleet
    step_s: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)

    async def call(self, tasks: Mapping[WorkerId, BoundTask], **how: Any) -> Replies:
        return await self.fleet.call(self._slow(tasks, inner.name), **how)

    async def enqueue(self, tasks: Mapping[WorkerId, BoundTask], **how: Any) -> None:
        await self.fleet.enqueue(self._slow(tasks, streaming.name), **how)

    def _slow(self, tasks: Mapping[WorkerId, BoundTask], name: str) -> dict[WorkerId, BoundTask]:
        return {
            id: replace(bound, task=name, arguments={**bound.arguments, "step_s": self.step_s})
            for id, bound in tasks.items()
        }


class PacedConfig(DiLoCoConfig):
    step_s: float = 0.1


class Paced(DiLoCo):
    Config: ClassVar[type[BaseModel]] = PacedConfig

    def __init__(self, config: PacedConfig) -> None:
        super().__init__(config)
        self._step_s = config.step_s

    async def run_round(self, state: DiLoCoState, fleet: Fleet) -> DiLoCoState:
        return await super().run_round(state, cast(Fleet, _SlowFleet(fleet, self._step_s)))


class PacedStreamingConfig(StreamingDiLoCoConfig):
    step_s: float = 0.1


class PacedStreaming(StreamingDiLoCo):
    Config: ClassVar[type[BaseModel]] = PacedStreamingConfig

    def __init__(self, config: PacedStreamingConfig) -> None:
        super().__init__(config)
        self._step_s = config.step_s

    async def run_round(self, state: StreamingDiLoCoState, fleet: Fleet) -> StreamingDiLoCoState:
        return await super().run_round(state, cast(Fleet, _SlowFleet(fleet, self._step_s)))


@task("paced.piece", numbers=("number",))
def piece(replica: Replica, *, number: int, piece_s: float) -> Result:
    del replica
    time.sleep(piece_s)
    return Result({"number": number})


class BagConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_pieces: int = 8
    piece_s: float = 0.5


class Bag:
    Config: ClassVar[type[BaseModel]] = BagConfig
    State: ClassVar[type[State]] = State

    def __init__(self, config: BagConfig) -> None:
        self.config = config

    def init(self, run: RunFacts) -> State:
        return State(params=run.initial)

    async def run_round(self, state: State, fleet: Fleet) -> State:
        pieces = [piece.bind(number=i, piece_s=self.config.piece_s) for i in range(self.config.num_pieces)]
        replies = await fleet.map(pieces, key="pieces")
        assert [reply.scalars["number"] for reply in replies] == list(range(self.config.num_pieces))
        return replace(state, round=state.round + 1)

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=0, down=0)
