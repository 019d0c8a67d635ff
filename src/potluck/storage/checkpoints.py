"""Checkpoints: a folder each, whole or not there, the last few kept.

    FOLDER/NAME/state.json          {"format", "number", "files": {handle: {file, bytes, digest}}, "content": ...}
    FOLDER/NAME/HANDLE.safetensors  one tensor "values", fp32 [numel]: the flat vector of that handle

A checkpoint is written under another name, synced to the disk, and renamed; nothing that was good is ever written
over. When reading, one that is cut short or damaged is passed over for the one before it. All methods block.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from potluck.storage.digest import Hasher
from potluck.storage.files import fsync_folder, full_disk_named
from potluck.storage.params import ParamStore
from potluck.types.errors import CorruptError
from potluck.types.params import Params, type_bytes

_format = 1
_safe_name = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_max_header_bytes = 1 << 16
_slack_bytes = 1 << 20  # the manifest and what the file system takes


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """A `state.json` that could be read, and whose files have the sizes it says."""

    folder: Path
    number: int  # counts up with every checkpoint that was saved
    files: Mapping[str, Mapping[str, Any]]
    content: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder. `params` is where their vectors come from and go to."""

    def __init__(self, folder: Path, params: ParamStore, *, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._params = params
        self.skipped: tuple[str, ...] = ()  # why `load_latest` passed over what it did
        folder.mkdir(parents=True, exist_ok=True)
        for aside in folder.glob(".*.old"):  # a save died between its two renames
            whole = folder / aside.name[1 : -len(".old")]
            if whole.exists():
                shutil.rmtree(aside)
            else:
                aside.replace(whole)
        for scratch in folder.glob(".*.tmp"):
            shutil.rmtree(scratch)

    def save(
        self, name: str, manifest: Mapping[str, Any], handles: Mapping[str, Params], *, prune: bool = True
    ) -> Path:
        """Write a checkpoint and, to `prune`, remove those beyond the last `keep`; its folder.

        `manifest` holds JSON values. ResourceError, before anything is written, if the disk is too full.
        """
        assert all(map(_safe_name.fullmatch, (name, *handles))), f"{name}, {list(handles)} are file names"
        need_bytes = sum(h.numel for h in handles.values()) * type_bytes + _slack_bytes
        self._params.spares.require_free(self.folder, need_bytes)
        number = 1 + max((m.number for m in self._newest_first([])), default=0)
        scratch = self.folder / f".{name}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            with full_disk_named(self.folder, need_bytes):
                files = {key: self._write_vector(scratch, key, handle) for key, handle in handles.items()}
                value = {"format": _format, "number": number, "files": files, "content": dict(manifest)}
                _write_synced(scratch / "state.json", [json.dumps(value, indent=1).encode()])
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        fsync_folder(scratch)
        self._put_in_place(scratch, self.folder / name)
        if prune:
            self._prune()
        return self.folder / name

    def load_latest(self) -> tuple[dict[str, Any], dict[str, Params]] | None:
        """The newest whole checkpoint: its manifest and its vectors, now handles of `params`. None if there is none.

        `skipped` says what was passed over and why.
        """
        reasons: list[str] = []
        for found in self._newest_first(reasons):
            try:
                handles = {key: self._read_vector(found, key) for key in found.files}
            except (CorruptError, OSError) as error:
                reasons.append(f"checkpoint {found.folder.name} was passed over: {error}")
                continue
            self.skipped = tuple(reasons)
            return found.content, handles
        self.skipped = tuple(reasons)
        return None

    def remove_where(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove the whole checkpoints whose manifests are `unwanted`, but never the last one that is left."""
        whole = list(self._newest_first([]))
        for found in whole[: len(whole) - 1] if all(unwanted(m.content) for m in whole) else whole:
            if unwanted(found.content):
                shutil.rmtree(found.folder)

    def names(self) -> tuple[str, ...]:
        """The checkpoints whose files are all there, oldest first."""
        return tuple(m.folder.name for m in reversed(list(self._newest_first([]))))

    # Folders

    def _put_in_place(self, scratch: Path, target: Path) -> None:
        aside = self.folder / f".{target.name}.old"
        if target.exists():
            target.replace(aside)
        scratch.replace(target)
        fsync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self) -> None:
        """Remove all but the last `keep` whole ones. Damaged ones go too: whole ones have just been seen."""
        keep = {m.folder for m in list(self._newest_first([]))[: self.keep]}
        for folder in self._folders():
            if folder not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return sorted(p for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith("."))

    def _newest_first(self, reasons: list[str]) -> Iterator[_Manifest]:
        found: list[_Manifest] = []
        for folder in self._folders():
            try:
                found.append(_read_manifest(folder))
            except CorruptError as error:
                reasons.append(f"checkpoint {folder.name} was passed over: {error}")
        yield from sorted(found, key=lambda m: m.number, reverse=True)

    # Vectors as safetensors files

    def _write_vector(self, folder: Path, key: str, params: Params) -> dict[str, Any]:
        path = folder / f"{key}.safetensors"
        hasher, size = Hasher(), 0

        def pieces() -> Iterator[bytes | memoryview]:
            nonlocal size
            parts = (part.numpy().data.cast("B") for part in self._params.slices(params))
            for piece in chain([_vector_header(params.numel)], parts):
                hasher.update(piece)
                size += len(piece)
                yield piece

        _write_synced(path, pieces())
        return {"file": path.name, "bytes": size, "digest": hasher.digest()}

    def _read_vector(self, found: _Manifest, key: str) -> Params:
        """Copy a vector into the parameter store, checking its digest on the way. CorruptError."""
        row = found.files[key]
        path = found.folder / row["file"]
        hasher = Hasher()
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), _max_header_bytes)
            numel = max(0, row["bytes"] - 8 - length) // type_bytes
            head = _vector_header(numel)
            file.seek(0)
            if file.read(len(head)) != head or len(head) + numel * type_bytes != row["bytes"]:
                raise CorruptError(f"{path} does not start like a safetensors file of one vector")
            hasher.update(head)
            with self._params.writer(f"{found.folder.name}-{key}", numel) as writer:
                while data := bytearray(file.read(self._params.slice_numel * type_bytes)):
                    hasher.update(data)
                    writer.write(torch.frombuffer(data, dtype=torch.float32))
                if hasher.digest() != row["digest"]:
                    raise CorruptError(f"{path} does not match its digest in state.json")
        return writer.params


def _vector_header(numel: int) -> bytes:
    """The head of a safetensors file of one fp32 tensor, padded to 8 bytes."""
    described = {"values": {"dtype": "F32", "shape": [numel], "data_offsets": [0, numel * type_bytes]}}
    text = json.dumps(described, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(folder: Path) -> _Manifest:
    """CorruptError if the manifest cannot be read or a file has another size than it says."""
    path = folder / "state.json"
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read ({error})") from error
    match value:
        case {"format": 1, "number": int(number), "files": dict(files), "content": dict(content)}:
            pass
        case _:
            raise CorruptError(f"{path} is not the manifest of a checkpoint of this version")
    for key, row in files.items():
        match row:
            case {"file": str(name), "bytes": int(size), "digest": str()} if name == f"{key}.safetensors":
                found = (folder / name).stat().st_size if (folder / name).is_file() else -1
            case _:
                raise CorruptError(f"{path} does not say file, bytes and digest of {key}")
        if found != size:
            have = f"has {found} bytes" if found >= 0 else "is missing"
            raise CorruptError(f"{folder / name} {have} and {size} are in state.json")
    return _Manifest(folder=folder, number=number, files=files, content=content)
