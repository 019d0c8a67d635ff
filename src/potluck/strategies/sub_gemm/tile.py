"""What a device does with a piece of a product: C[m, q] = A[m, n] B[n, q].

    fp32 factors    C in fp32
    bf16            products are exact, sums in fp32, C rounded to bf16
    int8            the same with the rows that they stand for (codecs/factors.py)

Factors come as they are stored, and flags say which of them is to be read transposed: nobody copies to transpose.
The result is a function of the factors, on one machine with one number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from potluck.codecs.factors import named_types
from potluck.types.errors import InvalidUpdate

REPLY_TYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
"""The types that factors travel in, and what a product of such factors comes back as."""
num_blocks = 16
"""In which a product is made that is rounded in the end."""


def multiply(
    a: Tensor, b: Tensor, *, wire: str, is_a_transposed: bool = False, is_b_transposed: bool = False
) -> Tensor:
    """A B, fp32 [m, q] where `wire` is "fp32" and bf16 else, on the device of the factors.

    a is [m, n], or stored as [n, m] if it is transposed; b likewise. InvalidUpdate if they cannot be multiplied.
    """
    a, b = a.T if is_a_transposed else a, b.T if is_b_transposed else b
    known = {torch.float32, torch.bfloat16}
    if (
        wire not in REPLY_TYPES
        or {a.dtype, b.dtype} - known
        or a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != b.shape[0]
    ):
        raise InvalidUpdate(
            f"a piece multiplies {named_types({'a': a, 'b': b})} on wire type {wire[:20]!r}, which cannot be; check "
            "the coordinator's version"
        )
    with torch.no_grad(), _whole_precision():
        if wire == "bf16" and a.dtype == b.dtype == torch.bfloat16 and _rounds_once(a.device):
            return a @ b
        return a.float() @ b.float() if wire == "fp32" else _in_blocks(a, b, REPLY_TYPES[wire])


def needed_bytes(a: Tensor, b: Tensor, *, wire: str, is_a_transposed: bool, is_b_transposed: bool) -> int:
    """Of memory for `multiply`, factors and result included, but for some rows at a time."""
    rows, cols = a.shape[1 if is_a_transposed else 0], b.shape[0 if is_b_transposed else 1]
    copied = sum(4 * x.numel() for x in (a, b) if x.dtype != torch.float32)
    if wire != "fp32" and copied:
        copied = 4 * min(a.numel(), b.numel())
    return a.nbytes + b.nbytes + copied + rows * cols * REPLY_TYPES.get(wire, torch.float32).itemsize


def _in_blocks(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A B, its sums in fp32. The smaller factor is copied to fp32 as a whole, the rest some rows at a time."""
    if a.numel() < b.numel():
        return _in_blocks(b.T, a.T, dtype).T
    result, whole = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device), b.float()
    for rows, part in zip(a.tensor_split(num_blocks), result.tensor_split(num_blocks), strict=True):
        part.copy_(rows.float() @ whole)
    return result


_verdicts: dict[str, bool] = {}


def _rounds_once(device: torch.device) -> bool:
    """Whether bf16 products are summed in fp32 here: asked once, of products whose partial sums bf16 would lose."""
    if device.type not in _verdicts:
        size = 1024
        a = torch.ones(32, size, dtype=torch.bfloat16, device=device)
        b = (torch.arange(size * 32, device=device).reshape(size, 32) % 7 + 1).bfloat16()
        _verdicts[device.type] = torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
    return _verdicts[device.type]


@contextmanager
def _whole_precision() -> Iterator[None]:
    """On CUDA, sums of bf16 in fp32 and products of fp32 in fp32, whatever this process has set."""
    if not torch.cuda.is_initialized():
        yield
        return
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction
    flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction = False, False
    try:
        yield
    finally:
        flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction = before
