"""Devices that are played on a clock of events, with faults, for a bag of pieces."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import torch
from torch import Tensor

from potluck.codecs.factors import sent_as
from potluck.planner.tiles.device import Head
from potluck.strategies.bag import Bag, Piece
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.deal import Sizes
from potluck.strategies.sub_gemm.pieces import Terms
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.strategies.sub_gemm.tile import multiply
from potluck.types.errors import InvalidUpdate
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, GemmSpeed, LinkRates, Speeds


def check_exactly(a: Tensor, b: Tensor, c: Tensor, generator: torch.Generator) -> None:
    """For whole numbers, whose sums are exact in any order."""
    if c.shape != (a.shape[0], b.shape[1]) or not torch.equal(c, a @ b):
        raise InvalidUpdate("a tile is not the product of its factors")


def terms(check: object = check_exactly, **changes: object) -> Terms:
    given = {"wire": "fp32", "sizes": Sizes(), "check": check, "received": lambda values: values, "head": Head()}
    return Terms(**{**given, **changes})  # pyright: ignore[reportArgumentType]


def whole_numbers(m: int, n: int, q: int, seed: int = 0) -> Product:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, shape, generator=generator).float() for shape in ((m, n), (n, q)))
    return Product(Matrix(a, "x"), Matrix(b, "w", is_weight=True), "forward", "h.0")


@dataclass
class Played:
    """One device. Its rates are true; what it reports may be off by `optimism`."""

    id: WorkerId
    down: float = 1e6
    up: float = 5e5
    flops: float = 1e8
    memory: int = 1 << 30
    optimism: float = 1.0
    joins_at: float = 0.0
    dies_at: float = math.inf  # noticed `notice_s` later
    leaves_at: float = math.inf  # and says so
    returns_at: float = math.inf
    hangs_at: float = math.inf  # beats, and never answers again
    lies: float = 0.0  # share of tiles
    fails: float = 0.0
    doubles: float = 0.0  # answered twice
    stalls: float = 0.0  # held back for a long time
    jitter: float = 0.0
    notice_s: float = 6.0
    is_measured: bool = True  # its link
    flying: dict[Piece, float] = field(default_factory=dict[Piece, float])
    stages: tuple[float, float, float] = (0.0, 0.0, 0.0)
    kept: set[str] = field(default_factory=set[str])  # names of shards

    @property
    def info(self) -> WorkerInfo:
        s_per_flop = 1 / (self.flops * self.optimism)
        speeds = Speeds(gemm=(GemmSpeed(dtype="fp32", dim=256, s_per_flop=s_per_flop),))
        told = self.optimism if self.is_measured else 0.0
        link = LinkRates(up_bytes_per_s=self.up * told, down_bytes_per_s=self.down * told, rtt_s=0.01 if told else 0.0)
        memory = math.ceil(self.memory / 0.85)
        return WorkerInfo(
            id=self.id,
            profile=DeviceProfile(
                device="cpu", total_memory_bytes=memory, free_memory_bytes=memory, speeds=speeds, link=link
            ),
        )

    def is_here(self, now: float) -> bool:
        gone = self.leaves_at <= now < self.returns_at or now >= self.dies_at + self.notice_s
        return now >= self.joins_at and not gone

    def answers_at(self, piece: Piece, now: float, chance: random.Random) -> float:
        a, b = (piece.operands[name].values for name in ("a", "b"))
        depth = a.shape[0 if piece.arguments["is_a_transposed"] else 1]
        rows, cols = a.numel() // depth, b.numel() // depth
        noise = math.exp(chance.gauss(0, self.jitter))
        fresh = sum(o.values.numel() for o in piece.operands.values() if o.name not in self.kept)
        self.kept.update(o.name for o in piece.operands.values() if o.name)
        down, work, up = self.stages
        down = max(now, down) + noise * 4 * fresh / self.down
        work = max(down, work) + noise * 2 * rows * depth * cols / self.flops
        up = max(work, up) + noise * 4 * rows * cols / self.up
        self.stages = (down, work, up)
        return up + 0.01 + (chance.uniform(5, 60) if chance.random() < self.stalls else 0.0)

    def answer(self, piece: Piece, chance: random.Random) -> dict[str, Tensor]:
        a, b = (sent_as(piece.operands[name].values, piece.wire) for name in ("a", "b"))
        c = multiply(a, b, **piece.arguments)
        if chance.random() < self.lies:
            match chance.randrange(4):
                case 0:
                    c[chance.randrange(c.shape[0]), chance.randrange(c.shape[1])] += 1.0
                case 1:
                    c = torch.full_like(c, math.nan)
                case 2:
                    c = torch.zeros(c.shape[0] + 1, c.shape[1])
                case _:
                    return {"d": c}
        return {"c": c}


class Stuck(AssertionError):
    """Nothing is under way and the bag waits."""


def play(bag: Bag, devices: Sequence[Played], seed: int = 0, *, most_s: float = 1e5, begin: float = 0.0) -> float:
    """Until the bag is done or raises; the seconds that took."""
    chance, order, by_id = random.Random(seed), count(), {d.id: d for d in devices}
    events: list[tuple[float, int, str, Played, Piece | None]] = []
    for d in devices:
        for at in (d.joins_at, d.leaves_at, d.returns_at, d.dies_at + d.notice_s):
            if begin < at < math.inf:
                heapq.heappush(events, (at, next(order), "change", d, None))
    now, here = begin, tuple(d.info for d in devices if d.is_here(begin))
    while True:
        sent = bag.issue(here, now)
        for piece in bag.dropped():
            for d in devices:
                d.flying.pop(piece, None)  # withdrawn; its reply may come all the same
        for id, piece in sent:
            d = by_id[id]
            assert d.is_here(now), f"{id} is not here"
            assert piece not in d.flying
            d.flying[piece] = now
            shards = {o.name: o.values.numel() for p in d.flying for o in p.operands.values()}
            results = sum(p.memory_bytes - 4 * sum(o.values.numel() for o in p.operands.values()) for p in d.flying)
            flying_bytes = 4 * sum(shards.values()) + results
            assert flying_bytes <= d.memory, f"{id} holds {flying_bytes} of {d.memory}"
            at = d.answers_at(piece, now, chance)
            kind = "fail" if chance.random() < d.fails else "reply"
            heapq.heappush(events, (at, next(order), kind, d, piece))
            if kind == "reply" and chance.random() < d.doubles:
                heapq.heappush(events, (at + chance.choice((0.0, 0.1, 3.0)), next(order), kind, d, piece))
        if bag.is_done:
            return now - begin
        at = min(events[0][0] if events else math.inf, bag.look_at())
        if at == math.inf:
            raise Stuck(f"at {now:.3f} s")
        assert at < most_s, "it takes for ever"
        now = max(now, at)
        while events and events[0][0] <= now:
            _, _, kind, d, piece = heapq.heappop(events)
            if kind == "change":
                here = tuple(d.info for d in devices if d.is_here(now))
                if not d.is_here(now):
                    lost, d.flying, d.stages, d.kept = list(d.flying), {}, (0.0, 0.0, 0.0), set()
                    for each in lost:
                        bag.lose(d.id, each, f"{d.id} is gone", now)
                continue
            assert piece is not None
            if now >= min(d.dies_at, d.hangs_at) or d.leaves_at <= now < d.returns_at:
                continue
            d.flying.pop(piece, None)
            if kind == "fail":
                bag.lose(d.id, piece, f"{d.id} ran out of memory", now)
                continue
            try:
                bag.take(d.id, piece, d.answer(piece, chance), now)
            except InvalidUpdate as error:
                bag.lose(d.id, piece, str(error), now)


def strips(
    product: Product, devices: Sequence[Played], *, num_slabs: int = 1, num_each: int = 1
) -> list[tuple[WorkerId, Box]]:
    """Columns in proportion to speed, each slab of K anew."""
    m, n, q = product.shape
    slabs = Box(0, m, 0, q, 0, n), *()
    edges = [round(n * i / num_slabs) for i in range(num_slabs + 1)]
    placed: list[tuple[WorkerId, Box]] = []
    for slab, (k0, k1) in enumerate(pairwise(edges)):
        turn = [*devices[slab % len(devices) :], *devices[: slab % len(devices)]]
        start, total, passed = 0, sum(d.flops for d in turn), 0.0
        for d in turn:
            passed += d.flops
            end = q if d is turn[-1] else round(q * passed / total)
            if start < end:
                whole = slabs[0]._replace(col0=start, col1=end, k0=k0, k1=k1)
                placed += [(d.id, part) for part in whole.shares([1.0] * min(num_each, max(whole.shape)))]
            start = end
    return placed
