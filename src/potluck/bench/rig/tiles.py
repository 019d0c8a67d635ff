"""What a process of a bench of sub-GEMM does besides its work; run in it first (`nursery.py`, BEFORE).

On a device: products of a chosen speed, or wrong ones. On the head: gradients and what becomes of tiles are written
down, a line of JSON each, with seconds since 1970.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from potluck.strategies.bag import Piece
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm import strategy
from potluck.strategies.sub_gemm.head import HeadModel
from potluck.strategies.sub_gemm.lane import Tile
from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.types.ids import WorkerId

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


def keep_gradients(folder: str) -> None:
    """The gradient of each step, flat and in fp32, in a file of its number from 0."""
    gradient = HeadModel.gradient

    def kept(model: HeadModel, *given: Any, step: int = 0, **how: Any) -> Any:
        found = gradient(model, *given, step=step, **how)
        save_file({"gradient": found[0]}, Path(folder) / f"{step}.safetensors")
        return found

    HeadModel.gradient = kept


def watch(path: str) -> None:
    """Note every product that begins or ends, and every tile that is late, lost, or taken after it was dealt anew."""
    issue, take, lose, result = TileBag.issue, TileBag.take, TileBag.lose, TileBag.result
    file = Path(path).open("a", encoding="utf-8", buffering=1)

    def note(bag: TileBag, what: str, **more: Any) -> None:
        line = {"time": time.time(), "product": id(bag), "what": what, **more}
        file.write(json.dumps(line) + "\n")

    def issued(bag: TileBag, here: Sequence[WorkerInfo], now: float) -> Any:
        num_late = bag.tally.num_late
        sent = issue(bag, here, now)
        if bag.tally.num_late > num_late:
            note(bag, "late")
        for worker, _ in sent:
            note(bag, "sent", worker=worker)
        return sent

    def taken(bag: TileBag, worker: WorkerId, piece: Piece, reply: Mapping[str, Tensor], now: float) -> None:
        flight = bag._flights.get(piece)
        take(bag, worker, piece, reply, now)
        if flight is not None:
            note(bag, "taken", worker=worker, is_anew=_is_anew(flight.tile))

    def lost(bag: TileBag, worker: WorkerId, piece: Piece, reason: str, now: float) -> None:
        lose(bag, worker, piece, reason, now)
        note(bag, "lost", worker=worker)

    def ended(bag: TileBag) -> Tensor:
        values = result(bag)
        note(bag, "ended")
        return values

    TileBag.issue, TileBag.take, TileBag.lose, TileBag.result = issued, taken, lost, ended


def _is_anew(tile: Tile) -> bool:
    """Whether it, or what it is a part of, had been given to somebody else before."""
    parent = tile.parent
    return tile.num_issued > 1 or (parent is not None and (parent.num_issued > 0 or _is_anew(parent)))
