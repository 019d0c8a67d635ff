"""What a process of a bench of sub-GEMM does besides its work; run in it first (`nursery.py`, BEFORE).

On a device: products of a chosen speed, or wrong ones. On the head: steps are kept, and what becomes of tiles is noted,
a line of JSON each, with seconds since 1970.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file
from torch import Tensor

from potluck.strategies.bag import Piece
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm import multiply as products
from potluck.strategies.sub_gemm import strategy
from potluck.strategies.sub_gemm.head import HeadModel
from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.types.ids import WorkerId
from potluck.types.vector import Vector

lie_share = 1e-3
"""Of a tile's root mean square, by which a wrong element is off: the least that must be found."""


def before(call: str) -> dict[str, str]:
    """The environment that has a process do this first: `before("pace(1e-9)")`."""
    return {"BEFORE": f"from potluck.bench.rig import tiles\ntiles.{call}"}


def pace(s_per_flop: float) -> None:
    """Products take so long, whatever else this machine does; longer where it is slower than that."""
    multiply = strategy.multiply

    def paced(a: Tensor, b: Tensor, **how: Any) -> Tensor:
        begun = time.perf_counter()
        product = multiply(a, b, **how)
        inner = a.shape[0] if how.get("is_a_transposed") else a.shape[1]
        wanted_s = 2.0 * product.numel() * inner * s_per_flop
        time.sleep(max(0.0, wanted_s - (time.perf_counter() - begun)))
        return product

    strategy.multiply = paced


def lie(one_in: int) -> None:
    """One element of every so many-th product is off."""
    multiply, num_products = strategy.multiply, 0

    def wrong(a: Tensor, b: Tensor, **how: Any) -> Tensor:
        nonlocal num_products
        product = multiply(a, b, **how)
        num_products += 1
        if num_products % one_in == 0:
            product[-1, -1] += lie_share * product.float().square().mean().sqrt()
        return product

    strategy.multiply = wrong


def keep_steps(folder: str) -> None:
    """Of each step in a file of its number from 0: "theta" and "gradient", flat and in fp32, and "tokens"."""
    load, gradient = HeadModel.load, HeadModel.gradient
    thetas: list[Tensor] = []

    def loaded(model: HeadModel, theta: Vector | Tensor) -> None:
        thetas[:] = [Vector.of(theta).tensor()]
        load(model, theta)

    def kept(model: HeadModel, batches: Iterable[Tensor], *, step: int = 0, **how: Any) -> Any:
        tokens = list(batches)
        found = gradient(model, iter(tokens), step=step, **how)
        tensors = {"theta": thetas[0], "gradient": found[0], "tokens": torch.cat(tokens).long()}
        save_file(tensors, Path(folder) / f"{step}.safetensors")
        return found

    _replace(HeadModel, load=loaded, gradient=kept)


def watch(path: str) -> None:
    """Note what bags do: tiles that are sent, late, lost, checked and taken, and products that end.

    A tile is "anew" if it overlaps one of its product that was sent before, or is another part of its sum.
    """
    issue, take, lose, result, check = TileBag.issue, TileBag.take, TileBag.lose, TileBag.result, products.check_tile
    file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - as long as the process
    numbers: WeakKeyDictionary[TileBag, int] = WeakKeyDictionary()
    sent_before: dict[int, list[_Rectangle]] = {}
    anew: set[Piece] = set()
    last = count()

    def number(bag: TileBag) -> int:
        if bag not in numbers:
            numbers[bag] = next(last)
        return numbers[bag]

    def note(bag: TileBag, what: str, **more: Any) -> None:
        line = {"time": time.time(), "product": number(bag), "what": what, **more}
        file.write(json.dumps(line) + "\n")

    def issued(bag: TileBag, here: Sequence[WorkerInfo], now: float) -> Any:
        num_late = bag.tally.num_late
        sent = issue(bag, here, now)
        if bag.tally.num_late > num_late:
            note(bag, "late")
        for worker, piece in sent:
            before, own = sent_before.setdefault(number(bag), []), _rectangle(piece)
            if any(own.overlaps(other) for other in before):
                anew.add(piece)
            before.append(own)
            note(bag, "sent", worker=worker, label=piece.label)
        return sent

    def taken(bag: TileBag, worker: WorkerId, piece: Piece, reply: Mapping[str, Tensor], now: float) -> None:
        up_bytes = bag.tally.up_bytes[worker]
        take(bag, worker, piece, reply, now)
        if bag.tally.up_bytes[worker] > up_bytes:  # of use; a worker's replies are taken one after the other
            note(bag, "taken", worker=worker, is_anew=piece in anew)

    def lost(bag: TileBag, worker: WorkerId, piece: Piece, reason: str, now: float) -> None:
        lose(bag, worker, piece, reason, now)
        note(bag, "lost", worker=worker)

    def ended(bag: TileBag) -> Tensor:
        values = result(bag)
        note(bag, "ended")
        sent_before.pop(number(bag), None)
        anew.clear()
        return values

    def checked(*matrices: Tensor, **how: Any) -> Any:
        begun = time.thread_time()
        done = check(*matrices, **how)
        cpu_s = time.thread_time() - begun
        file.write(json.dumps({"time": time.time(), "what": "checked", "cpu_s": cpu_s}) + "\n")
        return done

    _replace(TileBag, issue=issued, take=taken, lose=lost, result=ended)
    _replace(products, check_tile=checked)


class _Rectangle(NamedTuple):
    row0: int
    row1: int
    col0: int
    col1: int

    def overlaps(self, other: _Rectangle) -> bool:
        return self.row0 < other.row1 and other.row0 < self.row1 and self.col0 < other.col1 and other.col0 < self.col1


def _rectangle(piece: Piece) -> _Rectangle:
    """Of a tile, whose label ends in [row0:row1, col0:col1]."""
    return _Rectangle(*map(int, re.findall(r"\d+", piece.label.rpartition("[")[2])))


def _replace(target: object, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(target, name, method)
