"""What a rule decided about the updates of one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

max_named = 8


@dataclass(frozen=True, kw_only=True)
class Report:
    """`factors[i]` is what of update i counts: 1 as the rule's average has it, 0 left out, between those scaled down.

    Rules that work on each coordinate by itself decide about no update as a whole; `num_trimmed` is how many values of
    each coordinate they leave out at either end.
    """

    rule: str
    factors: tuple[float, ...]
    num_trimmed: int = 0
    num_passes: float  # over the spooled updates

    @property
    def left_out(self) -> tuple[int, ...]:
        return tuple(i for i, factor in enumerate(self.factors) if factor == 0)

    @property
    def scaled(self) -> tuple[int, ...]:
        """Those that count in part, the least first."""
        return tuple(sorted((i for i, f in enumerate(self.factors) if 0 < f < 1), key=lambda i: self.factors[i]))

    def sentence(self, names: Sequence[str]) -> str:
        """For people, with the updates' names; "" where every update counts whole."""
        parts: list[str] = []
        if self.left_out:
            parts.append(f"left out {_listed([names[i] for i in self.left_out])}")
        if self.scaled:
            parts.append(f"scaled {_listed([f'{names[i]} by {self.factors[i]:.3g}' for i in self.scaled])}")
        return f"{self.rule} {' and '.join(parts)}" if parts else ""


def _listed(items: Sequence[str]) -> str:
    more = len(items) - max_named
    return ", ".join(items[:max_named]) + (f" and {more} more" if more > 0 else "")
