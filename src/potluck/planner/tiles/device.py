"""The devices and the head, as far as a plan of tiles depends on them.

A device takes s_per_flop F + s_per_tile for a tile of F FLOPs, which is `cost.OpCost` of products with its bytes
counted to its FLOPs. Its two directions of the link are apart and shared with nobody but the coordinator's own link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.planner.cost import DeviceCost
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, LinkRates

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

unknown_link = LinkRates(up_bytes_per_s=1.25e6, down_bytes_per_s=6.25e6, rtt_s=0.05)
"""Of a device whose transfers have shown nothing yet: 10 Mbit/s up, 50 down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileDevice:
    """A device that computes tiles. Bytes a second each way, seconds, bytes."""

    id: WorkerId
    down_bytes_per_s: float
    up_bytes_per_s: float
    s_per_flop: float
    s_per_tile: float = 0.0
    rtt_s: float = 0.0
    memory_bytes: float = math.inf  # for operands, results and kept weights
    num_in_flight: int = 2  # tiles that it holds at a time, the one it computes included


def tile_device(
    worker: WorkerId,
    profile: DeviceProfile,
    cost: DeviceCost,
    *,
    max_memory_bytes: float = math.inf,
    num_in_flight: int = 2,
) -> TileDevice:
    """From what a device reported; `cost` is `cost.starting_cost` of it. `max_memory_bytes`: what its owner gives."""
    link = profile.link
    return TileDevice(
        id=worker,
        down_bytes_per_s=link.down_bytes_per_s or unknown_link.down_bytes_per_s,
        up_bytes_per_s=link.up_bytes_per_s or unknown_link.up_bytes_per_s,
        s_per_flop=cost.gemm.s_per_flop,
        s_per_tile=cost.gemm.s_per_call,
        rtt_s=link.rtt_s or unknown_link.rtt_s,
        memory_bytes=min(max_memory_bytes, profile.usable_memory_bytes or math.inf),
        num_in_flight=num_in_flight,
    )


@dataclass(frozen=True, kw_only=True)
class Head:
    """The machine that runs the model, with the coordinator's link, which all devices share.

    It can compute a product by itself (`s_per_flop`; inf where it shall not), checks every tile by Freivalds'
    algorithm and adds partial sums. inf for a rate, and 0 for a time, where it shall not count.
    """

    s_per_flop: float = math.inf
    egress_bytes_per_s: float = math.inf
    ingress_bytes_per_s: float = math.inf
    num_check_vectors: int = 20
    check_s_per_flop: float = 0.0
    add_s_per_element: float = 0.0

    @property
    def counts_sides(self) -> bool:
        """Whether the sum of all rectangles' sides costs the head or its link anything."""
        return self.egress_bytes_per_s < math.inf or self.check_s_per_flop > 0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A fleet as columns, [num_devices] each; the units of `TileDevice`."""

    down: Floats
    up: Floats
    s_per_flop: Floats
    fixed_s: Floats  # round trip and calls, whatever the tile
    memory: Floats  # for the tiles that it has at a time
    kept: Floats  # for the weights of this product that it keeps, beside those
    num_in_flight: Ints

    def __len__(self) -> int:
        return len(self.down)

    def take(self, chosen: Ints) -> Rates:
        return Rates(
            down=self.down[chosen],
            up=self.up[chosen],
            s_per_flop=self.s_per_flop[chosen],
            fixed_s=self.fixed_s[chosen],
            memory=self.memory[chosen],
            kept=self.kept[chosen],
            num_in_flight=self.num_in_flight[chosen],
        )

    def in_turns(self, num_rounds: int) -> Rates:
        """Every device `num_rounds` times, each time with its share. Tiles of two turns may be held at a time, and
        nothing is kept.
        """
        if num_rounds == 1:
            return self
        taken = self.take(np.repeat(np.arange(len(self)), num_rounds))
        return Rates(
            down=taken.down / num_rounds,
            up=taken.up / num_rounds,
            s_per_flop=taken.s_per_flop * num_rounds,
            fixed_s=taken.fixed_s,
            memory=taken.memory / taken.num_in_flight,
            kept=np.zeros_like(taken.kept),
            num_in_flight=taken.num_in_flight,
        )


def rates_of(
    devices: Sequence[TileDevice], *, num_tiles: int = 1, room_share: float = 0.0, kept_part: float = 1.0
) -> Rates:
    """`room_share` of their memory is for kept weights, `kept_part` of that for one product's.

    ValueError for a device whose numbers are none: rates above 0, times of 0 or more.
    """
    rows = [(d.down_bytes_per_s, d.up_bytes_per_s, d.s_per_flop, d.s_per_tile, d.rtt_s, d.memory_bytes, d.num_in_flight)
            for d in devices]  # fmt: skip
    down, up, s_per_flop, s_per_tile, rtt_s, memory, num_in_flight = np.array(rows, dtype=np.float64).reshape(-1, 7).T
    valid = (down > 0) & (up > 0) & (s_per_flop >= 0) & (s_per_tile >= 0) & (rtt_s >= 0) & (memory >= 0)
    valid &= np.isfinite(s_per_flop + s_per_tile + rtt_s) & (num_in_flight >= 1)
    if not valid.all():
        raise ValueError(f"{devices[int(np.argmin(valid))]} cannot be planned with; rates are above 0 and times finite")
    return Rates(
        down=down,
        up=up,
        s_per_flop=s_per_flop,
        fixed_s=rtt_s + max(1, num_tiles) * s_per_tile,
        memory=memory * (1 - room_share),
        kept=memory * room_share * kept_part if room_share * kept_part else np.zeros_like(memory),
        num_in_flight=num_in_flight.astype(np.int64),
    )
