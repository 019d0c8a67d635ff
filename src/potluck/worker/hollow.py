"""In the place of a trainer where a run's devices hold no model: they do pieces, and nothing that needs a model."""

from __future__ import annotations

from typing import NoReturn

from potluck.protocol import pb
from potluck.types.errors import Refused
from potluck.types.params import Layout


class HollowTrainer:
    """What a runner asks of its trainer, answered by a refusal wherever there would have to be a model."""

    def __init__(self) -> None:
        self.layout = Layout.of([])
        self.num_steps = self.num_batches = self.num_unused = self.adapter_rank = 0
        self.tokens_per_s = self.seconds_before = 0.0

    def cancel(self) -> None:
        pass

    def suspend(self) -> None:
        pass

    def prepare(self, lease: pb.Lease, source: object, **options: object) -> NoReturn:
        raise Refused(f"{lease.task} needs a model, and the devices of this run hold none")

    def keep(self, lease: pb.Lease, source: object) -> None:
        pass

    def forget(self, version: str) -> None:
        pass
