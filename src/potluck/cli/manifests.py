"""`potluck manifest`: from a folder of files to the list that a run with `data.listed` deals from."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from potluck.data.config import ReadOptions, TokenType
from potluck.data.manifest import make_manifest
from potluck.data.tokenizer import TextTokenizer
from potluck.types.errors import DataError


def write_manifest(folder: Path, out: Path, *, tokenizer: Path | None, token_type: str) -> str:
    """Write it, and say what it lists. Files whose names begin with a dot are left out, and so is `out` itself."""
    if token_type not in get_args(TokenType):
        raise DataError(f"{token_type!r} is no type of tokens; choose one of {', '.join(get_args(TokenType))}")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the one with the files")
    folder = folder.resolve()  # a relative path of a file would be taken to be below the folder
    files = [
        path for path in folder.rglob("*")
        if path.is_file() and path.resolve() != out.resolve()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]  # fmt: skip
    options = ReadOptions(seq_len=1, token_type=cast("TokenType", token_type))
    made = make_manifest(folder, files, options=options, tokenizer=TextTokenizer.open(tokenizer) if tokenizer else None)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made.save(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror or error}); give another --out") from error
    num_tokens = sum(file.num_tokens for file in made.files)
    return f"{out} lists {len(made.files)} files, {num_tokens:,} tokens; name it in the recipe as data.listed"
