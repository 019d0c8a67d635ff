"""Whether training has come apart: the loss of a round, or the step it took, far beyond those of the rounds before.

    limit = median + deviations * max(1.4826 MAD, floor)        over the last rounds that were not suspected themselves

of the training loss, where it is told (floor: a twentieth of the median, and 0.05), and of log |theta' - theta| (floor:
0.35, so that a step of 66 times the usual norm is the least that is too large). A loss above its limit, or above the
lowest limit that a whole window had, makes its round suspected, unless it is no more than `deviations` floors above the
median of ten windows: text that is all of one kind for a whole window is followed by text that only looks like a jump.
So many suspected rounds in a row, and the run has diverged. A step above its limit is not taken at all, nor is one that
is not finite, and a run does not go on when the workers find their losses not finite. MAD is the median absolute
deviation; 1.4826 MAD estimates a standard deviation (Rousseeuw and Croux 1993).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from potluck.types.errors import RoundFailed

_normal = 1.4826
_loss_floor = 0.05
_step_floor = 0.35
_num_windows = 10
"""In which the lowest limit of the loss is looked for, and the usual: a slow rise would take one median with it."""
min_rounds = 8
"""With fewer to compare with, only what is not finite is noticed."""


class DivergenceConfig(BaseModel):
    """What to do about a loss or a step that explodes: go back to a good checkpoint, then stop if it happens again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    watch: bool = Field(default=True, description="false lets the run go on whatever happens")
    window_rounds: int = Field(
        default=30, ge=min_rounds, le=10_000, description="rounds that a new one is held against"
    )
    deviations: float = Field(
        default=12.0, ge=3, description="robust standard deviations above the median that are too many"
    )
    patience_rounds: int = Field(
        default=3, ge=1, description="rounds in a row whose loss must be that high; a spike of fewer is let pass"
    )
    max_roll_backs: int = Field(default=1, ge=0, description="how often the run goes back by itself before it stops")


class Diverged(RoundFailed):
    """`str(error)` says by what; `good_round` is the last one whose state nothing speaks against."""

    def __init__(self, reason: str, good_round: int) -> None:
        super().__init__(reason)
        self.good_round = good_round


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """Of one round: its number, counted from 1, its mean training loss (None where it is withheld), the L2 norm of the
    step it took."""

    round: int
    loss: float | None
    step_norm: float


class DivergenceWatch:
    """Judges each round by the committed ones. A function of what it was told, in order."""

    def __init__(self, config: DivergenceConfig, committed: Sequence[RoundFigures] = ()) -> None:
        self.config = config
        self._trusted: list[RoundFigures] = []
        self._suspected: list[int] = []
        self._losses: list[float] = []  # of trusted rounds, of as many windows
        self._limits: list[float] = []  # of the loss, of whole windows
        for figures in committed:
            self.commit(figures)

    @property
    def suspects(self) -> bool:
        return bool(self._suspected)

    def good_round(self, round: int, *, is_loss: bool) -> int:
        """The last state that nothing speaks against, when `round` does not go well. A loss tells on the one before."""
        first = min([*self._suspected, round])
        return max(first - (2 if is_loss or self._suspected else 1), 0)

    def judge(self, figures: RoundFigures) -> None:
        """Before a round is committed. Diverged if it must not be."""
        if not self.config.watch:
            return
        round, loss, norm = figures.round, figures.loss, figures.step_norm
        loss_is_finite = loss is None or math.isfinite(loss)
        if not (loss_is_finite and math.isfinite(norm)):
            reason = f"round {round} has the loss {loss} and its step the norm {norm}, which must be finite"
            raise Diverged(reason, self.good_round(round, is_loss=not loss_is_finite))
        is_high = self._is_high(loss)
        if self._is_far(norm):
            typical = statistics.median(f.step_norm for f in self._trusted)
            raise Diverged(
                f"the step of round {round} has the norm {norm:.4g} and {typical:.4g} was usual",
                self.good_round(round, is_loss=is_high),
            )
        if is_high and len(self._suspected) + 1 >= self.config.patience_rounds:
            typical = statistics.median(self._trusted_losses())
            raise Diverged(
                f"the loss has been far above the usual {typical:.4g} for {len(self._suspected) + 1} rounds and is "
                f"{loss:.4g} in round {round}",
                self.good_round(round, is_loss=True),
            )

    def commit(self, figures: RoundFigures) -> None:
        """A round was committed."""
        if self.config.watch and self._is_high(figures.loss):
            self._suspected.append(figures.round)
            return
        self._suspected.clear()
        self._trusted.append(figures)
        del self._trusted[: -self.config.window_rounds]
        if figures.loss is None:
            return
        self._losses.append(figures.loss)
        del self._losses[: -_num_windows * self.config.window_rounds]
        if len(self._trusted) == self.config.window_rounds:
            self._limits.append(self._loss_limit())
            del self._limits[: -_num_windows * self.config.window_rounds]

    @staticmethod
    def num_needed(config: DivergenceConfig) -> int:
        """Committed rounds that a watch has to be told of to judge as one that was told of all."""
        return (_num_windows + 2) * config.window_rounds

    def _is_high(self, loss: float | None) -> bool:
        if loss is None or len(self._losses) < min_rounds or loss <= min([*self._limits, self._loss_limit()]):
            return False
        usual = statistics.median(self._losses)
        return loss > usual + self.config.deviations * _floor(usual)

    def _loss_limit(self) -> float:
        losses = self._trusted_losses()
        return self._limit(losses, _floor(statistics.median(losses or [0.0])))

    def _trusted_losses(self) -> list[float]:
        return [f.loss for f in self._trusted if f.loss is not None]

    def _is_far(self, norm: float) -> bool:
        logs = [math.log(f.step_norm) for f in self._trusted if f.step_norm > 0]
        return norm > 0 and math.log(norm) > self._limit(logs, _step_floor)

    def _limit(self, past: Sequence[float], floor: float) -> float:
        if len(past) < min_rounds:
            return math.inf
        centre = statistics.median(past)
        spread = _normal * statistics.median(abs(x - centre) for x in past)
        return centre + self.config.deviations * max(spread, floor)


def _floor(usual: float) -> float:
    """The least spread of a loss that is assumed."""
    return max(_loss_floor * abs(usual), _loss_floor)
