"""How each worker encodes its update this round: the recipe's way for all, or one that suits its link.

The choice itself is `planner.compression`; here it gets what is known of the workers, and its reasons are told where
they change something. What was chosen is in the lease, so a round that is taken up again keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.clock import Executor
from potluck.codecs.elementwise import as_bytes
from potluck.codecs.spec import CodecSpec, parse_spec
from potluck.fleet.roster import Member, Roster
from potluck.planner.compression import Candidate, Sender, choose
from potluck.planner.deadline import predict_s
from potluck.strategies.run import RunFacts
from potluck.types.ids import WorkerId
from potluck.types.params import type_bytes

_sample_shape = (512, 512)


class UpEncoding:
    def __init__(self, run: RunFacts, roster: Roster, executor: Executor) -> None:
        self._run, self._roster, self._executor = run, roster, executor
        self._candidates: list[Candidate] = []
        self._current: dict[WorkerId, str] = {}  # the codec of each worker's last update
        self.told: Callable[[WorkerId, str], None] = lambda _worker, _reason: None  # hears new choices

    async def specs(self, task: str, units: Mapping[WorkerId, float], part: Sequence[int] = ()) -> dict[WorkerId, str]:
        """How each of these workers is to encode the result of a task of so many units of work: a vector that holds
        these tensors of the layout, () for all."""
        config = self._run.compression
        if config.mode == "fixed":
            return dict.fromkeys(units, self._run.up_codec)
        if not self._candidates:
            self._candidates = await self._executor.run(lambda: [measured(name) for name in config.candidates])
        senders = [self._sender(worker, task, each) for worker, each in units.items()]
        num_params = self._run.layout.part(part).numel
        chosen = choose(senders, self._candidates, num_params=num_params, max_distortion=config.max_distortion)
        for worker, choice in chosen.items():
            if self._current.get(worker) != choice.codec:
                self._current[worker] = choice.codec
                self.told(worker, choice.reason)
        return {worker: self._spec(choice.codec) for worker, choice in chosen.items()}

    def _sender(self, worker: WorkerId, task: str, units: float) -> Sender:
        member = self._roster.members.get(worker)
        current = self._current.get(worker, "")
        if member is None:
            return Sender(id=worker, up_bytes_per_s=0.0, compute_s=0.0, current=current)
        return Sender(
            id=worker,
            up_bytes_per_s=member.up_bytes_per_s,
            compute_s=predict_s(member.seconds_per_unit.get(task, []), units) or 0.0,
            rtt_s=member.profile.link.rtt_s,
            longest_s=member.longest_s(task),
            current=current,
            encode_bytes_per_s=_speeds(member),
        )

    def _spec(self, name: str) -> str:
        """The chosen codec with the recipe's error feedback, where it loses anything."""
        way = parse_spec(self._run.up_codec)
        if name == "fp32":
            return name
        chosen = parse_spec(name)
        return str(replace(chosen, beta=way.beta))


def _speeds(member: Member) -> dict[str, float]:
    return {s.name: s.encode_bytes_per_s for s in member.profile.speeds.codecs if s.encode_bytes_per_s > 0}


def measured(name: str) -> Candidate:
    """Size and distortion of a codec on normally distributed values."""
    spec: CodecSpec = parse_spec(name)
    values = np.random.default_rng(1).standard_normal(_sample_shape, dtype=np.float32).reshape(-1)
    buffers = spec.codec.encode(values, _sample_shape)
    decoded = np.empty_like(values)
    spec.codec.decode([as_bytes(buffer) for buffer in buffers], _sample_shape, 0, decoded)
    lost = np.square(values - decoded, dtype=np.float64).sum() / np.square(values, dtype=np.float64).sum()
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    return Candidate(name=name, ratio=num_bytes / (type_bytes * len(values)), distortion=float(lost))
