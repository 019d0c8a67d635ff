"""Which codec each worker sends its update with: no more compression than the round's time asks for.

    T_i(k) = compute_i + rtt_i + 4 N ratio_k / rate_i + 4 N / encode_i(k)
    R      = max_i min(S_i, min_k T_i(k))        a synchronous round ends with its slowest worker, at its best
    k_i    = the least distorting k with T_i(k) <= R

N parameters in fp32; the distortion of a codec is E |x - decoded|^2 / |x|^2, and only codecs within the bound are
candidates. Rates are what workers say of themselves; S_i is the longest that any result of i took in all, as the
coordinator saw it, so that one who says absurd things of its link lengthens nobody's round. A worker changes codec
only where it matters: to a smaller one if that takes more than a tenth off its own round, to a larger one if that still
leaves it a tenth of R. So rates that wander do not make the codecs flap.

Kindred work compresses every worker alike, or by rate alone (ACE-Sync and others): a fast link then pays in quality
for time that the slow one spends anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from potluck.codecs.base import codec
from potluck.planner.cost import Encoding, transfer_s
from potluck.types.errors import RecipeError
from potluck.types.ids import WorkerId
from potluck.types.params import type_bytes

min_gain = 0.1


class CompressionConfig(BaseModel):
    """How the codec of updates is chosen: `fixed` takes `codec.up` for everyone, `adaptive` one for each worker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="`fixed` takes `codec.up` for all workers, `adaptive` chooses for each by its link"
    )
    candidates: tuple[str, ...] = Field(
        default=("fp32", "bf16", "int8"), min_length=1, description="codecs that `adaptive` may choose"
    )
    max_distortion: float = Field(
        default=1e-3, ge=0, lt=1, description="largest share of an update's squared norm that a codec may lose"
    )

    @field_validator("candidates")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for name in names:
                codec(name)
        except RecipeError as error:
            raise ValueError(str(error)) from error
        return names


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A codec that may be chosen."""

    name: str
    ratio: float  # bytes over fp32 bytes
    distortion: float  # relative squared L2 error
    encode_bytes_per_s: float = 0.0  # of fp32 input, where a worker did not measure its own; 0 for no time


@dataclass(frozen=True, kw_only=True)
class Sender:
    """One worker, before a round."""

    id: WorkerId
    up_bytes_per_s: float  # 0 for not known yet
    compute_s: float
    rtt_s: float = 0.0
    longest_s: float = math.inf  # what its results took in all at most; inf for not known yet
    current: str = ""  # the codec it used last, "" for none
    encode_bytes_per_s: Mapping[str, float] = field(default_factory=dict[str, float])  # measured, by codec


@dataclass(frozen=True, kw_only=True)
class Choice:
    codec: str
    round_s: float  # predicted, of this worker; inf where its link is not known
    reason: str  # one sentence for people


def choose(
    senders: Sequence[Sender],
    candidates: Sequence[Candidate],
    *,
    num_params: int,
    max_distortion: float,
    ingress_bytes_per_s: float = 0.0,
) -> dict[WorkerId, Choice]:
    """A codec for each worker, with the reason. RecipeError if none of the candidates is within the bound.

    `ingress_bytes_per_s` is the coordinator's, which all uploads share; 0 for no limit. A worker whose link is not
    known yet keeps its codec, or begins with the smallest one: that finds out soonest.
    """
    allowed = _within(candidates, max_distortion)
    rates = {s.id: _rate(s, ingress_bytes_per_s, len(senders)) for s in senders}
    times = {
        s.id: {k.name: _round_s(s, k, type_bytes * num_params, rates[s.id]) for k in allowed}
        for s in senders
        if s.up_bytes_per_s > 0
    }
    round_s = max((min(s.longest_s, *times[s.id].values()) for s in senders if s.id in times), default=0.0)
    chosen: dict[WorkerId, Choice] = {}
    for sender in senders:
        if sender.id in times:
            own_s = max(round_s, min(times[sender.id].values()))  # it may be slower than it ever was
            chosen[sender.id] = _choose_one(sender, allowed, times[sender.id], own_s)
        else:
            chosen[sender.id] = _blind(sender, allowed)
    return chosen


def _within(candidates: Sequence[Candidate], max_distortion: float) -> list[Candidate]:
    """The candidates within the bound, the least distorting first; of equally exact ones the smaller first."""
    allowed = sorted(
        (k for k in candidates if k.distortion <= max_distortion), key=lambda k: (k.distortion, k.ratio, k.name)
    )
    if not allowed:
        best = min(candidates, key=lambda k: k.distortion)
        raise RecipeError(
            f"no codec of compression.candidates is within compression.max_distortion = {max_distortion:g}; the best, "
            f"{best.name}, has {best.distortion:.2g}; raise the bound or add fp32"
        )
    return allowed


def _rate(sender: Sender, ingress_bytes_per_s: float, num_senders: int) -> float:
    if ingress_bytes_per_s <= 0:
        return sender.up_bytes_per_s
    return min(sender.up_bytes_per_s, ingress_bytes_per_s / num_senders)


def _round_s(sender: Sender, candidate: Candidate, num_bytes: float, rate_bytes_per_s: float) -> float:
    speed = sender.encode_bytes_per_s.get(candidate.name, candidate.encode_bytes_per_s)
    encoding = Encoding(ratio=candidate.ratio, bytes_per_s=speed)
    return sender.compute_s + transfer_s(
        num_bytes, rate_bytes_per_s=rate_bytes_per_s, rtt_s=sender.rtt_s, encoding=encoding
    )


def _choose_one(sender: Sender, allowed: Sequence[Candidate], times: Mapping[str, float], round_s: float) -> Choice:
    exact = allowed[0].name
    current = sender.current if sender.current in times else exact
    link = f"{sender.up_bytes_per_s * 8 / 1e6:.3g} Mbit/s"

    def first_within(limit_s: float) -> str | None:
        return next((k.name for k in allowed if times[k.name] <= limit_s), None)

    def choice(name: str, why: str) -> Choice:
        return Choice(codec=name, round_s=times[name], reason=f"{sender.id}: {name}, {why}")

    if times[current] > round_s:  # it would lengthen the round
        target = first_within(round_s)
        assert target is not None, "each worker's best is within the round"
        saved_s = times[current] - times[target]
        if saved_s <= min_gain * times[current]:
            return choice(current, f"since {target} would save only {saved_s:.3g} s of {times[current]:.3g} s")
        return choice(target, f"which at {link} up saves {saved_s:.3g} s of {times[current]:.3g} s with {current}")
    order = [k.name for k in allowed]
    relaxed = first_within((1 - min_gain) * round_s)
    if relaxed is not None and order.index(relaxed) < order.index(current):
        return choice(relaxed, f"since {times[relaxed]:.3g} s at {link} up are well within the round's {round_s:.3g} s")
    if current == exact:
        return choice(current, f"since the round of {round_s:.3g} s does not wait for its {link} up")
    return choice(current, f"as before: less compression would bring it too close to the round's {round_s:.3g} s")


def _blind(sender: Sender, allowed: Sequence[Candidate]) -> Choice:
    names = {k.name for k in allowed}
    name = sender.current if sender.current in names else min(allowed, key=lambda k: (k.ratio, k.distortion)).name
    reason = f"{sender.id}: {name}, since its uplink is not measured yet"
    return Choice(codec=name, round_s=math.inf, reason=reason)
