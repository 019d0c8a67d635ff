"""A worker's own copies of listed files: found by name, checked by digest, opened as sequences.

Arrays of tokens are mapped where they are. Text is tokenised once into a cache folder. A file's digest is worked out
once and remembered with its size and time of change.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from potluck.data.config import ReadOptions
from potluck.data.packing import tokenise
from potluck.data.readers import Reader
from potluck.data.shards import Span
from potluck.data.sources import Source, find_sources
from potluck.data.stream import Sequences, stream_sequences
from potluck.data.token_arrays import TokenArray, check_vocabulary, highest_token, open_tokens
from potluck.data.tokenizer import TextTokenizer
from potluck.storage.digest import check_digest, digest_bytes, digest_file
from potluck.storage.files import write_atomic
from potluck.types.errors import CorruptError, DataError


def count_tokens(path: Path, options: ReadOptions, tokenizer: TextTokenizer | None) -> tuple[int, bool]:
    """Tokens of a file as a worker will see them, and whether it is text."""
    source = _source(path, options)
    if source.kind == "tokens":
        return len(open_tokens(path, options.token_type)), False
    if tokenizer is None:
        raise DataError(
            f"{path} is text and counting its tokens needs a tokenizer; name it with `--tokenizer` or `data.tokenizer`"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return int(_tokenised(source, options, tokenizer, Path(folder) / "tokens.bin")), True


def _source(path: Path, options: ReadOptions) -> Source:
    sources, _ = find_sources([path], format=options.format, base=path.parent)
    if len(sources) != 1 or sources[0].kind == "datasets":
        raise DataError(f"{path} is not one file and a manifest lists files; list those inside")
    return sources[0]


def _tokenised(source: Source, options: ReadOptions, tokenizer: TextTokenizer, path: Path) -> int:
    """Writes the file's tokens to `path` and returns their number."""
    documents = Reader([source], options.text_field).documents()
    return int(tokenise(documents, tokenizer, path).lengths().sum())


class ListedFiles:
    """Opens the files that spans name. Blocks: call it where compute runs.

    `root` is the folder with the copies; `cache_dir` keeps digests and tokenised text. What is raised may be told to
    the coordinator, and says no more of the folder than the name it gave; `told` hears the rest.
    """

    def __init__(
        self,
        root: Path,
        *,
        options: ReadOptions,
        vocab_size: int,
        cache_dir: Path,
        tokenizer: TextTokenizer | None = None,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._root = root
        self._options = options
        self._vocab_size = vocab_size
        self._cache_dir = cache_dir
        self._tokenizer, self._told = tokenizer, told
        self._known = _read_known(cache_dir / "digests.json")
        self._opened: dict[str, Sequences] = {}

    def open(self, span: Span) -> Sequences:
        """The sequences of the file that `span` names.

        DataError if it is missing, CorruptError if it differs from the listed one or is shorter than the span.
        """
        sequences = self._opened.get(span.digest)
        if sequences is None:
            path = self._locate(span.shard)
            try:
                sequences = self._opened[span.digest] = self._read(path, span.digest)
            except (CorruptError, DataError, OSError) as error:
                self._told(str(error))
                if isinstance(error, CorruptError):
                    raise CorruptError(
                        f"the copy of {span.shard!r} here is another file than is listed; copy the file again"
                    ) from error
                raise DataError(
                    f"the copy of {span.shard!r} here cannot be used; its worker's owner is told why"
                ) from error
        return sequences

    def _read(self, path: Path, digest: str) -> Sequences:
        """What is raised is for the owner only."""
        source = _source(path, self._options)
        self._check(source, digest)
        return stream_sequences(self._tokens(source, digest), self._options.seq_len)

    def _locate(self, name: str) -> Path:
        path = (self._root / name).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise CorruptError(
                f"the coordinator names the file {name!r}, which lies outside the folder of --data; leave this run"
            )
        if not path.is_file():
            raise DataError(
                f"{name!r} is listed in this run and is not here; copy it, or give another folder with --data"
            )
        return path

    def _check(self, source: Source, digest: str) -> None:
        """Digest and range of tokens; both read the whole file, so both are remembered."""
        path = source.path
        stat = path.stat()
        mark = [stat.st_size, stat.st_mtime_ns, self._options.token_type]
        listed = check_digest(digest)
        kind = listed.partition(":")[0]
        known = self._known.get(str(path))
        if known is None or known[:3] != mark or len(known) != 5 or known[3].partition(":")[0] != kind:
            highest = highest_token(path, self._array(path)) if source.kind == "tokens" else 0
            known = [*mark, str(digest_file(path, like=listed)), highest]
            self._known[str(path)] = known
            write_atomic(self._cache_dir / "digests.json", json.dumps(self._known).encode())
        if known[3] != digest:
            raise CorruptError(f"{path} has the digest {known[3]} and {digest} is listed; copy the file again")
        check_vocabulary(path, int(known[4]), self._vocab_size)

    def _array(self, path: Path) -> TokenArray:
        return open_tokens(path, self._options.token_type)

    def _tokens(self, source: Source, digest: str) -> TokenArray:
        path = source.path
        if source.kind == "tokens":
            return self._array(path)
        if self._tokenizer is None:
            raise DataError(
                f"{path} is text and this run has no tokenizer; list arrays of tokens or set `data.tokenizer`"
            )
        settings = [digest, self._tokenizer.digest(), self._options.text_field, source.kind]
        ready = self._cache_dir / f"tokens-{digest_bytes(json.dumps(settings).encode()).split(':')[-1][:32]}.npy"
        if not ready.exists():
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._cache_dir, ignore_cleanup_errors=True) as folder:
                raw = Path(folder) / "tokens.bin"
                tokens = tokenise(Reader([source], self._options.text_field).documents(), self._tokenizer, raw)
                made = Path(folder) / "tokens.npy"
                np.save(made, tokens.arrays[0], allow_pickle=False)
                os.replace(made, ready)
        return open_tokens(ready)


def _read_known(path: Path) -> dict[str, list[Any]]:
    """What is remembered; nothing if that is not readable, for then it is worked out again."""
    try:
        known: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
