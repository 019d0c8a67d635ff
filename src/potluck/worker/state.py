"""What a worker keeps on its disk: its identity, its pinned states, its unfinished and unread results.

    STATE/lock              held by the one process that uses the folder
    STATE/identity/         key and certificate (transport/security)
    STATE/privacy/RUN.json  what it has spent of its owner's privacy (worker/privacy_ledger.py)
    STATE/runs/RUN/run.json      what the run is, where it trains adapters (worker/own_model.py)
    STATE/runs/RUN/canaries/     secrets among its owner's data, and how exposed they are (worker/canaries.py)
    STATE/runs/RUN/objects/      what it downloaded and will upload
    STATE/runs/RUN/local/VERSION.safetensors   inner optimizer, data position: one file a version
    STATE/runs/RUN/local/VERSION.residual      what codecs lost so far (worker/feedback.py), fp32; of parts of the
                                               model with the number of their first tensor
    STATE/runs/RUN/snapshot-N    the task under way, after some of its steps (worker/snapshots.py)
    STATE/runs/RUN/results.json  finished work: on its way to the coordinator, or not acknowledged by it

A task reads version v and writes v+1 beside it. The worker adopts v+1 when the coordinator says it was committed and
drops it otherwise. So a kill at any moment loses the steps since the last snapshot, and nothing once the task is done.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from potluck.protocol import pb
from potluck.storage.files import link_or_copy, remove_files, remove_unfinished, write_atomic
from potluck.storage.objects import ObjectStore
from potluck.types.errors import CorruptError, ResourceError
from potluck.types.ids import LeaseId
from potluck.worker.snapshots import SnapshotFile

DESCRIPTION = "run.json"
_others_unfinished = ".tmp*"
"""Files that safetensors is writing: a state may be saved while others are dropped."""
_is_residual = re.compile(r"\.residual[0-9]*")
Results = Mapping[LeaseId, pb.TaskResult]


class RunFolder:
    """A worker's files for one run. All methods block."""

    def __init__(self, root: Path, objects: ObjectStore | None = None) -> None:
        self.root = root
        self._local = root / "local"
        self._local.mkdir(parents=True, exist_ok=True)
        self.objects = objects or ObjectStore(root / "objects")
        self.snapshot = SnapshotFile(root, self.objects.spares)
        for folder in (root, self._local):
            remove_unfinished(folder)
        remove_files(self._local.glob(_others_unfinished))

    def keep_description(self, spec_json: str) -> None:
        """What is needed beside a state to make a model of it. ResourceError on a full disk."""
        write_atomic(self.root / DESCRIPTION, spec_json.encode())

    @property
    def has_states(self) -> bool:
        """Whether a task of the run has left something here."""
        return any(self._local.iterdir()) or any(self.root.glob("snapshot-*"))

    # Pinned states

    def _path(self, version: str) -> Path:
        name = hashlib.sha256(version.encode()).hexdigest()[:32]  # a version is a name from the network
        return self._local / f"{name}.safetensors"

    def residual_path(self, version: str, part: Sequence[int] = ()) -> Path:
        """Where the error feedback of a version is, or would be; of a part of the model, named by its first tensor."""
        return self._path(version).with_suffix(f".residual{part[0]}" if part else ".residual")

    def drop_residual(self, version: str) -> None:
        for path in self.residuals(version):
            path.unlink(missing_ok=True)

    def drop_version(self, version: str) -> None:
        """With what codecs lost of it."""
        self.drop_residual(version)
        self._path(version).unlink(missing_ok=True)

    def residuals(self, version: str) -> list[Path]:
        """All files of what codecs lost."""
        stem = self._path(version).stem  # no pattern of its own: each one stays in caches of the standard library
        return [p for p in self._local.iterdir() if p.stem == stem and _is_residual.fullmatch(p.suffix)]

    def carry_residuals(self, version: str, to: str, *, but: Path | None = None) -> None:
        """What nothing was sent of is left over in the next state too. `but`: the one of what was sent."""
        for path in self.residuals(version) if version and to else ():
            target = self._path(to).with_suffix(path.suffix)
            if path != but:
                target.unlink(missing_ok=True)
                link_or_copy(path, target)

    def has_version(self, version: str) -> bool:
        return bool(version) and self._path(version).exists()

    def save_version(self, version: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Whole or not at all. `scalars` are JSON values. ResourceError if the disk has no room for it."""
        path = self._path(version)
        scratch = path.with_suffix(".tmp")
        contiguous = {name: t.contiguous() for name, t in tensors.items()}
        self.objects.spares.require_free(path, sum(t.nbytes for t in contiguous.values()) + (1 << 16))
        try:
            save_file(contiguous, scratch, metadata={"version": version, "scalars": json.dumps(dict(scalars))})
        except SafetensorError as error:  # what it says of a disk that someone else has filled meanwhile
            scratch.unlink(missing_ok=True)
            raise ResourceError(
                f"{path} cannot be written ({error}); free some space or choose another folder"
            ) from None
        scratch.replace(path)

    def load_version(self, version: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """CorruptError if the file cannot be read."""
        path = self._path(version)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["scalars"])  # noqa: SIM118
        except Exception as error:  # safetensors raises its own, OSError or ValueError
            raise CorruptError(f"the worker's state {path} cannot be read: {error}") from error

    def keep_versions(self, keep: Iterable[str]) -> None:
        """Drop every state that is neither adopted nor waited for."""
        stems = {self._path(version).stem for version in keep if version}
        for path in self._local.iterdir():
            if path.stem not in stems and not path.match(_others_unfinished):
                path.unlink(missing_ok=True)

    # Results

    def save_results(self, sent: Results, unsent: Results) -> None:
        """`sent` wait for their verdict, the objects of `unsent` are not all at the coordinator."""
        write_atomic(self.root / "results.json", json.dumps({"sent": _rows(sent), "unsent": _rows(unsent)}).encode())

    def load_results(self) -> tuple[dict[LeaseId, pb.TaskResult], dict[LeaseId, pb.TaskResult]]:
        path = self.root / "results.json"
        if not path.exists():
            return {}, {}
        try:
            found = json.loads(path.read_bytes())
            return _results(found["sent"]), _results(found["unsent"])
        except Exception:  # a broken list of results costs their work, nothing else
            return {}, {}


def _rows(results: Results) -> list[str]:
    return [base64.b64encode(r.SerializeToString()).decode() for r in results.values() if not r.num_inline]


def _results(rows: Iterable[str]) -> dict[LeaseId, pb.TaskResult]:
    results = [pb.TaskResult.FromString(base64.b64decode(row)) for row in rows]
    return {(r.round, r.attempt, r.key): r for r in results}
