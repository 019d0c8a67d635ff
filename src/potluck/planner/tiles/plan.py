"""A plan: which device computes which tile of a product, when it should be back, and what binds whom.

A device with d seconds of download, c of work and u of upload in k tiles, and a round trip r, is done after

    t = r + (d + c + u) / k + (1 - 1/k) max(d, c, u)          tile j of k after  r + (d + c + u) / k + (j-1)/k max(...)

One tile overlaps nothing, and k tiles overlap (k-1)/k of what can overlap. The coordinator's own link and the head's
checks take what their bytes and FLOPs take, beside the devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from potluck.planner.tiles.device import TileDevice
from potluck.planner.tiles.product import Options, Product
from potluck.types.ids import WorkerId

Method = Literal["native", "plain", "inner_split", "kept_weights", "inner_split+kept_weights"]
Binding = Literal["down", "up", "compute"]
Shared = Literal["devices", "egress", "ingress", "head"]


_close = 0.95


class Tile(NamedTuple):
    """C[row0:row1, col0:col1] += A[row0:row1, k0:k1] B[k0:k1, col0:col1]."""

    device: WorkerId
    row0: int
    row1: int
    col0: int
    col1: int
    k0: int
    k1: int
    finish_s: float  # after the product's start, the earlier tiles of its device going first


class Load(NamedTuple):
    """What a plan asks of one device: seconds of each kind, and bytes with no weight held before."""

    down_bytes: float
    up_bytes: float
    down_s: float
    up_s: float
    compute_s: float
    finish_s: float

    @property
    def binding(self) -> Binding:
        most = max(self.down_s, self.up_s, self.compute_s)
        return "down" if most == self.down_s else "up" if most == self.up_s else "compute"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tiles in the order in which they are handed out: the first of each device, then the second of each.

    `first_s` is the time of the first micro-batch of an optimizer step, `later_s` that of each later one, in which
    devices hold their parts of B already; equal where no weight is kept. A `native` plan has no tiles: the head does
    the product in that time (inf where it cannot tell).
    """

    product: Product
    options: Options
    devices: tuple[TileDevice, ...]  # those that were planned with, used or not
    tiles: tuple[Tile, ...]
    loads: Mapping[WorkerId, Load]  # of each device with a tile, in the first micro-batch
    num_inner_parts: int
    keeps_weights: bool
    first_s: float
    later_s: float
    lower_bound_s: float  # on plain plans with full overlap and nothing shared: see bound.py
    first_down_bytes: float  # of all devices
    later_down_bytes: float
    up_bytes: float  # in each micro-batch
    egress_s: float  # of the first micro-batch
    ingress_s: float
    head_s: float  # checks and sums
    check_flops: float  # of the head in each micro-batch: Freivalds' check of every tile
    reason: str  # why this and not another

    @property
    def method(self) -> Method:
        if not self.tiles:
            return "native"
        if self.num_inner_parts > 1:
            return "inner_split+kept_weights" if self.keeps_weights else "inner_split"
        return "kept_weights" if self.keeps_weights else "plain"

    @property
    def step_s(self) -> float:
        """All micro-batches of an optimizer step."""
        return self.first_s + (self.options.num_micro_batches - 1) * self.later_s

    @property
    def step_bytes(self) -> float:
        """Both ways, of all devices and micro-batches of an optimizer step."""
        num = self.options.num_micro_batches
        return self.first_down_bytes + (num - 1) * self.later_down_bytes + num * self.up_bytes

    @cached_property
    def bindings(self) -> Counter[Binding]:
        """How many devices each resource binds."""
        return Counter(load.binding for load in self.loads.values())

    @property
    def slowest(self) -> Shared:
        """What the product waits for: its devices, the coordinator's link, or the head's checks and sums.

        Devices are chosen so that they need no less time than what they share, so what they share counts if close.
        """
        devices_s = _close * max((load.finish_s for load in self.loads.values()), default=0.0)
        times: dict[Shared, float] = {
            "devices": devices_s, "egress": self.egress_s, "ingress": self.ingress_s, "head": self.head_s,
        }  # fmt: skip
        return max(times, key=lambda name: times[name])

    @property
    def binds(self) -> Binding | Shared:
        """The coordinator's link, the head, or what binds most of the devices."""
        return self.bindings.most_common(1)[0][0] if self.slowest == "devices" and self.loads else self.slowest

    @property
    def assumptions(self) -> str:
        tiles = self.options.num_tiles
        overlap = f"{tiles} tiles a device overlap {tiles - 1}/{tiles}" if tiles else "full overlap"
        return f"{overlap}; the coordinator's link and the head's checks run beside the devices"
