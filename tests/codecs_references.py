"""What each codec's bytes mean, once more and slowly, in NumPy; and how the ones with one right answer encode.

Not in `tests/codecs`, from where nothing can be imported: the standard library has a module of that name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]

golden_ratio, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
fp8_values = np.array(
    [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)], np.float64
)
fp8_values[127] = np.nan


def split_mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def noise(seed: int, index: int) -> int:
    key = split_mix((seed + golden_ratio) & mask)
    return split_mix((key + (index + 1) * golden_ratio) & mask)


def chances(seed: int, numel: int) -> F32:
    return np.array([(noise(seed, i) >> 40) * 2.0**-24 for i in range(numel)], np.float32)


def bits_of(packed: Bytes, width: int, count: int) -> npt.NDArray[np.int64]:
    """`count` numbers of `width` bits, the earliest lowest."""
    bits = np.unpackbits(packed, bitorder="little")[: count * width].reshape(count, width).astype(np.int64)
    return bits @ (1 << np.arange(width))


def by_block(table: npt.NDArray[np.float32], block: int, numel: int) -> F32:
    return np.repeat(table, block, axis=0)[:numel]


def decode(name: str, buffers: Sequence[Bytes], shape: Shape, numel: int) -> F32:
    name = name.replace("(stochastic)", "")
    if name.startswith("topk"):
        return decode_topk(name, buffers, shape, numel)
    if name.startswith("powersgd"):
        rank = int(name[9:-1])
        if len(shape) != 2 or rank * sum(shape) >= numel:
            return buffers[0].view(np.float32)
        left, right = (b.view(np.float32).reshape(rank, -1) for b in buffers)
        out = left[0][:, None] * right[0]
        for k in range(1, rank):
            out = out + left[k][:, None] * right[k]
        return out.reshape(-1)
    match name:
        case "fp32":
            return buffers[0].view(np.float32)
        case "bf16":
            return (buffers[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "fp16":
            return buffers[1].view(np.float16).astype(np.float32) * buffers[0].view(np.float32)[0]
        case "fp8":
            row = (shape[-1] or 1) if shape else 1
            values = (fp8_values[buffers[1] & 127] * np.where(buffers[1] & 128, -1, 1)).astype(np.float32)
            return values * by_block(buffers[0].view(np.float32), row, numel)
        case "int8":
            return buffers[1].view(np.int8) * by_block(buffers[0].view(np.float32), 4096, numel)
        case "int4":
            scales = (buffers[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return (bits_of(buffers[1], 4, numel) - 8).astype(np.float32) * by_block(scales, 64, numel)
        case "2bit":
            table = by_block(buffers[0].view(np.float32).reshape(-1, 4), 4096, numel)
            return np.take_along_axis(table, bits_of(buffers[1], 2, numel)[:, None], axis=1)[:, 0]
        case "1bit":
            signs = np.where(bits_of(buffers[1], 1, numel), -1, 1).astype(np.float32)
            return signs * by_block(buffers[0].view(np.float32), 4096, numel)
        case _:
            raise AssertionError(name)


def chunks_of(shape: Shape, numel: int) -> list[npt.NDArray[np.int64]]:
    """The places in the tensor of each chunk's elements."""
    places = np.arange(numel)
    if numel and len(shape) == 2 and shape[0] % 64 == 0 and shape[1] % 64 == 0:
        tiles = places.reshape(shape[0] // 64, 64, shape[1] // 64, 64).transpose(0, 2, 1, 3)
        return list(tiles.reshape(-1, 4096))
    return [places[i : i + 4096] for i in range(0, numel, 4096)]


def kept_of(k: int, shape: Shape, values: F32) -> npt.NDArray[np.int64]:
    """For each chunk the places, in their chunk, of the largest; equal ones by place."""
    found = []
    for places in chunks_of(shape, len(values)):
        order = np.argsort(-np.abs(values[places]), kind="stable")
        found.append(np.sort(order[: math.ceil(k * len(places) / 4096)]))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def decode_topk(name: str, buffers: Sequence[Bytes], shape: Shape, numel: int) -> F32:
    percent, _, values = name[5:].partition("%)")
    k = round(float(percent) * 40.96)
    chunks = chunks_of(shape, numel)
    counts = [math.ceil(k * len(places) / 4096) for places in chunks]
    kept = decode(values[1:] or "fp32", buffers[1:], (sum(counts),), sum(counts))
    positions = bits_of(buffers[0], 12, sum(counts))
    out, start = np.zeros(numel, np.float32), 0
    for places, count in zip(chunks, counts, strict=True):
        out[places[positions[start : start + count]]] = kept[start : start + count]
        start += count
    return out


def encode_int(values: F32, levels: int, block: int, seed: int | None, *, bf16_scale: bool) -> tuple[F32, F32]:
    """Scales and levels."""
    scales, codes = [], []
    chance = None if seed is None else chances(seed, len(values))
    top = np.nextafter(np.finfo(np.float32).max / np.float32(levels), np.float32(0))
    for i in range(0, len(values), block):
        part = values[i : i + block]
        scale = np.float32(np.abs(part).max() / np.float32(levels))
        scale = scale if bf16_scale else min(scale, top)
        scale = np.float32(0) if scale < np.finfo(np.float32).tiny else np.float32(scale)
        if bf16_scale:
            up = (int(scale.view(np.uint32)) + 0xFFFF) & 0xFFFF0000
            scale = np.array([min(up, int(top.view(np.uint32)) & 0xFFFF0000)], np.uint32).view(np.float32)[0]
        exact = part * (np.float32(1) / scale if scale else np.float32(0))
        if chance is None:
            whole = np.rint(exact)
        else:
            low = np.floor(exact)
            whole = low + (chance[i : i + block] < exact - low)
        scales.append(scale)
        codes.append(np.clip(whole, -levels, levels))
    empty = np.empty(0, np.float32)
    return np.array(scales, np.float32), np.concatenate(codes) if codes else empty
