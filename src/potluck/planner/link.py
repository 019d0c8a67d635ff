"""What a link gives, from the transfers that went over it.

    t = rtt + bytes / rate

A slope through pairs of transfers of different size does not see the round trip, which all of them pay, and a median
of slopes does not see the one transfer that met a stall (Theil 1950; Sen 1968). Each pair weighs by its difference
in bytes, so that what small transfers say, which is mostly round trip, counts for little. Where all are of one size,
as the updates of one model are, the rate is the median of bytes / (t - rtt) with the round trip measured elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from potluck.types.profile import LinkRates

window = 16
"""Transfers remembered per direction: enough for a median, few enough to follow a link that changes."""
min_spread = 2.0
"""Transfers whose sizes differ by less than this factor say nothing about the round trip."""
most_bytes_per_s = 1e15
"""No link is faster: what says so says nothing."""
min_byte_share = 0.1
"""Of the time of large transfers, what is put down to their bytes at least: the rest may be round trip, or noise."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One transfer as whoever waited for it saw it: from asking until the last byte was safe."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    bytes_per_s: float
    rtt_s: float


def fit_link(transfers: Sequence[Transfer], *, rtt_s: float = 0.0) -> LinkFit | None:
    """Rate and round trip of one direction; None without a transfer that took time.

    `rtt_s` is used where the transfers do not tell the round trip themselves.
    """
    seen = [t for t in transfers if 0 < t.num_bytes < most_bytes_per_s * t.seconds < math.inf]
    if not seen:
        return None
    most = max(t.num_bytes for t in seen)
    whole = statistics.median(t.seconds / t.num_bytes for t in seen if min_spread * t.num_bytes > most)
    slope = _slope(seen)
    if slope > 0:
        slope = min(max(slope, min_byte_share * whole), whole)
        rtt_s = max(0.0, statistics.median(t.seconds - t.num_bytes * slope for t in seen))
    else:
        large = (t for t in seen if min_spread * t.num_bytes > most)
        slope = statistics.median(max(t.seconds - rtt_s, min_byte_share * t.seconds) / t.num_bytes for t in large)
    return LinkFit(bytes_per_s=1.0 / slope, rtt_s=rtt_s)


def _slope(transfers: Sequence[Transfer]) -> float:
    """Seconds per byte through pairs of different size; 0 where there are none."""
    slopes = [
        ((b.seconds - a.seconds) / (b.num_bytes - a.num_bytes), float(b.num_bytes - a.num_bytes))
        for a in transfers
        for b in transfers
        if b.num_bytes >= min_spread * a.num_bytes
    ]
    return _weighted_median(slopes) if slopes else 0.0


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight): the least value with half of the weight at or below it."""
    ordered = sorted(values)
    half, passed = 0.5 * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]


class LinkMeter:
    """Remembers the last transfers of a link, up and down apart, and what they say."""

    def __init__(self) -> None:
        self._up: deque[Transfer] = deque(maxlen=window)
        self._down: deque[Transfer] = deque(maxlen=window)
        self._rtts_s: deque[float] = deque(maxlen=window)
        self._rates: LinkRates | None = None  # of all that is remembered

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Bytes that are safe at the coordinator, `seconds` after the worker began to ask."""
        self._up.append(Transfer(num_bytes=num_bytes, seconds=seconds))
        self._rates = None

    def received(self, num_bytes: int, seconds: float) -> None:
        self._down.append(Transfer(num_bytes=num_bytes, seconds=seconds))
        self._rates = None

    def answered(self, seconds: float) -> None:
        """The other side's first word came so long after it was asked: at least a round trip."""
        self._rtts_s.append(seconds)
        self._rates = None

    @property
    def rates(self) -> LinkRates:
        """What is known now. The round trip is the shortest answer seen, since load only adds to it."""
        if self._rates is None:
            self._rates = self._fit()
        return self._rates

    def _fit(self) -> LinkRates:
        rtt_s = min(self._rtts_s, default=0.0)
        up, down = fit_link(self._up, rtt_s=rtt_s), fit_link(self._down, rtt_s=rtt_s)
        return LinkRates(
            up_bytes_per_s=up.bytes_per_s if up else 0.0,
            down_bytes_per_s=down.bytes_per_s if down else 0.0,
            rtt_s=rtt_s,
        )


def differ(a: LinkRates, b: LinkRates, *, by: float = 0.05) -> bool:
    """Whether one direction is so much faster or slower that it is worth a message."""
    pairs = ((a.up_bytes_per_s, b.up_bytes_per_s), (a.down_bytes_per_s, b.down_bytes_per_s))
    return any(abs(x - y) > by * max(x, y) for x, y in pairs)
