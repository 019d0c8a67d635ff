"""A safetensors file written one tensor after another: no more than one of them is ever in memory.

The format: u64 length of the header, the header as JSON (name -> dtype, shape, [start, stop) in bytes), the data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.types.disk import full_disk_named, open_over

dtype_names: dict[torch.dtype, str] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}
_piece_bytes = 64 << 20
"""Some systems refuse writes of 2 GiB and more."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its name and what it is of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header(tensors: Sequence[Stored]) -> bytes:
    """What comes before the data, its own length included: a multiple of 8 bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        described[tensor.name] = {
            "dtype": dtype_names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop],
        }  # fmt: skip
        start = stop
    encoded = json.dumps(described).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def file_bytes(tensors: Sequence[Stored]) -> int:
    return len(header(tensors)) + sum(tensor.num_bytes for tensor in tensors)


def write_tensor_file(path: Path, tensors: Sequence[Stored], values: Iterable[Tensor]) -> None:
    """Write the file, synced to the disk. `values` gives what `tensors` say, in their order; each is asked for when the
    one before is written. ResourceError on a full disk.
    """
    with full_disk_named(path, file_bytes(tensors)), open_over(path) as file:
        file.write(header(tensors))
        for tensor, value in zip(tensors, values, strict=True):
            assert (value.dtype, tuple(value.shape)) == (tensor.dtype, tensor.shape), f"{tensor} got {value.shape}"
            data = memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), _piece_bytes):
                file.write(data[start : start + _piece_bytes])
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
