"""The tiles of a product and what they were cut into: a tile that is dealt anew in parts is put together from them.

Its parts make an assembly of their own, so a late reply for all of it still counts if it comes before the last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from potluck.strategies.sub_gemm.assembly import Assembly, Box
from potluck.strategies.sub_gemm.lane import Tile


class Tree:
    """`open` are the tiles that devices have to compute: neither there, nor cut, nor left to the head."""

    def __init__(self, whole: Box, boxes: Iterable[Box], device: torch.device) -> None:
        self._device = device
        self.root = Assembly(whole, boxes, device=device)
        self.open: dict[Tile, None] = {}
        self.open_volume = self.head_volume = 0
        self.for_head: list[Tile] = []

    def add(self, box: Box) -> Tile:
        """A tile of the plan."""
        return self._opened(Tile(box, self.root))

    def cut(self, tile: Tile, boxes: Sequence[Box]) -> list[Tile]:
        """Its parts, from now on open in its place."""
        into = Assembly(tile.box, boxes, device=self._device)
        self._shut(tile)
        tile.parts = [
            self._opened(
                Tile(
                    box,
                    into,
                    parent=tile,
                    num_issued=tile.num_issued,
                    num_failures=tile.num_failures,
                    failed_on=set(tile.failed_on),
                    reason=tile.reason,
                )
            )
            for box in boxes
        ]
        return tile.parts

    def leave_to_head(self, tile: Tile) -> None:
        tile.is_for_head = True
        self._shut(tile)
        self.for_head.append(tile)
        self.head_volume += tile.box.volume

    def close(self, tile: Tile) -> list[Tile]:
        """It is there. It and those of its parts, and theirs, that nobody needs any more."""
        tile.is_done = True
        self._shut(tile)
        return [tile, *(each for part in tile.parts if not part.is_done for each in self.close(part))]

    def _opened(self, tile: Tile) -> Tile:
        self.open[tile] = None
        self.open_volume += tile.box.volume
        return tile

    def _shut(self, tile: Tile) -> None:
        if tile in self.open:
            del self.open[tile]
            self.open_volume -= tile.box.volume
