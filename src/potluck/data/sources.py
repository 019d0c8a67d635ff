"""From what a recipe or a worker's owner names to files with a known format.

A path may be a file, a folder (searched through, hidden files apart), a glob or a saved `datasets` directory. A file
that was named itself must be readable; one that was found in a folder or by a glob is skipped, counted and reported
where it is not.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from potluck.data.config import RECORD_FIELDS, Format
from potluck.data.stdlib import NAME as STDLIB
from potluck.data.stdlib import stdlib_files, stdlib_root
from potluck.storage.digest import digest_bytes, digest_file
from potluck.types.errors import DataError
from potluck.types.ids import Digest

Kind = Literal["text", "jsonl", "parquet", "datasets", "tokens"]

_suffixes: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    ".npy": "tokens",
    ".bin": "tokens",
}
_text_names = (
    "txt text md rst tex html htm xml csv tsv log org adoc srt eml py pyi c h cc cpp hpp cs java js ts jsx tsx go rs "
    "rb php pl r jl lua sh sql swift kt scala hs ml clj ex erl f90 m css yaml yml toml ini cfg"
)
_text_suffixes = frozenset(f".{name}" for name in _text_names.split())


@dataclass(frozen=True)
class Source:
    """One file (or saved dataset): where it is, what people call it and how it is read."""

    path: Path
    name: str
    kind: Kind
    named: bool  # by a person, and not found in a folder: then a fault in it is an error


def find_sources(paths: Sequence[str | Path], *, format: Format, base: Path) -> tuple[list[Source], list[Path]]:
    """The files that `paths` mean, relative to `base`, and those found beside them that are of no known kind.

    DataError if a path is missing, a folder is empty, or arrays of tokens are mixed with text.
    """
    sources: list[Source] = []
    unknown: list[Path] = []
    for given in paths:
        if str(given) == STDLIB:
            root = stdlib_root()
            sources += [Source(p, p.relative_to(root).as_posix(), "text", False) for p in stdlib_files(root)]
            continue
        path = base / Path(given).expanduser()
        found, others = _find(path, str(given), format)
        sources += found
        unknown += others
    sources = list({source.path: source for source in sources}.values())
    if not sources:
        raise DataError("no data was given; name files with `data.shared` or `join --data`")
    num_tokens = sum(source.kind == "tokens" for source in sources)
    if 0 < num_tokens < len(sources):
        raise DataError(
            f"{num_tokens} of {len(sources)} data files are arrays of tokens and the others text; give only one of both"
        )
    return sources, unknown


def _find(path: Path, given: str, format: Format) -> tuple[list[Source], list[Path]]:
    if _is_saved_dataset(path):
        return [Source(path, path.name, "datasets", True)], []
    if path.is_dir():
        inside = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        sources, unknown = _sort(inside, path, format)
    elif path.exists():
        usual: Kind = "jsonl" if format in RECORD_FIELDS else "text"
        return [Source(path, path.name, _kind(path, format) or usual, True)], []
    elif glob.has_magic(given):
        sources, unknown = _sort(map(Path, glob.iglob(str(path), recursive=True)), path.parent, format)
    else:
        raise DataError(f"{path} does not exist; check the path in `data.shared` or `join --data`")
    if not sources:
        seen = f"{len(unknown)} files of no known kind" if unknown else "no files"
        hint = "name files, or say what they are with `format`" if unknown else "put text there or name other files"
        raise DataError(f"{path} holds {seen} and one data file is needed; {hint}")
    return sources, unknown


def _sort(found: Iterable[Path], root: Path, format: Format) -> tuple[list[Source], list[Path]]:
    sources: list[Source] = []
    unknown: list[Path] = []
    for path in sorted((p for p in found if p.is_file()), key=lambda p: p.as_posix()):
        kind = _kind(path, format)
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        if kind is None:
            unknown.append(path)
        else:
            sources.append(Source(path, name, kind, False))
    return sources, unknown


def _kind(path: Path, format: Format) -> Kind | None:
    suffix = path.suffix.lower()
    match format:
        case "auto":
            return "text" if suffix in _text_suffixes else _suffixes.get(suffix)
        case "instruct" | "chat" | "preference":
            kind = _suffixes.get(suffix)
            return kind if kind != "tokens" else None
        case _:
            return format


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def corpus_digest(sources: Iterable[Source]) -> Digest:
    """Of the names and the contents of all files, in order."""
    lines: list[list[str]] = []
    for source in sources:
        inside = sorted(p for p in source.path.rglob("*") if p.is_file()) if source.path.is_dir() else [source.path]
        for path in inside:
            name = source.name if path == source.path else f"{source.name}/{path.relative_to(source.path).as_posix()}"
            try:
                lines.append([name, source.kind, digest_file(path)])
            except OSError as error:
                if source.named:
                    raise unreadable(path, error) from error
                lines.append([name, source.kind, ""])
    return digest_bytes(json.dumps(lines).encode())


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}; check that it exists and its permissions")
