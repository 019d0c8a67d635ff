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
        found = max(found, bits[i] & np.int32(0x7FFFFFFF))
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


@kernel
def encode_bf16(bits: Any, codes: Any, key: Any, base: int, stochastic: bool) -> bool:
    for i in range(bits.shape[0]):
        magnitude = np.int64(bits[i] & _magnitude)
        sign = (np.int64(bits[i]) >> 16) & 0x8000
        cut = np.int64(noise(key, base + i) >> np.uint64(48)) if stochastic else 0x7FFF + ((magnitude >> 16) & 1)
        codes[i] = np.uint16(min((magnitude + cut) >> 16, 0x7F7F) | sign)
    return largest_bits(bits) < _not_finite


@kernel
def _level_bf16(code: Any, place: int, loaded: Any) -> Any:
    return np.int32(np.uint32(code) << np.uint32(16)).view(np.float32)


decode_bf16 = decoder("bf16", _no_table, _level_bf16)
add_bf16 = adder("bf16", _no_table, _level_bf16)


# fp16: the scale is a power of two


@kernel
def encode_fp16(values: Any, codes: Any, scale: Any, most: int) -> None:
    """|values / scale| < 2^15; `most` is the code of the largest that is sent."""
    inverse = np.float32(1) / scale
    for i in range(values.shape[0]):
        small = np.float32(values[i] * inverse)
        bits = np.int64(small.view(np.int32))
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112 << 23)) >> 13
        below = np.int64(np.rint(abs(small) * np.float32(2.0**24)))
        code = below if magnitude < (113 << 23) else normal
        codes[i] = np.uint16(min(code, most) | ((bits >> 16) & 0x8000))


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


# fp8 e4m3


@kernel
def _scale_of(largest: Any, levels: Any, most: Any) -> Any:
    scale = min(np.int32(largest).view(np.float32) / levels, most)
    return np.float32(0) if scale < _tiny else scale


@kernel
def _divisor(scale: Any) -> Any:
    return scale if scale > np.float32(0) else _infinity


@kernel
def _code_fp8(value: Any, key: Any, index: int, stochastic: bool) -> Any:
    """Of |value| <= 448 or a little more."""
    bits = np.int64(np.float32(value).view(np.int32))
    magnitude = bits & 0x7FFFFFFF
    small = abs(value) * np.float32(512)
    if stochastic:
        cut = np.int64(noise(key, index) >> np.uint64(44))
        below = np.int64(round_noisy(small, key, index)) if magnitude < (121 << 23) else np.int64(0)
    else:
        cut = 0x7FFFF + ((magnitude >> 20) & 1)
        below = np.int64(np.rint(small))
    normal = min((magnitude + cut - (120 << 23)) >> 20, 0x7E)
    code = below if magnitude < (121 << 23) else normal
    return np.uint8(code | ((bits >> 24) & 0x80))


@kernel
def _run_fp8(values: Any, codes: Any, divisor: Any) -> None:
    for i in range(values.shape[0]):
        codes[i] = _code_fp8(values[i] / divisor, np.uint64(0), 0, False)


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
        divisor = _divisor(scales[number])
        if stochastic:
            for i in range(low, high):
                codes[i] = _code_fp8(values[i] / divisor, key, base + i, True)
        else:
            _run_fp8(values[low:high], codes[low:high], divisor)
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


# int8


@kernel
def _run_int8(values: Any, codes: Any, divisor: Any) -> None:
    for i in range(values.shape[0]):
        codes[i] = np.int8(np.rint(values[i] / divisor))


@kernel
def _run_int8_and_look_ahead(values: Any, codes: Any, divisor: Any, ahead: Any) -> Any:
    """`_run_int8`, and `largest_bits` of the block after it: that one is fetched while this one is divided."""
    found = np.int32(0)
    for i in range(ahead.shape[0]):
        found = max(found, ahead[i] & _magnitude)
        codes[i] = np.int8(np.rint(values[i] / divisor))
    return found


@kernel
def encode_int8(values: Any, bits: Any, codes: Any, scales: Any, block: int, most: Any) -> bool:
    largest = largest_bits(bits[:block])
    for number in range(scales.shape[0]):
        if largest >= _not_finite:
            return False
        low = number * block
        high = min(low + block, values.shape[0])
        scales[number] = _scale_of(largest, np.float32(127), most)
        divisor = _divisor(scales[number])
        if high + block <= values.shape[0]:
            ahead = bits[high : high + block]
            largest = _run_int8_and_look_ahead(values[low:high], codes[low:high], divisor, ahead)
        else:
            _run_int8(values[low:high], codes[low:high], divisor)
            largest = largest_bits(bits[high:])
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
        divisor = _divisor(scales[number])
        for i in range(low, high):
            level = round_noisy(values[i] / divisor, key, base + i)
            codes[i] = np.int8(min(max(level, np.float32(-127)), np.float32(127)))
    return True


@kernel
def _level_int8(code: Any, place: int, loaded: Any) -> Any:
    return np.float32(code) * loaded


decode_int8 = decoder("int8", _scale, _level_int8)
add_int8 = adder("int8", _scale, _level_int8)


# int4: two codes to a byte, scales rounded up to bf16


@kernel
def _nibble(value: Any, key: Any, index: int, stochastic: bool) -> Any:
    level = round_noisy(value, key, index) if stochastic else np.rint(value)
    return np.int32(min(max(level, np.float32(-7)), np.float32(7))) + 8


@kernel
def _run_int4(values: Any, codes: Any, divisor: Any) -> None:
    for j in range(codes.shape[0]):
        low = np.int32(np.rint(values[2 * j] / divisor)) + 8
        high = np.int32(np.rint(values[2 * j + 1] / divisor)) + 8
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
        divisor = _divisor(np.int32(half << 16).view(np.float32))
        whole = (high - low) // 2
        if stochastic:
            for j in range(whole):
                i = low + 2 * j
                first = _nibble(values[i] / divisor, key, base + i, True)
                second = _nibble(values[i + 1] / divisor, key, base + i + 1, True)
                codes[low // 2 + j] = np.uint8(first | (second << 4))
        else:
            _run_int4(values[low : low + 2 * whole], codes[low // 2 : low // 2 + whole], divisor)
        if (high - low) % 2:
            codes[high // 2] = np.uint8(_nibble(values[high - 1] / divisor, key, base + high - 1, stochastic))
    return True


@kernel
def _level_int4(code: Any, place: int, loaded: Any) -> Any:
    return np.float32((np.int32(code) >> np.int32(4 * place)) % np.int32(16) - 8) * loaded


decode_int4 = decoder("int4", _scale, _level_int4, 2)
add_int4 = adder("int4", _scale, _level_int4, 2)


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
