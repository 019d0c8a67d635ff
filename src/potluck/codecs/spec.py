"""What a recipe says of the way of one kind of tensor: codec, error feedback, difference or whole.

    SPEC = NAME[-delta][+ef[(beta)]]        NAME as in `codecs.base`, "zstd" before or after "ef"

    ef: a = beta e + x; send C(a); e = a - decode(C(a))
    delta: send x minus what the receiver has

Examples: `topk(1.5625%)+2bit+ef(0.95)`, `int8(stochastic)`, `int8+zstd`, `powersgd(4)+ef`, `int8-delta`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from potluck.codecs.base import Codec, codec, codec_names
from potluck.codecs.elementwise import Role
from potluck.types.errors import RecipeError

_ef = re.compile(r"ef(?:\(([01](?:\.[0-9]{1,6})?)\))?", re.ASCII)
_max_length = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpec:
    """One kind of tensor's way. `tensors` names the codec without its lossless stage; `beta` is 0 without `ef`."""

    tensors: str
    beta: float = 0.0
    is_lossless: bool = False
    is_delta: bool = False

    @property
    def codec(self) -> Codec:
        return codec(self.tensors + ("+zstd" if self.is_lossless else ""))

    def __str__(self) -> str:
        """As `parse_spec` reads it again."""
        feedback = "" if not self.beta else "+ef" if self.beta == 1 else f"+ef({self.beta:g})"
        return f"{self.tensors}{'-delta' * self.is_delta}{feedback}{'+zstd' * self.is_lossless}"

    def check(self, role: Role) -> None:
        """RecipeError if it is not fit for tensors of that role."""
        found = self.codec
        if self.beta and role in ("parameter", "activation"):
            raise RecipeError(f"'{self}' has error feedback, which {role}s do not take; use '{self._without('beta')}'")
        if self.is_delta and role != "parameter":
            raise RecipeError(f"'{self}' sends differences, which {role}s do not take; use '{self._without('delta')}'")
        if role == "parameter" and not found.is_elementwise:
            raise RecipeError(
                f"'{self}' does not decode to the same bits everywhere, which parameters must; use 'int8'"
            )
        if role not in found.roles and not self.is_delta:
            hint = f"'{found.name}-delta'" if role == "parameter" else "'int8'"
            raise RecipeError(f"'{self}' loses too much for {role}s; use {hint}")

    def _without(self, what: str) -> CodecSpec:
        return CodecSpec(
            tensors=self.tensors,
            beta=0.0 if what == "beta" else self.beta,
            is_lossless=self.is_lossless,
            is_delta=self.is_delta and what != "delta",
        )


def parse_spec(text: str, role: Role | None = None) -> CodecSpec:
    """Read a spec, and check it for a role if one is given. RecipeError, with the nearest that is one."""
    if len(text) > _max_length:
        raise RecipeError(f"{text[:_max_length]!r} and so on is not a codec; {_max_length} letters are the most")
    terms = text.replace(" ", "").split("+")
    feedback = [term for term in terms if term.startswith("ef")]
    is_delta = any(term.endswith("-delta") for term in terms)
    is_lossless = "zstd" in terms
    rest = [term.removesuffix("-delta") for term in terms if term not in feedback and term != "zstd"]
    if len(feedback) > 1 or terms.count("zstd") > 1 or text.count("-delta") > 1:
        raise RecipeError(f"{text!r} says the same thing twice; once is enough")
    try:
        found = codec("+".join(rest))
    except RecipeError as error:
        near = difflib.get_close_matches(text, (*codec_names(), *_examples), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near and "did you mean" not in str(error) else ""
        raise RecipeError(f"{text!r} cannot be used: {error}{hint}") from error
    spec = CodecSpec(
        tensors=found.name, beta=_beta(feedback[0], text) if feedback else 0.0, is_lossless=is_lossless,
        is_delta=is_delta,
    )  # fmt: skip
    if spec.beta and found.name == "fp32":
        raise RecipeError(f"{text!r} has error feedback where nothing is lost; use 'fp32'")
    if role is not None:
        spec.check(role)
    return spec


_examples = ("int8(stochastic)", "topk(1.5625%)+2bit+ef", "int4+ef(0.95)", "powersgd(4)+ef", "int8-delta")


def _beta(term: str, text: str) -> float:
    match = _ef.fullmatch(term)
    beta = float(match[1] or 1) if match else 0.0
    if not 0 < beta <= 1:
        raise RecipeError(f"{text!r} has error feedback of a share that is not above 0 and at most 1; try 'ef(0.95)'")
    return beta
