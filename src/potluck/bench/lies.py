"""Wrong tiles of matrix products: whether every one is refused, no honest one is, and what the check costs.

Factors are as those of transformers may be: normal, with features 50 times and tokens 20 times as large as the rest,
all of one sign, cancelling, sparse, constant, tiny and denormal. Honest tiles are summed in the ways that devices
differ in, and wrong ones are honest but for an error of the least size that must be found: 1e-3 of the tile's root mean
square on an fp32 wire, 0.5 on bf16. Times are CPU seconds of a check and of the product it checks, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.codecs.factors import sent_as
from potluck.strategies.sub_gemm.checks import check_tile
from potluck.strategies.sub_gemm.tile import REPLY_TYPES, multiply
from potluck.types.errors import InvalidUpdate

FACTORS = (
    "normal", "features", "tokens", "both", "columns", "positive", "cancelling", "vanishing", "sparse", "zeros",
    "constant", "faint", "tiny", "denormal", "huge",
)  # fmt: skip
UNKNOWABLE = ("vanishing", "constant", "denormal")
"""Honest sums of these, or of devices without denormal numbers, may differ by as much as the lies do."""
ORDERS = ("task", "numpy", "fp64", "reversed", "chunks", "sequence")
LIES = ("element", "pair", "low_rank", "whole")
WIRES = tuple(REPLY_TYPES)
LEAST = {"fp32": 1e-3, "bf16": 0.5, "int8": 0.5}
"""The error of a lie, in root mean squares of the tile."""

timed_shapes = ((256, 768, 256), (512, 1024, 512), (1024, 1024, 1024), (512, 8192, 512))
most_products = 1 << 26  # of a tile, so that thousands of them take minutes
most_in_sequence = 1 << 24


def bench_lies(
    *, num_lies: int = 1000, num_honest: int = 10_000, num_timed: int = 9, num_threads: int = 1, seed: int = 1
) -> dict[str, float]:
    """Refused and accepted tiles, and the time of checks beside that of products. About five minutes."""
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(seed)
    figures: dict[str, float] = {"num_threads": num_threads}
    for wire in WIRES:
        for lie in LIES:
            refused = sum(is_refused(*wrong_tile(lie, wire, generator), wire, generator) for _ in range(num_lies))
            figures[f"{wire}_{lie}_lies_refused"] = refused
    figures["lies_of_each_kind"] = num_lies
    refused = 0
    for index in range(num_honest):
        wire = WIRES[index % len(WIRES)]
        refused += is_refused(*honest_tile(wire, generator), wire, generator)
    figures |= {"honest_tiles": num_honest, "honest_tiles_refused": refused}
    a, b, _ = honest_tile("fp32", generator, factors="normal", shape=(512, 1024, 512))
    figures["tf32_on_fp32_refused"] = float(is_refused(a, b, _tf32(a) @ _tf32(b), "fp32", generator))
    for shape in timed_shapes:
        for wire in ("fp32", "bf16"):
            figures |= _times(shape, wire, generator, num_timed)
    return figures


def is_refused(a: Tensor, b: Tensor, c: Tensor, wire: str, generator: torch.Generator) -> bool:
    try:
        check_tile(a, b, c, wire=wire, generator=generator)
    except InvalidUpdate:
        return True
    return False


def honest_tile(
    wire: str,
    generator: torch.Generator,
    *,
    factors: str | None = None,
    order: str | None = None,
    shape: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A, B as a device gets them and C as it sends it back; what is not given is drawn."""
    m, n, q = shape or draw_shape(generator)
    a, b = draw_factors(factors or _pick(FACTORS, generator), m, n, q, generator)
    a, b = sent_as(a, wire), sent_as(b, wire)
    order = order or _pick(ORDERS, generator)
    if order == "sequence" and m * n * q > most_in_sequence:
        order = "reversed"
    return a, b, _summed(a, b, wire, order)


