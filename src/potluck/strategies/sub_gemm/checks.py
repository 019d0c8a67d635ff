"""Freivalds' check: is what came back as C[m, q] really A[m, n] B[n, q]? At a small part of the product's cost.

    d = C R - A (B R)      R[q, 20] of secret signs, drawn when C is there     s_i = mean_k d_ik^2 ~ |error of row i|^2

An honest C differs from A B too: by the rounding of sums in fp32, in whatever order, and of the reply. So a row passes
if s_i is what that explains, with u = 2^-24 and w the rounding of the reply (0 for fp32, 2^-8 for bf16):

    s_i <= (w^2 + u^2 (n + q)) / 2 |C_i|^2

An error of the size that must be found, `least_error` rms(C), shows as s_i >= 0.2 of its square but for chance of 1e-6
(+d, -d in one row are seen by half of the vectors). Rows that do not pass, and rows so much larger than the others
that the bound hides such an error, are multiplied again in fp64 and compared by element:

    |c - ab| <= w |ab| + u (2 sqrt(n) + 4) (t + |ab|) + u n / 2 |ab| (|ab|^2 / n t^2)^4
                + min(u / 2 n sqrt(n) t, least_error / 4 rms(C))                               t^2 = sum_k a_k^2 b_k^2

whose terms are the reply's rounding, sums rounded at random, sums of equal terms, where all rounding goes one way
(|ab|^2 = n t^2 for those, and much less for others), and sums that grow far beyond C before they cancel, as those of
real layers do.
No more than 1 / r^2 of the rows are r times larger than the rest, so an honest tile seldom costs more than the vectors.
Where n is large the bound hides more; it holds for spans of C's columns, which then are shorter and cost a test each:
as short as makes the whole check cheapest, by FLOPs of the vectors, 2 m n 20 a span, and of the rows, 4 n q in fp64.
The operands are those that the device got: after rounding to the wire's type.

Freivalds 1977. Differences: noise by row, several vectors at once, exact judgement of whatever the vectors flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.strategies.sub_gemm.tile import REPLY_TYPES
from potluck.types.errors import InvalidUpdate, NotFinite

num_vectors = 20
most_columns, least_columns = 1024, 64
"""Of one test: the noise of a row grows with its length, and an error in it does not."""
fp64_price = 3.0
"""Of a FLOP in fp64, in ones of fp32, with the copies that it needs."""
least_seen = 0.19
"""What an error at the limit adds to s, of its square: less than the 0.2 that one vector of 20 adds for +d, -d."""
fp32_unit = 2.0**-24
least_normal, largest_fp32 = 2.0**-126, torch.finfo(torch.float32).max
least_square = 1e-290
unscaled = 20  # powers of two around 1 in which sums of squares neither overflow nor vanish
first_rows, other_rows, inner_span = 16, 256, 1024  # multiplied again at a time


@dataclass(frozen=True)
class _Reply:
    unit: float  # relative rounding of the reply's type
    least_error: float  # that must be found, in rms(C)


_replies = {torch.float32: _Reply(0.0, 1e-3), torch.bfloat16: _Reply(2.0**-8, 0.5)}


@dataclass(frozen=True)
class Checked:
    """What a check came to."""

    flops: float
    num_rows_again: int  # of the tile, turned so that its rows are the shorter ones


def check_tile(a: Tensor, b: Tensor, c: Tensor, *, wire: str, generator: torch.Generator) -> Checked:
    """InvalidUpdate, with what was found and the limit, if `c` is not a b. NotFinite if that is no wonder: factors
    that are not finite, or too large.

    a [m, n] and b [n, q], fp32 or bf16 of any strides, as the device got them; c [m, q] as it came back: fp32 where
    `wire` is "fp32", else bf16. `generator`, on the CPU, must not be known to devices.
    """
    shape, dtype = (a.shape[0], b.shape[1]), REPLY_TYPES[wire]
    assert a.shape[1] == b.shape[0] and a.numel() and b.numel(), f"no product: {list(a.shape)} by {list(b.shape)}"
    if c.shape != shape or c.dtype != dtype:
        raise InvalidUpdate(
            f"a tile came back as {_type(c.dtype)} {list(c.shape)} and must be {_type(dtype)} {list(shape)}; "
            "update that worker's potluck"
        )
    return _Tile(a, b, c, _replies[dtype]).check(generator)


class _Tile:
    """The three matrices in fp32, scaled by powers of two, the shorter side of C along its rows."""

    def __init__(self, a: Tensor, b: Tensor, c: Tensor, reply: _Reply) -> None:
        largest_a, largest_b, largest_c = _largest(a), _largest(b), _largest(c)
        if not (math.isfinite(largest_a) and math.isfinite(largest_b)):
            raise NotFinite("a factor of a product holds NaN or infinity; lower strategy.inner.lr")
        n = a.shape[1]
        flushed = least_normal * n * (largest_a + largest_b + 1)  # what a device loses that has no denormal numbers
        most = 1.01 * n * largest_a * largest_b + flushed
        if not math.isfinite(largest_c) and most > largest_fp32:
            raise NotFinite("a product's factors are so large that it may overflow; lower strategy.inner.lr")
        if not largest_c <= most:  # also NaN
            raise InvalidUpdate(
                f"a tile holds {largest_c:.4g} and its factors allow no more than {most:.4g}; that worker's result "
                "is broken"
            )
        power_a, power_b = _power(largest_a), _power(largest_b)
        self.floor = math.ldexp(flushed, -power_a - power_b)
        a, b, c = _scaled(a, power_a), _scaled(b, power_b), _scaled(c, power_a + power_b)
        self.a, self.b, self.c = (a, b, c) if c.shape[0] >= c.shape[1] else (b.T, a.T, c.T)
        self.reply, self.n = reply, n
        self.length = most_columns
        self.sizes = self._sizes()
        self.rms = math.sqrt(float(self.sizes.sum()) / self.c.numel())

    def check(self, generator: torch.Generator) -> Checked:
        num_rows, num_columns = self.c.shape
        is_narrow = num_columns <= 2 * num_vectors  # the vectors would cost as much
        if not is_narrow:
            self._shorten()
        rows = torch.arange(num_rows) if is_narrow else self._suspects(generator)
        for part in (rows[:first_rows], *rows[first_rows:].split(other_rows)):
            if len(part):
                self._compare(part)
        vectors = 0.0 if is_narrow else self._vector_flops()
        return Checked(flops=vectors + self._row_flops() * len(rows), num_rows_again=len(rows))

    def _spans(self) -> Iterator[slice]:
        columns = self.c.shape[1]
        return (slice(start, min(start + self.length, columns)) for start in range(0, columns, self.length))

    def _sizes(self) -> Tensor:
        """|C_i|^2 of each row and span. [rows, spans]"""
        return torch.stack([self.c[:, span].square().sum(1) for span in self._spans()], 1).double()

    def _vector_flops(self) -> float:
        (num_rows, num_columns), num_spans = self.c.shape, self.sizes.shape[1]
        return 2.0 * num_vectors * (self.n * num_columns + num_rows * self.n * num_spans + num_rows * num_columns)

    def _row_flops(self) -> float:
        """Of one that is multiplied again."""
        return 4.0 * self.n * self.c.shape[1]

    def _shorten(self) -> None:
        """Spans as long as is cheapest."""
        best = math.inf, self.length, self.sizes
        while True:
            num_hidden = int(self._hidden().any(1).sum())
            price = self._vector_flops() + fp64_price * self._row_flops() * num_hidden
            best = min(best, (price, self.length, self.sizes), key=lambda tried: tried[0])
            if not num_hidden or self.length <= least_columns:
                break
            self.length //= 2
            self.sizes = self._sizes()
        _, self.length, self.sizes = best

    def _noise(self) -> Tensor:
        """What rounding explains of s. [rows, spans]"""
        length = min(self.length, self.c.shape[1])
        return (self.reply.unit**2 + fp32_unit**2 * (self.n + length)) / 2 * self.sizes

    def _hidden(self) -> Tensor:
        """Where that hides an error which must be found. bool [rows, spans]"""
        return self._noise() > least_seen * (self.reply.least_error * self.rms) ** 2

    def _suspects(self, generator: torch.Generator) -> Tensor:
        """Rows to be multiplied again, the worst first."""
        columns = self.c.shape[1]
        signs = torch.randint(0, 2, (columns, num_vectors), generator=generator).float().mul_(2).sub_(1)
        signs = signs.to(self.c.device)
        spans = list(self._spans())
        expected = self.a @ torch.cat([self.b[:, span] @ signs[span] for span in spans], 1)
        found = torch.cat([self.c[:, span] @ signs[span] for span in spans], 1)
        errors = (found - expected).double().view(-1, len(spans), num_vectors).square().mean(-1)
        excess = errors / (self._noise() + min(columns, self.length) * self.floor**2 + 1e-300)
        suspects = (~(excess <= 1) | self._hidden()).any(1).nonzero()[:, 0].cpu()
        return suspects[excess.amax(1).cpu()[suspects].argsort(descending=True)]

    def _compare(self, rows: Tensor) -> None:
        """Every element of these rows with its value in fp64."""
        taken = rows.to(self.c.device)
        exact = torch.zeros(len(rows), self.c.shape[1], dtype=torch.float64, device=self.c.device)
        squares = torch.zeros_like(exact)
        for start in range(0, self.n, inner_span):
            span = slice(start, start + inner_span)
            a, b = self.a[taken, span].double(), self.b[span].double()
            exact.addmm_(a, b)
            squares.addmm_(a.square_(), b.square_())
        sizes = exact.abs()
        limits = self.reply.unit * (1 + 2 * self.reply.unit) * sizes + self.floor
        terms = squares.sqrt()
        limits += fp32_unit * (2 * math.sqrt(self.n) + 4) * (terms + sizes)
        limits += (fp32_unit * self.n**1.5 / 2 * terms).clamp_(max=self.reply.least_error / 4 * self.rms)
        sameness = sizes.square().div_(squares.mul_(self.n).clamp_(min=least_square)).clamp_(max=1)
        limits += fp32_unit * self.n / 2 * sizes * sameness.pow_(4)
        errors = self.c[taken].double().sub_(exact).abs_()
        over = errors - limits
        worst = int(over.argmax())
        if not float(over.view(-1)[worst]) <= 0:
            error, limit = (float(x.view(-1)[worst]) / max(self.rms, 1e-300) for x in (errors, limits))
            raise InvalidUpdate(
                f"a tile is not the product of its factors: an element is off by {error:.3g} of the tile's root mean "
                f"square and {limit:.3g} is the most that rounding explains; that machine is faulty, or rounds as "
                "TF32 does"
            )


def _largest(values: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    if values.stride(0) < values.stride(1):
        values = values.T  # torch would copy it, slowly
    low, high = (float(x) for x in torch.aminmax(values))
    return max(-low, high) if not (math.isnan(low) or math.isnan(high)) else math.nan


def _power(largest: float) -> int:
    """The power of two to divide by, 0 where squares are safe as they are."""
    power = math.frexp(largest)[1]
    return power if largest and abs(power) > unscaled else 0


def _scaled(values: Tensor, power: int) -> Tensor:
    """fp32, over 2^power: exactly, but for what is too small to matter."""
    values = values.float()
    while power:
        step = max(-100, min(100, power))
        values, power = values * 2.0**-step, power - step
    return values


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
