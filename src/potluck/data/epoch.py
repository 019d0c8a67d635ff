"""The order of the data in an epoch: the same on every machine, operating system and library version.

A permutation of n items is the stable argsort of the first n raw 64-bit outputs of Philox4x64-10, keyed with the
first 16 bytes of sha256("seed/epoch/name"). Raw outputs are part of Philox's definition, so this can be done in any
language; numpy's `permutation` may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(key: str, num_items: int) -> NDArray[np.int64]:
    """The permutation of range(num_items) that `key` names."""
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], dtype="<u8").astype(np.uint64)
    raw = np.random.Philox(key=words).random_raw(num_items)
    return np.argsort(np.asarray(raw, dtype=np.uint64), kind="stable").astype(np.int64)


def epoch_order(seed: int, epoch: int, shard: str, num_sequences: int) -> NDArray[np.int64]:
    """The order in which a shard's sequences are read in an epoch: position -> sequence."""
    return permutation(f"{seed}/{epoch}/sequences/{shard}", num_sequences)


def shard_order(seed: int, epoch: int, num_shards: int) -> NDArray[np.int64]:
    """The order in which shards are dealt in an epoch: position -> shard."""
    return permutation(f"{seed}/{epoch}/shards", num_shards)
