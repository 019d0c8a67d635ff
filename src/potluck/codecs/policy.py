"""Which codec each tensor goes in: the first rule that fits it, else the default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from potluck.codecs.base import Codec, codec
from potluck.codecs.elementwise import Shape, numel_of
from potluck.types.errors import RecipeError

small_numel = 1024
_sample_numel = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecRule:
    """Tensors whose name matches the pattern (`*`, `?`, `[abc]`) and that have at most so many elements."""

    codec: str
    match: str = "*"
    max_numel: int | None = None

    def fits(self, name: str, shape: Shape) -> bool:
        return fnmatchcase(name, self.match) and (self.max_numel is None or numel_of(shape) <= self.max_numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecPolicy:
    """Rules in order, then the default. RecipeError if one names no codec.

    After the rules, what has fewer than 1024 elements goes as int8 where the default has fewer than 8 bits an element:
    biases and norms cost little and bear little noise. A rule for "*" turns that off.
    """

    default: str
    rules: tuple[CodecRule, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.default, *(rule.codec for rule in self.rules)):
            codec(name)

    @staticmethod
    def from_json(default: str, rules: Sequence[dict[str, object]]) -> CodecPolicy:
        """From a recipe's tables `{match = "*.wte.*", codec = "bf16"}`. RecipeError for other keys and types."""
        return CodecPolicy(default=default, rules=tuple(_rule(rule) for rule in rules))

    def choose(self, name: str, shape: Shape) -> Codec:
        for rule in self.rules:
            if rule.fits(name, shape):
                return codec(rule.codec)
        chosen = codec(self.default)
        if numel_of(shape) < small_numel and chosen.estimate_bytes(_sample_numel) < _sample_numel:
            return codec("int8")
        return chosen


def _rule(rule: dict[str, object]) -> CodecRule:
    match rule:
        case {"codec": str(name), **rest} if set(rest) <= {"match", "max_numel"}:
            pattern, max_numel = rest.get("match", "*"), rest.get("max_numel")
            if isinstance(pattern, str) and (max_numel is None or (type(max_numel) is int and max_numel >= 0)):
                return CodecRule(codec=name, match=pattern, max_numel=max_numel)
        case _:
            pass
    raise RecipeError(f"the codec rule {rule} is not one of `codec`, and `match` or `max_numel`")
