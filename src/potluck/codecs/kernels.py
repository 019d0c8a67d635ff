"""The loops of dense codecs and what other loops need, compiled by numba when first called; this imports numba.

A dense codec says how one code becomes a value (`load`, `level` and `per`, its codes for each stored item);
`decoder` and `adder` make of it the loops

    out[i] = level(code_i, t)        into[i] = into[i] + weight * level(code_i, t)        t = load(tables, i // block)

No fused multiply-add and no reordering of sums: the bits are those of the same operations done one by one, whatever
the slicing, the threads and the processor. Callers see to it that every index is inside its array.

Encoders take values and `bits`, their int32 view, whole blocks from the element `base` on, and return whether all are
finite; the equations are in the codecs' own files. All is in one file because numba compiles anew, where a kernel is
kept from an earlier run, only when the file that the kernel is in has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

num_lanes = 8
"""Partial sums of squares, so that the processor adds several at a time."""

tile_numel = 4096


def kernel(function: F) -> F:
    """Compile, without the interpreter's lock, to machine code that is kept on disk beside the source or in a cache."""
    return cast(F, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))


def specialise(template: F, name: str, **names: Any) -> F:
    """The kernel of a copy of `template` in which global names mean `names`.

    A closure over kernels would do the same, but numba does not find closures again in its cache.
    """
    source = cast(FunctionType, template)
    copy = FunctionType(source.__code__, source.__globals__ | names, name, source.__defaults__)
    copy.__qualname__, copy.__module__ = name, source.__module__
    return cast(F, kernel(copy))


# Decoding


def _load(tables: Any, number: int) -> Any:
    """What `level` needs of block `number`."""
    raise NotImplementedError


def _level(code: Any, place: int, loaded: Any) -> Any:
    """The value of the code at `place` of one stored item."""
    raise NotImplementedError


def _run(codes: Any, loaded: Any, weight: Any, out: Any) -> None:
    raise NotImplementedError


_per = 1


def _set_run(codes: Any, loaded: Any, weight: Any, out: Any) -> None:
    for j in range(codes.shape[0]):
        code = codes[j]
        for place in range(_per):
            out[j * _per + place] = _level(code, place, loaded)


def _add_run(codes: Any, loaded: Any, weight: Any, out: Any) -> None:
    for j in range(codes.shape[0]):
        code = codes[j]
        for place in range(_per):
            out[j * _per + place] += weight * _level(code, place, loaded)


