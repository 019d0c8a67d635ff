"""Listed data: a manifest names files and digests; every worker has its own copies, and only names are dealt.

    {"version": 1, "tokenizer": "sha256:…",
     "files": [{"path": "part-000.npy", "digest": "sha256:…", "bytes": 2000128, "num_tokens": 1000000}, …]}

or JSON lines: the first object without `files`, then one object for each file. `split = "validation"` holds a file
out. `tokenizer` is the digest of the tokenizer that text was counted with; it is empty for arrays of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from potluck.data.config import ReadOptions
from potluck.data.listed import count_tokens
from potluck.data.packing import divide, num_sequences_in
from potluck.data.shards import Shard
from potluck.data.sources import unreadable
from potluck.data.tokenizer import TextTokenizer
from potluck.storage.digest import digest_file
from potluck.types.errors import DataError

MAX_MANIFEST_BYTES = 256 << 20
_digest_pattern = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{32,128}")


def is_safe_name(name: str) -> bool:
    """Whether a relative POSIX path stays within the folder it is taken from, on every system."""
    path = PurePosixPath(name)
    parts = name.split("/")
    return (
        0 < len(name) <= 500
        and not path.is_absolute()
        and all(part not in ("", ".", "..") for part in parts)
        and not any(c in name for c in '\\:*?"<>|\0')
    )


class ListedFile(BaseModel):
    """One file of which workers have copies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    digest: str
    bytes: int = Field(ge=1, le=1 << 50)
    num_tokens: int = Field(ge=0, le=1 << 50)
    split: Literal["training", "validation"] = "training"

    @field_validator("path")
    @classmethod
    def _safe(cls, value: str) -> str:
        if not is_safe_name(value):
            raise ValueError("a path must be relative, with `/`, and stay within its folder")
        return value

    @field_validator("digest")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        if not _digest_pattern.fullmatch(value):
            raise ValueError("a digest reads `algorithm:hex`")
        return value


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    tokenizer: str = ""
    files: tuple[ListedFile, ...] = Field(min_length=1)

    def save(self, path: Path) -> None:
        """Written as JSON lines: one line for each file reads well in a diff."""
        head = self.model_dump(exclude={"files"})
        lines = [json.dumps(head), *(json.dumps(file.model_dump()) for file in self.files)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")

    @staticmethod
    def load(path: Path) -> Manifest:
        """DataError, with the line, if anything in it is not as it should be."""
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise DataError(f"{path} is larger than {MAX_MANIFEST_BYTES >> 20} MiB; list fewer, larger files")
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise unreadable(path, error) from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text at byte offset {error.start:,}; write the manifest again") from error
        value = _one_object(text)
        if value is None:
            value = _json_lines(path, text)
        try:
            manifest = Manifest.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{path} is not a manifest: {place}: {first['msg']}; write it again") from error
        seen: set[str] = set()
        for file in manifest.files:
            if file.path in seen:
                raise DataError(f"{path} lists {file.path} twice; list every file once")
            seen.add(file.path)
        return manifest


def _one_object(text: str) -> Any:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "files" in value else None


def _json_lines(path: Path, text: str) -> dict[str, Any]:
    head: dict[str, Any] = {}
    files: list[Any] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {error}; write the manifest again") from error
        if not files and not head and isinstance(value, dict) and "path" not in value:
            head = value
        else:
            files.append(value)
    return {**head, "files": files}


def make_manifest(
    root: Path, files: Sequence[Path], *, options: ReadOptions, tokenizer: TextTokenizer | None = None
) -> Manifest:
    """Digest and count the tokens of files below `root`. Text needs the tokenizer; arrays of tokens do not."""
    listed: list[ListedFile] = []
    is_text = False
    for path in sorted(files):
        if not path.is_relative_to(root):
            raise DataError(f"{path} lies outside {root}; a manifest lists files below one folder")
        count, counted_text = count_tokens(path, options, tokenizer)
        is_text = is_text or counted_text
        name = path.relative_to(root).as_posix()
        try:
            listed.append(ListedFile(path=name, digest=digest_file(path), bytes=path.stat().st_size, num_tokens=count))
        except ValidationError as error:
            raise DataError(f"{path} cannot be listed: {error.errors()[0]['msg']}; rename it") from error
    if not listed:
        raise DataError(f"no files below {root} were given and a manifest lists at least one; name them")
    digest = str(tokenizer.digest()) if tokenizer is not None and is_text else ""
    return Manifest(tokenizer=digest, files=tuple(listed))


@dataclass(frozen=True, kw_only=True)
class ListedData:
    """What the coordinator of listed data works with: every shard is a file."""

    shards: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    num_dropped_tokens: int  # at the end of each file


def listed_data(manifest: Manifest, options: ReadOptions, *, seed: int) -> ListedData:
    """Divide a manifest's files into training and validation.

    Files that say `split = "validation"` are held out; if none does, `options.validation` of the tokens by whole
    files. DataError if a part that is wanted comes out empty.
    """
    marked = {f.path for f in manifest.files if f.split == "validation"}
    if not marked and options.validation > 0:
        division = divide([f.num_tokens for f in manifest.files], options.validation, seed)
        smallest = min(manifest.files, key=lambda f: (f.num_tokens, f.path))
        marked = {f.path for number, f in enumerate(manifest.files) if number in division.held_out} or {smallest.path}
    parts: dict[bool, list[Shard]] = {False: [], True: []}
    num_dropped = 0
    for file in manifest.files:
        num_sequences = num_sequences_in(file.num_tokens, options.seq_len)
        num_dropped += file.num_tokens - (num_sequences * options.seq_len + 1 if num_sequences else 0)
        if num_sequences:
            shard = Shard(name=file.path, num_sequences=num_sequences, digest=file.digest)
            parts[file.path in marked].append(shard)
    for held_out, what in ((False, "training"), (True, "validation")):
        if not parts[held_out] and (not held_out or marked):
            raise DataError(
                f"the manifest lists {len(manifest.files)} files and none for {what} holds a sequence of "
                f"{options.seq_len + 1:,} tokens; list more files or lower `data.seq_len`"
            )
    return ListedData(shards=tuple(parts[False]), validation=tuple(parts[True]), num_dropped_tokens=num_dropped)
