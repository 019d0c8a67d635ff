"""Arrays of tokens on disk: `.npy` files and raw `.bin` files, mapped into memory, never read whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.data.config import TokenType
from potluck.data.sources import unreadable
from potluck.types.errors import DataError

TokenArray = NDArray[np.integer]
_accepted = (np.uint16, np.uint32, np.int32, np.int64)
_block = 1 << 22


def open_tokens(path: Path, token_type: TokenType = "uint16") -> TokenArray:
    """A one-dimensional map of the tokens in `path`. `token_type` is what a raw `.bin` file holds.

    DataError if it is missing, empty, cut short or holds something else.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} holds no tokens: it is empty; leave it out or write it again")
        if path.suffix.lower() == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            item = np.dtype(token_type).newbyteorder("<")
            if size % item.itemsize:
                raise DataError(
                    f"{path} is {size:,} bytes long and {token_type} tokens need a multiple of {item.itemsize}; "
                    "set `data.token_type` or write it again"
                )
            array = np.memmap(path, dtype=item, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError, SyntaxError) as error:
        raise DataError(f"{path} is not a whole .npy array: {error}; write it again with numpy.save") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.newbyteorder("=") not in _accepted:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise DataError(
            f"{path} holds {found} and tokens are a one-dimensional array of uint16, uint32, int32 or int64; "
            "write it again with numpy.save"
        )
    if array.size == 0:
        raise DataError(f"{path} holds no tokens: its array is empty; leave it out or write it again")
    return array


def token_type_for(vocab_size: int) -> np.dtype[np.integer]:
    """The smallest type that bundles carry and that holds every token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def highest_token(path: Path, tokens: TokenArray) -> int:
    """The largest token. DataError if one is negative. Reads everything once, in blocks."""
    highest = 0
    for start, block in blocks(tokens):
        if block.min() < 0:
            at = start + int(np.argmax(block < 0))
            raise DataError(
                f"{path} holds token {int(tokens[at])} at position {at:,} and 0 is the least; write it again"
            )
        highest = max(highest, int(block.max()))
    return highest


def check_vocabulary(path: Path, highest: int, vocab_size: int) -> None:
    """DataError if a token is not in the vocabulary."""
    if highest >= vocab_size:
        raise DataError(
            f"{path} holds token {highest} and the vocabulary has {vocab_size:,} entries; "
            "use the tokenizer it was made with, or set `data.token_type` if it is a .bin file"
        )


def blocks(tokens: TokenArray) -> Iterator[tuple[int, TokenArray]]:
    """(start, slice) for slices of bounded size."""
    for start in range(0, len(tokens), _block):
        yield start, np.asarray(tokens[start : start + _block])


def document_stops(tokens: TokenArray, eos_id: int, block_tokens: int) -> NDArray[np.int64]:
    """Where documents end in a stream: after each `eos_id`; every `block_tokens` if there is none."""
    found = [start + np.flatnonzero(block == eos_id) + 1 for start, block in blocks(tokens)]
    stops = np.concatenate(found).astype(np.int64)
    if not stops.size:
        stops = np.arange(block_tokens, len(tokens), block_tokens, dtype=np.int64)
    if not stops.size or stops[-1] != len(tokens):
        stops = np.append(stops, len(tokens))
    return stops
