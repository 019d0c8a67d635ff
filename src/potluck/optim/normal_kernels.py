"""The loops of normal.py, compiled by numba when first called; this imports numba.

A tile of blocks at a time: words, normals, and their transposition. Words and normals are functions of their own, since
only so does the compiler make vector instructions of both, which are four times as fast. No fused multiply-add and no
reordering: the operations are those of `normal.op_by_op`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from potluck.optim import normal

F = TypeVar("F", bound=Callable[..., Any])


def _compile(function: F) -> F:
    return cast(F, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))


_tile_blocks = 512  # 16 KiB of words and normals
_multiplier_0, _multiplier_1 = (np.uint64(m) for m in normal.multipliers)
_key_step_0, _key_step_1 = (np.uint32(step) for step in normal.key_steps)
_half = np.uint64(32)
_num_rounds = normal.num_rounds
_bits_of_sqrt_half = np.int32(normal.bits_of_sqrt_half)
_minus_two_ln_2 = np.float32(normal.minus_two_ln_2)
_log_terms, _sin_terms, _cos_terms = (
    tuple(np.float32(term) for term in terms) for terms in (normal.log_terms, normal.sin_terms, normal.cos_terms)
)


@_compile
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox4x32-10 of uint32 words: counter c, key k."""
    for _ in range(_num_rounds):
        p0, p1 = _multiplier_0 * np.uint64(c0), _multiplier_1 * np.uint64(c2)
        c0, c2 = np.uint32(np.uint32(p1 >> _half) ^ c1 ^ k0), np.uint32(np.uint32(p0 >> _half) ^ c3 ^ k1)
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _key_step_0), np.uint32(k1 + _key_step_1)
    return c0, c1, c2, c3


@_compile
def _polynomial(terms: Any, x: Any) -> Any:
    value = terms[len(terms) - 1]
    for k in range(len(terms) - 2, -1, -1):
        value = value * x + terms[k]
    return value


@_compile
def _sign(word: Any, bit: Any) -> Any:
    return np.float32(1) - np.float32(np.int32((word >> bit) & np.uint32(1))) * np.float32(2)


@_compile
def _box_muller(radius_word: Any, angle_word: Any) -> Any:
    x = np.float32(radius_word) + np.float32(0.5)
    shifted = np.int32(np.float32(x).view(np.int32) - _bits_of_sqrt_half)
    exponent = np.int32((shifted >> np.int32(23)) - np.int32(32))
    f = np.int32((shifted & np.int32(0x7FFFFF)) + _bits_of_sqrt_half).view(np.float32) - np.float32(1)
    log = _polynomial(_log_terms, f) * (f * f) + f
    radius = np.sqrt(np.float32(exponent) * _minus_two_ln_2 + log * np.float32(-2))

    v = np.float32(np.int32(angle_word & np.uint32(0x1FFFFFFF))) * np.float32(2.0**-29)
    squared = v * v
    sin, cos = _polynomial(_sin_terms, squared) * v, _polynomial(_cos_terms, squared)
    swaps = (angle_word & np.uint32(0x20000000)) != np.uint32(0)
    first = sin if swaps else cos
    second = cos if swaps else sin
    return radius * first * _sign(angle_word, np.uint32(30)), radius * second * _sign(angle_word, np.uint32(31))


@_compile
def _fill_words(k0: Any, k1: Any, first: Any, words: Any) -> None:
    zero = np.uint32(0)
    for i in range(words.shape[1]):
        counter = first + np.uint64(i)
        c0, c1 = np.uint32(counter), np.uint32(counter >> _half)
        words[0, i], words[1, i], words[2, i], words[3, i] = philox(c0, c1, zero, zero, k0, k1)


@_compile
def _fill_normals(words: Any, normals: Any) -> None:
    for i in range(words.shape[1]):
        normals[0, i], normals[1, i] = _box_muller(words[0, i], words[1, i])
        normals[2, i], normals[3, i] = _box_muller(words[2, i], words[3, i])


@_compile
def fill(seed: Any, first: Any, out: Any) -> None:
    """out [num, 4] = blocks `first`, `first` + 1, ... of z(seed). seed and first: uint64."""
    k0, k1 = np.uint32(seed), np.uint32(seed >> _half)
    words = np.empty((4, _tile_blocks), np.uint32)
    normals = np.empty((4, _tile_blocks), np.float32)
    for low in range(0, out.shape[0], _tile_blocks):
        _fill_words(k0, k1, first + np.uint64(low), words)
        _fill_normals(words, normals)
        for i in range(min(_tile_blocks, out.shape[0] - low)):
            for place in range(4):
                out[low + i, place] = normals[place, i]
