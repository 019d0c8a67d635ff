"""Codecs: how a tensor of fp32 becomes bytes, and how those become fp32 again. Recipes and bundles name them.

    NAME = BASE[(stochastic)] | topk(P%)[+BASE] | powersgd(R), each with +zstd or without

All are deterministic and decode to fp32. A codec is stateless; error feedback is the caller's. Names come from the
network too: they are short, and none costs more than looking it up.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from potluck.codecs.bf16 import Bf16
from potluck.codecs.elementwise import Rounding
from potluck.codecs.elementwise import TensorCodec as Codec
from potluck.codecs.fp8 import Fp8
from potluck.codecs.fp16 import Fp16
from potluck.codecs.fp32 import Fp32
from potluck.codecs.int4 import Int4
from potluck.codecs.int8 import Int8
from potluck.codecs.lossless import Lossless
from potluck.codecs.low_rank import LowRank
from potluck.codecs.one_bit import OneBit
from potluck.codecs.topk import TopK, chunk_numel
from potluck.codecs.two_bit import TwoBit
from potluck.types.errors import RecipeError

__all__ = ["Codec", "codec", "codec_names"]

max_name_length = 64
max_rank = 1024

_plain: Mapping[str, Callable[[], Codec]] = {"fp32": Fp32, "fp16": Fp16, "2bit": TwoBit, "1bit": OneBit}
_rounding: Mapping[str, Callable[[Rounding], Codec]] = {"bf16": Bf16, "fp8": Fp8, "int8": Int8, "int4": Int4}
_order = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "2bit", "1bit")
_examples = ("topk(1.5625%)", "topk(1.5625%)+2bit", "powersgd(4)", "int8+zstd")
_term = re.compile(r"([a-z0-9]{1,16})(?:\(([a-z0-9.%]{1,24})\))?", re.ASCII)
_percent = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,12})?%", re.ASCII)
_number = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


def codec(name: str) -> Codec:
    """The codec a recipe or a bundle names. RecipeError if there is none of that name."""
    if len(name) > max_name_length:
        raise RecipeError(
            f"{name[:max_name_length]!r} and so on is not a codec; {max_name_length} letters are the most"
        )
    return _parsed(name)


def codec_names() -> tuple[str, ...]:
    """One name of each kind."""
    return _order + _examples


@lru_cache(maxsize=256)
def _parsed(name: str) -> Codec:
    first, *rest = name.split("+")
    is_lossless = bool(rest) and rest[-1] == "zstd"
    inner = rest[:-1] if is_lossless else rest
    kind, argument = _split(first, name)
    if kind == "topk":
        if len(inner) > 1:
            raise RecipeError(f"{name!r} has two codecs for the values that top-k keeps; name one")
        found: Codec = TopK(_kept(argument, name), _dense(*_split(inner[0], name), name) if inner else Fp32())
    elif inner:
        raise RecipeError(f"{name!r} quantises twice; after {first!r} only '+zstd' can follow, and values after top-k")
    elif kind == "powersgd":
        if _number.fullmatch(argument) is None or int(argument) > max_rank:
            raise RecipeError(f"{name!r} has no rank from 1 to {max_rank}; write it as 'powersgd(4)'")
        found = LowRank(int(argument))
    else:
        found = _dense(kind, argument, name)
    return Lossless(found) if is_lossless else found


def _split(term: str, name: str) -> tuple[str, str]:
    match = _term.fullmatch(term)
    if match is None:
        raise _unknown(name)
    return match[1], match[2] or ""


def _dense(kind: str, argument: str, name: str) -> Codec:
    if kind in _plain and not argument:
        return _plain[kind]()
    if kind in _rounding and argument in ("", "nearest", "stochastic"):
        return _rounding[kind]("stochastic" if argument == "stochastic" else "nearest")
    raise _unknown(name)


def _kept(argument: str, name: str) -> int:
    """How many of a chunk: the nearest to the percentage."""
    if _percent.fullmatch(argument) is None:
        raise RecipeError(f"{name!r} does not say how much top-k keeps; write it as 'topk(1.5625%)'")
    k = round(float(argument[:-1]) * chunk_numel / 100)
    if not 1 <= k <= chunk_numel:
        raise RecipeError(f"{name!r} keeps {k} of {chunk_numel} values; from 0.0244% to 100% can be kept")
    return k


def _unknown(name: str) -> RecipeError:
    known = codec_names()
    near = difflib.get_close_matches(name, known, n=1)
    return RecipeError(
        f"{name!r} is not a codec; "
        + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}")
    )