def _set_one(codes: Any, loaded: Any, weight: Any, i: int, out: Any, to: int) -> None:
    out[to] = _level(codes[i // _per], i % _per, loaded)


def _add_one(codes: Any, loaded: Any, weight: Any, i: int, out: Any, to: int) -> None:
    out[to] += weight * _level(codes[i // _per], i % _per, loaded)


def _one(codes: Any, loaded: Any, weight: Any, i: int, out: Any, to: int) -> None:
    raise NotImplementedError


def _fold(codes: Any, tables: Any, block: int, start: int, weight: Any, out: Any) -> None:
    """`tables` starts with the block that `start` is in; `codes` are those of the whole tensor."""
    stop = start + out.shape[0]
    first = start // block
    for number in range(tables.shape[0]):
        low = max(start, (first + number) * block)
        high = min(stop, (first + number + 1) * block)
        loaded = _load(tables, number)
        while low < high and low % _per:
            _one(codes, loaded, weight, low, out, low - start)
            low += 1
        whole = max(0, high - low) // _per
        run = codes[low // _per : low // _per + whole]
        _run(run, loaded, weight, out[low - start : low - start + whole * _per])
        for i in range(low + whole * _per, high):
            _one(codes, loaded, weight, i, out, i - start)


def decoder(name: str, load: Callable[..., Any], level: Callable[..., Any], per: int = 1) -> Callable[..., None]:
    """`decode(codes, tables, block, start, weight, out)`, which does not look at the weight."""
    return _specialise_fold(f"decode_{name}", _set_run, _set_one, load, level, per)


def adder(name: str, load: Callable[..., Any], level: Callable[..., Any], per: int = 1) -> Callable[..., None]:
    """`add(codes, tables, block, start, weight, into)`: each product is rounded, then each sum."""
    return _specialise_fold(f"add_{name}", _add_run, _add_one, load, level, per)


def _specialise_fold(
    name: str, run: Callable[..., None], one: Callable[..., None], load: Any, level: Any, per: int
) -> Callable[..., None]:
    names = {"_load": load, "_level": level, "_per": per}
    names |= {"_run": specialise(run, f"{name}_run", **names), "_one": specialise(one, f"{name}_one", **names)}
    return specialise(_fold, name, **names)


# Sums and checks


def _decode(codes: Any, tables: Any, block: int, start: int, weight: Any, out: Any) -> None:
    raise NotImplementedError


def _fold_squares(codes: Any, tables: Any, block: int, start: int, stop: int, lanes: Any) -> None:
    tile = np.empty(tile_numel, np.float32)
    for low in range(start, stop, tile_numel):
        high = min(low + tile_numel, stop)
        of_tile = tables[low // block - start // block : (high + block - 1) // block - start // block]
        _decode(codes, of_tile, block, low, np.float32(1), tile[: high - low])
        sum_squares(tile[: high - low], lanes)


def squarer(name: str, decode: Callable[..., None]) -> Callable[..., None]:
    """`squares(codes, tables, block, start, stop, lanes)`: `sum_squares` of what `decode` gives, 16 KiB at a time."""
    return specialise(_fold_squares, f"squares_{name}", _decode=decode)


@kernel
def sum_squares(values: Any, lanes: Any) -> None:
    """`lanes[i % 8] += values[i]^2` in fp64. Squares of fp32 fit fp64, so it stays finite if the values are."""
    whole = values.shape[0] // num_lanes * num_lanes
    for i in range(0, whole, num_lanes):
        for lane in range(num_lanes):
            value = np.float64(values[i + lane])
            lanes[lane] += value * value
    for i in range(whole, values.shape[0]):
        value = np.float64(values[i])
        lanes[i - whole] += value * value


@kernel
def largest_bits(bits: Any) -> Any:
    """The magnitude bits of the largest |x|, from int32 views of fp32; 0x7F800000 and above is not finite."""
    found = np.int32(0)
    for i in range(bits.shape[0]):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))  # numba would widen it to 64 bits, and halve the speed
        if magnitude > found:
            found = magnitude
    return found


@kernel
def add(values: Any, weight: Any, into: Any) -> None:
    for i in range(values.shape[0]):
        into[i] += weight * values[i]


# Chance


@kernel
def noise(key: Any, index: Any) -> Any:
    """64 bits that are a function of key and index: SplitMix64 (Steele et al. 2014) at position `index`."""
    mixed = np.uint64(key) + (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@kernel
def chance(key: Any, index: Any) -> Any:
    """A multiple of 2^-24 in [0, 1), fp32."""
    return np.float32(noise(key, index) >> np.uint64(40)) * np.float32(2.0**-24)


@kernel
def round_noisy(value: Any, key: Any, index: Any) -> Any:
    """floor(value), plus one with the probability of what that cuts off."""
    low = np.floor(value)
    if chance(key, index) < value - low:
        return low + np.float32(1)
    return low


_not_finite = np.int32(0x7F800000)
_magnitude = np.int32(0x7FFFFFFF)
_tiny = np.float32(2.0**-126)
_infinity = np.float32(np.inf)


@kernel
def _no_table(tables: Any, number: int) -> Any:
    return np.float32(1)


@kernel
def _scale(tables: Any, number: int) -> Any:
    return tables[number, 0]


# fp32 and bf16: codes are bits


@kernel
def _level_fp32(code: Any, place: int, loaded: Any) -> Any:
    return code


decode_fp32 = decoder("fp32", _no_table, _level_fp32)
add_fp32 = adder("fp32", _no_table, _level_fp32)
squares_fp32 = squarer("fp32", decode_fp32)


@kernel
def encode_bf16(bits: Any, codes: Any, key: Any, base: int, stochastic: bool) -> bool:
    for i in range(bits.shape[0]):
        magnitude = np.int32(bits[i] & _magnitude)
        if stochastic:
            cut = np.int32(noise(key, base + i) >> np.uint64(48))
        else:
            cut = np.int32(np.int32(0x7FFF) + np.int32(np.int32(magnitude >> 16) & np.int32(1)))
        code = np.int32(np.int32(magnitude + cut) >> 16)
        code = code if code < np.int32(0x7F7F) else np.int32(0x7F7F)
        codes[i] = np.uint16(code | np.int32(np.int32(bits[i] >> 16) & np.int32(0x8000)))
    return largest_bits(bits) < _not_finite


@kernel
def _level_bf16(code: Any, place: int, loaded: Any) -> Any:
    return np.int32(np.uint32(code) << np.uint32(16)).view(np.float32)


decode_bf16 = decoder("bf16", _no_table, _level_bf16)
add_bf16 = adder("bf16", _no_table, _level_bf16)
squares_bf16 = squarer("bf16", decode_bf16)


# fp16: the scale is a power of two


@kernel
def encode_fp16(values: Any, codes: Any, scale: Any, most: int) -> None:
    """|values / scale| < 2^15; `most` is the code of the largest that is sent."""
    inverse = np.float32(1) / scale
    for i in range(values.shape[0]):
        small = np.float32(values[i] * inverse)
        bits = small.view(np.int32)
        magnitude = np.int32(bits & _magnitude)
        odd = np.int32(np.int32(magnitude >> 13) & np.int32(1))
        normal = np.int32(np.int32(magnitude + np.int32(odd - np.int32((112 << 23) - 0xFFF))) >> 13)
        below = np.int32(np.rint(abs(small) * np.float32(2.0**24)))
        code = below if magnitude < np.int32(113 << 23) else normal
        code = code if code < np.int32(most) else np.int32(most)
        codes[i] = np.uint16(code | np.int32(np.int32(bits >> 16) & np.int32(0x8000)))


@kernel
def _level_fp16(code: Any, place: int, loaded: Any) -> Any:
    magnitude = np.int32(code) & np.int32(0x7FFF)
    normal = np.int32((magnitude << 13) + (112 << 23)).view(np.float32)
    below = np.float32(magnitude) * np.float32(2.0**-24)
    value = below if magnitude < 0x400 else normal
    value = np.float32(np.nan) if magnitude >= 0x7C00 else value
    return (-value if code >= 0x8000 else value) * loaded


decode_fp16 = decoder("fp16", _scale, _level_fp16)
add_fp16 = adder("fp16", _scale, _level_fp16)
squares_fp16 = squarer("fp16", decode_fp16)


# fp8 e4m3


@kernel
def _scale_of(largest: Any, levels: Any, most: Any) -> Any:
    scale = min(np.int32(largest).view(np.float32) / levels, most)
    return np.float32(0) if scale < _tiny else scale


@kernel
def _inverse(scale: Any) -> Any:
    """What values are multiplied by: dividing each would take twice as long, for at most one unit in the last place."""
    return np.float32(1) / scale if scale > np.float32(0) else np.float32(0)


@kernel
def _code_fp8(value: Any, key: Any, index: int, stochastic: bool) -> Any:
    """Of |value| <= 448 or a little more."""
    bits = np.float32(value).view(np.int32)
    magnitude = np.int32(bits & _magnitude)
    small = abs(value) * np.float32(512)
    if stochastic:
        cut = np.int32(noise(key, index) >> np.uint64(44))
        below = np.int32(round_noisy(small, key, index))
    else:
        cut = np.int32(np.int32(0x7FFFF) + np.int32(np.int32(magnitude >> 20) & np.int32(1)))
        below = np.int32(np.rint(small))
    normal = np.int32(np.int32(magnitude + np.int32(cut - np.int32(120 << 23))) >> 20)
    normal = normal if normal < np.int32(0x7E) else np.int32(0x7E)
    code = below if magnitude < np.int32(121 << 23) else normal
    return np.uint8(code | np.int32(np.int32(bits >> 24) & np.int32(0x80)))


@kernel
def _run_fp8(values: Any, codes: Any, inverse: Any) -> None:
    for i in range(values.shape[0]):
        codes[i] = _code_fp8(values[i] * inverse, np.uint64(0), 0, False)


@kernel
def encode_fp8(
    values: Any, bits: Any, codes: Any, scales: Any, block: int, most: Any, key: Any, base: int, stochastic: bool
) -> bool:
    for number in range(scales.shape[0]):
        low = number * block
        high = min(low + block, values.shape[0])
        largest = largest_bits(bits[low:high])
        if largest >= _not_finite:
            return False
        scales[number] = _scale_of(largest, np.float32(448), most)
        inverse = _inverse(scales[number])
        if stochastic:
            for i in range(low, high):
                codes[i] = _code_fp8(values[i] * inverse, key, base + i, True)
        else:
            _run_fp8(values[low:high], codes[low:high], inverse)
    return True


@kernel
def _level_fp8(code: Any, place: int, loaded: Any) -> Any:
    magnitude = np.int32(code) & np.int32(0x7F)
    normal = np.int32((magnitude << 20) + (120 << 23)).view(np.float32)
    below = np.float32(magnitude) * np.float32(2.0**-9)
    value = below if magnitude < 8 else normal
    value = np.float32(np.nan) if magnitude == 0x7F else value
    return (-value if code >= 0x80 else value) * loaded


decode_fp8 = decoder("fp8", _scale, _level_fp8)
add_fp8 = adder("fp8", _scale, _level_fp8)
squares_fp8 = squarer("fp8", decode_fp8)


# int8


@kernel
def _run_int8(values: Any, codes: Any, inverse: Any) -> None:
    for i in range(values.shape[0]):
        codes[i] = np.int8(np.rint(values[i] * inverse))


@kernel
def encode_int8(values: Any, bits: Any, codes: Any, scales: Any, block: int, most: Any) -> bool:
    for number in range(scales.shape[0]):
        low = number * block
        high = min(low + block, values.shape[0])
        largest = largest_bits(bits[low:high])
        if largest >= _not_finite:
            return False
        scales[number] = _scale_of(largest, np.float32(127), most)
        _run_int8(values[low:high], codes[low:high], _inverse(scales[number]))
    return True


@kernel
def encode_int8_noisy(
    values: Any, bits: Any, codes: Any, scales: Any, block: int, most: Any, key: Any, base: int
) -> bool:
    for number in range(scales.shape[0]):
        low = number * block
        high = min(low + block, values.shape[0])
        largest = largest_bits(bits[low:high])
        if largest >= _not_finite:
            return False
        scales[number] = _scale_of(largest, np.float32(127), most)
        inverse = _inverse(scales[number])
        for i in range(low, high):
            level = round_noisy(values[i] * inverse, key, base + i)
            codes[i] = np.int8(min(max(level, np.float32(-127)), np.float32(127)))
    return True


@kernel
def _level_int8(code: Any, place: int, loaded: Any) -> Any:
    return np.float32(code) * loaded


decode_int8 = decoder("int8", _scale, _level_int8)
add_int8 = adder("int8", _scale, _level_int8)
squares_int8 = squarer("int8", decode_int8)


# int4: two codes to a byte, scales rounded up to bf16


@kernel
def _nibble(value: Any, key: Any, index: int, stochastic: bool) -> Any:
    level = round_noisy(value, key, index) if stochastic else np.rint(value)
    return np.int32(min(max(level, np.float32(-7)), np.float32(7))) + 8


@kernel
def _run_int4(values: Any, codes: Any, inverse: Any) -> None:
    for j in range(codes.shape[0]):
        low = np.int32(np.rint(values[2 * j] * inverse)) + 8
        high = np.int32(np.rint(values[2 * j + 1] * inverse)) + 8
        codes[j] = np.uint8(low | (high << 4))


@kernel
def encode_int4(
    values: Any, bits: Any, codes: Any, scales: Any, block: int, most: int, key: Any, base: int, stochastic: bool
) -> bool:
    for number in range(scales.shape[0]):
        low = number * block
        high = min(low + block, values.shape[0])
        largest = largest_bits(bits[low:high])
        if largest >= _not_finite:
            return False
        exact = _scale_of(largest, np.float32(7), _infinity)
        half = min((np.int64(np.float32(exact).view(np.int32)) + 0xFFFF) >> 16, most)
        scales[number] = np.uint16(half)
        inverse = _inverse(np.int32(half << 16).view(np.float32))
        whole = (high - low) // 2
        if stochastic:
            for j in range(whole):
                i = low + 2 * j
                first = _nibble(values[i] * inverse, key, base + i, True)
                second = _nibble(values[i + 1] * inverse, key, base + i + 1, True)
                codes[low // 2 + j] = np.uint8(first | (second << 4))
        else:
            _run_int4(values[low : low + 2 * whole], codes[low // 2 : low // 2 + whole], inverse)
        if (high - low) % 2:
            codes[high // 2] = np.uint8(_nibble(values[high - 1] * inverse, key, base + high - 1, stochastic))
    return True


@kernel
def _level_int4(code: Any, place: int, loaded: Any) -> Any:
    return np.float32((np.int32(code) >> np.int32(4 * place)) % np.int32(16) - 8) * loaded


decode_int4 = decoder("int4", _scale, _level_int4, 2)
add_int4 = adder("int4", _scale, _level_int4, 2)
squares_int4 = squarer("int4", decode_int4)


# 2 bits: which of four bins, and the bins' means


@kernel
def encode_2bit(values: Any, codes: Any, tables: Any, block: int, sigmas: Any) -> bool:
    sums = np.empty(4)
    counts = np.empty(4)
    for number in range(tables.shape[0]):
        low = number * block
        high = min(low + block, values.shape[0])
        total = 0.0
        squares = 0.0
        for i in range(low, high):
            value = np.float64(values[i])
            total += value
            squares += value * value
        if not np.isfinite(squares):
            return False
        mean = total / (high - low)
        reach = sigmas * np.sqrt(max(squares / (high - low) - mean * mean, 0.0))
        under, over = mean - reach / 2, mean + reach / 2
        sums[:] = 0.0
        counts[:] = 0.0
        for i in range(low, high, 4):
            packed = 0
            for j in range(min(4, high - i)):
                value = np.float64(values[i + j])
                which = np.int64(value >= under) + np.int64(value >= mean) + np.int64(value >= over)
                sums[which] += min(max(value, mean - reach), mean + reach)
                counts[which] += 1.0
                packed |= which << (2 * j)
            codes[i // 4] = np.uint8(packed)
        for which in range(4):
            tables[number, which] = np.float32(sums[which] / counts[which]) if counts[which] else np.float32(0)
    return True


@kernel
def _bins(tables: Any, number: int) -> Any:
    return tables[number]


@kernel
def _level_2bit(code: Any, place: int, loaded: Any) -> Any:
    return loaded[(np.int32(code) >> np.int32(2 * place)) & np.int32(3)]


decode_2bit = decoder("2bit", _bins, _level_2bit, 4)
add_2bit = adder("2bit", _bins, _level_2bit, 4)
squares_2bit = squarer("2bit", decode_2bit)


# 1 bit: the sign, and the mean magnitude


@kernel
def encode_1bit(values: Any, codes: Any, scales: Any, block: int) -> bool:
    for number in range(scales.shape[0]):
        low = number * block
        high = min(low + block, values.shape[0])
        total = 0.0
        for i in range(low, high):
            total += np.float64(abs(values[i]))
        if not np.isfinite(total):
            return False
        mean = np.float32(total / (high - low))
        scales[number] = np.float32(0) if mean < _tiny else mean
        for i in range(low, high, 8):
            packed = 0
            for j in range(min(8, high - i)):
                packed |= np.int64(values[i + j] < np.float32(0)) << j
            codes[i // 8] = np.uint8(packed)
    return True


@kernel
def _level_1bit(code: Any, place: int, loaded: Any) -> Any:
    return -loaded if (np.int32(code) >> np.int32(place)) & np.int32(1) else loaded


decode_1bit = decoder("1bit", _scale, _level_1bit, 8)
add_1bit = adder("1bit", _scale, _level_1bit, 8)
squares_1bit = squarer("1bit", decode_1bit)
