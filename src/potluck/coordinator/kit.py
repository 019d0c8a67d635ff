"""What a coordinator keeps values with, and its chance: files here; in a large simulation, names and sizes only."""

from __future__ import annotations

import secrets
from pathlib import Path

from potluck.clock import Executor
from potluck.fleet.publisher import Publisher
from potluck.fleet.reduction import Updates
from potluck.storage.checkpoints import Checkpoints
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.run import RunFacts


class Kit:
    """Makes each part once for a run. All of it may block."""

    def params(self, folder: Path, *, durable: bool) -> ParamStore:
        return ParamStore(folder, durable=durable)

    def checkpoints(self, folder: Path, params: ParamStore, *, keep: int) -> Checkpoints:
        return Checkpoints(folder, params, keep=keep)

    def publisher(
        self, run: RunFacts, params: ParamStore, objects: ObjectStore, folder: Path, executor: Executor
    ) -> Publisher:
        return Publisher(run, params, objects, folder, executor)

    def secret(self) -> str:
        """Chance that workers must not know."""
        return secrets.token_hex(16)

    def updates(self, run: RunFacts, params: ParamStore, objects: ObjectStore) -> Updates:
        return Updates(run, params, objects)