def wrong_tile(lie: str, wire: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An honest tile that is not zero, but for one error of the least size."""
    known = [kind for kind in FACTORS if kind not in UNKNOWABLE]
    while True:
        m, n, q = draw_shape(generator)
        a, b, honest = honest_tile(wire, generator, factors=_pick(known, generator), shape=(m, n, max(q, 2)))
        if float(honest.abs().max()) > 0:
            return a, b, _with_lie(a, b, honest, lie, LEAST[wire], generator)


def draw_shape(generator: torch.Generator) -> tuple[int, int, int]:
    """Sides from 1 to 1,024 and sums of 1 to 8,192 terms, half of them as often in each power of two."""
    is_even = _below(2, generator) == 0
    while True:
        sides = (1024, 8192, 1024)
        m, n, q = (1 + _below(s, generator) if is_even else int(s ** _uniform(generator)) for s in sides)
        if m * n * q <= most_products:
            return m, n, q


def draw_factors(kind: str, m: int, n: int, q: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(m, n, generator=generator), torch.randn(n, q, generator=generator)
    if kind in ("features", "both"):
        a[:, _some(n, generator)] *= 50
    if kind in ("tokens", "both"):
        a[_some(m, generator)] *= 20
    if kind == "columns":
        b[:, _some(q, generator)] *= 50
    if kind == "positive":
        a, b = a.abs(), b.abs()
    if kind in ("cancelling", "vanishing"):
        left = 3e-2 if kind == "cancelling" else 1e-3
        a[:, 1::2] = -a[:, : n // 2 * 2 : 2]
        b[1::2] = b[: n // 2 * 2 : 2] * (1 + left * b[1::2])
    if kind == "sparse":
        a *= torch.rand(m, n, generator=generator) < 0.02
    if kind == "zeros":
        a[_some(m, generator)] = 0
        b *= _uniform(generator) < 0.5
    if kind == "constant":
        a, b = a[:, :1].expand(m, n), b[:1].expand(n, q)
    if kind == "faint":
        a[_some(m, generator)] *= 1e-30
    scales = {"tiny": (1e-15, 1e-12), "denormal": (1e-39, 1.0), "huge": (1e17, 1e14)}.get(kind, (1.0, 1.0))
    return a * scales[0], b * scales[1]


def _summed(a: Tensor, b: Tensor, wire: str, order: str) -> Tensor:
    """C in the reply's type, its terms summed in one of the ways that devices have."""
    reply = REPLY_TYPES[wire]
    n = a.shape[1]
    if order == "task":
        return multiply(a, b, wire=wire)
    if order == "fp64":
        return (a.double() @ b.double()).to(reply)
    x, y = a.float(), b.float()
    if order == "numpy":  # which brings a BLAS of its own
        return torch.from_numpy(x.numpy() @ y.numpy()).to(reply)
    if order == "reversed":
        return (x.flip(1) @ y.flip(0)).to(reply)
    if order == "chunks":
        spans = [slice(start, start + 100) for start in range(0, n, 100)]
        return torch.stack([x[:, span] @ y[span] for span in spans]).sum(0).to(reply)
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(n):
        total.addcmul_(x[:, k : k + 1], y[k : k + 1])
    return total.to(reply)


def _with_lie(a: Tensor, b: Tensor, honest: Tensor, lie: str, least: float, generator: torch.Generator) -> Tensor:
    exact = a.double() @ b.double()
    (m, q), rms = exact.shape, float(exact.square().mean().sqrt())
    row, column = _below(m, generator), _below(q - 1, generator) if q > 1 else 0
    error = torch.zeros(m, q, dtype=torch.float64)
    if lie == "element":
        error[row, column] = _sign(generator)
    elif lie == "pair":
        error[row, column], error[row, column + 1] = 1, -1
    elif lie == "low_rank":
        error = torch.randn(m, 1, generator=generator).double() @ torch.randn(1, q, generator=generator).double()
        error /= error.square().mean().sqrt()
    else:
        error = torch.randn(m, q, generator=generator).double()
        error /= error.square().mean().sqrt()
    size = error * rms * least
    if honest.dtype == torch.bfloat16:
        size += error.sign() * honest.double().abs() * 2.0**-8  # rounding may take so much of it away
    return torch.where(error == 0, honest.double(), exact + size).to(honest.dtype)


def _times(shape: Sequence[int], wire: str, generator: torch.Generator, num_timed: int) -> dict[str, float]:
    m, n, q = shape
    a, b, c = honest_tile(wire, generator, factors="normal", order="task", shape=(m, n, q))
    pairs: list[tuple[float, float]] = []
    for _ in range(num_timed + 1):
        check_s = _seconds(lambda: check_tile(a, b, c, wire=wire, generator=generator))
        pairs.append((check_s, _seconds(lambda: multiply(a, b, wire=wire))))
    check_s, product_s = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    name = f"{wire}_{m}x{n}x{q}"
    return {
        f"{name}_check_ms": 1e3 * check_s,
        f"{name}_product_ms": 1e3 * product_s,
        f"{name}_check_by_product": check_s / product_s,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _tf32(values: Tensor) -> Tensor:
    """Rounded to the 10 bits that tensor cores keep of an fp32 operand."""
    bits = values.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _some(count: int, generator: torch.Generator) -> Tensor:
    """One of a hundred, and one at least."""
    return torch.randint(0, count, (max(1, count // 100),), generator=generator)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(0, max(count, 1), (), generator=generator))


def _sign(generator: torch.Generator) -> float:
    return 1.0 - 2.0 * _below(2, generator)


def _pick(names: Sequence[str], generator: torch.Generator) -> str:
    return names[_below(len(names), generator)]
