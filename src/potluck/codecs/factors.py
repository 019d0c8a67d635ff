"""How the factors of a product travel: matrices as they are stored, rounded to the wire's type.

fp32    as it is
bf16    rounded to bf16
int8    a row x becomes round(x / s) with s = max |x| / 127
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from potluck.codecs.bundle import Rows
from potluck.types.errors import InvalidUpdate, NotFinite

least_scale = 2.0**-126
"""Of an int8 row: one whose largest value is below 127 times the smallest normal fp32 counts as zero."""


def encode(values: Tensor, wire: str) -> dict[str, Tensor]:
    """What is sent of a factor [rows, columns], any strides, on the CPU: contiguous "values", of int8 with "scales".

    NotFinite for NaN or infinity, which int8 cannot send.
    """
    if wire == "fp32":
        return {"values": values.float().contiguous()}
    if wire == "bf16":
        return {"values": values.bfloat16().contiguous()}
    rows = values.float()
    scales = rows.abs().amax(1) / 127
    if not torch.isfinite(scales).all():
        raise NotFinite(
            "a factor of a product holds NaN or infinity, which int8 does not send; lower strategy.inner.lr"
        )
    scales[scales < least_scale] = 0
    codes = (rows / torch.where(scales > 0, scales, torch.inf)[:, None]).round_().to(torch.int8)
    return {"values": codes.contiguous(), "scales": scales}


def encoded_rows(values: Tensor, wire: str) -> dict[str, Rows]:
    """What `encode` gives, made row by row as it is read: no copy of the whole."""
    shape = tuple(values.shape)

    def part(name: str) -> Callable[[int, int], Tensor]:
        return lambda i, j: encode(values[i:j], wire)[name]

    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = {"values": Rows(dtype=types.get(wire, torch.int8), shape=shape, read=part("values"))}
    if wire == "int8":
        found["scales"] = Rows(dtype=torch.float32, shape=shape[:1], read=part("scales"))
    return found


def decode(sent: Mapping[str, Tensor], wire: str) -> Tensor:
    """The factor: fp32 [rows, columns], of bf16 in bf16. InvalidUpdate if `sent` cannot be what `encode` gives."""
    values, scales = sent.get("values"), sent.get("scales")
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}.get(wire)
    if values is None or values.dim() != 2 or values.dtype != expected or (scales is None) != (wire != "int8"):
        raise InvalidUpdate(f"a factor came as {named_types(sent)}, which is no matrix of wire type {wire[:20]}")
    if scales is None:
        return values
    if scales.dtype != torch.float32 or scales.shape != values.shape[:1]:
        raise InvalidUpdate(f"a factor came as {named_types(sent)}, and int8 has an fp32 scale for each row")
    return values.float().mul_(scales[:, None])


def decoded_bytes(sent: Mapping[str, Tensor], wire: str) -> int:
    """That `decode` makes, beside what was sent."""
    return 4 * sum(x.numel() for x in sent.values()) if wire == "int8" else 0


def sent_as(values: Tensor, wire: str) -> Tensor:
    """The factor that a device decodes: what its reply is checked with. fp32 is not copied."""
    return values.float() if wire == "fp32" else decode(encode(values, wire), wire)


def named_types(tensors: Mapping[str, Tensor]) -> str:
    """For messages: what each tensor is."""
    return ", ".join(f"{name[:20]} {x.dtype} {list(x.shape)}" for name, x in tensors.items()) or "nothing"
