"""What a rectangle of a plane costs a device, and how high one of a given width may be in a given time.

Every way of handing out a product, or a whole layer, cuts a plane [rows, cols] into rectangles, one a device. One of
h rows and w columns takes

    d = (h down_row + w down_col + h w down_area) / rate        seconds of download, u of upload likewise
    c = h w flops_area s_per_flop                               of work
    t = fixed + a (d + u + c) + (1 - a) max(d, u, c)            a = 1 / tiles of a device, 0 for full overlap

which for a given w is the largest of three lines in h, so the highest rectangle in time T is the least of three
quotients. C[m, q] = A[m, n] B[n, q] has down_row = down_col = n b and up_area = b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck.planner.tiles.device import Floats, Rates


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Bytes for each row, column and cell of a rectangle: on the wire, and held in a device's memory."""

    rows: int
    cols: int
    down_row: float
    down_col: float
    down_area: float = 0.0
    up_row: float = 0.0
    up_col: float = 0.0
    up_area: float = 0.0
    flops_area: float
    held_row: float = 0.0
    held_col: float = 0.0
    held_area: float = 0.0
    kept_row: float = 0.0  # kept for later micro-batches, beside what is held
    kept_col: float = 0.0
    check_side: float = 0.0  # FLOPs of Freivalds' check for each random vector, and row or column of a tile
    check_area: float = 0.0
    strips: Literal["either", "rows", "cols"] = "either"
    """Along which a rectangle may be cut into successive tiles: rows where each row has a result of its own."""

    def transposed(self) -> Plane:
        return Plane(
            rows=self.cols, cols=self.rows,
            down_row=self.down_col, down_col=self.down_row, down_area=self.down_area,
            up_row=self.up_col, up_col=self.up_row, up_area=self.up_area, flops_area=self.flops_area,
            held_row=self.held_col, held_col=self.held_row, held_area=self.held_area,
            kept_row=self.kept_col, kept_col=self.kept_row,
            check_side=self.check_side, check_area=self.check_area,
            strips=_turned[self.strips],
        )  # fmt: skip

    def down_bytes(self, rows: Floats, cols: Floats) -> Floats:
        return self.down_row * rows + self.down_col * cols + self.down_area * rows * cols

    def up_bytes(self, rows: Floats, cols: Floats) -> Floats:
        return self.up_row * rows + self.up_col * cols + self.up_area * rows * cols


_rounding = 1e-9
_turned: dict[str, Literal["either", "rows", "cols"]] = {"either": "either", "rows": "cols", "cols": "rows"}


class Demand:
    """A plane before a fleet. `serial` is the share a of the module's docstring.

    `most_down_bytes` for each device keep rectangles near the shape with the fewest bytes also where its own link has
    time to spare, for the sake of the coordinator's.
    """

    def __init__(self, plane: Plane, rates: Rates, *, serial: float, most_down_bytes: Floats | None = None) -> None:
        self.plane = plane
        self.most_down_bytes = most_down_bytes
        self.rates = rates
        self.serial = serial
        self._s_per_down = 1.0 / rates.down
        self._s_per_up = 1.0 / rates.up
        self.panel_bytes = rates.memory / 2
        self.window_bytes = self.panel_bytes / rates.num_in_flight
        """For one tile's own operands and result; the operand that all tiles of a device share is the panel."""
        self._has_room = bool(np.isinf(rates.memory).all())

    def __len__(self) -> int:
        return len(self.rates)

    def take(self, chosen: slice | np.ndarray) -> Demand:
        places = np.arange(len(self))[chosen]
        most = None if self.most_down_bytes is None else self.most_down_bytes[places]
        return Demand(self.plane, self.rates.take(places), serial=self.serial, most_down_bytes=most)

    def transposed(self) -> Demand:
        return Demand(self.plane.transposed(), self.rates, serial=self.serial, most_down_bytes=self.most_down_bytes)

    def parts_s(self, rows: Floats, cols: Floats) -> tuple[Floats, Floats, Floats]:
        """Seconds of download, work and upload of a rectangle for each device."""
        down_s = self.plane.down_bytes(rows, cols) * self._s_per_down
        up_s = self.plane.up_bytes(rows, cols) * self._s_per_up
        return down_s, self.plane.flops_area * rows * cols * self.rates.s_per_flop, up_s

    def seconds(self, rows: Floats, cols: Floats) -> Floats:
        """t of the module's docstring for each device; 0 where its rectangle is empty."""
        down_s, compute_s, up_s = self.parts_s(rows, cols)
        most = np.maximum(np.maximum(down_s, compute_s), up_s)
        total = self.rates.fixed_s + most + self.serial * (down_s + compute_s + up_s - most)
        return np.where(rows * cols > 0, total, 0.0)

    def heights(self, widths: Floats | float, seconds: float) -> Floats:
        """Rows of the highest rectangle of so many columns within `seconds`, at most the plane's. [..., devices]"""
        plane, a, b = self.plane, self.serial, 1.0 - self.serial
        left_s = seconds - self.rates.fixed_s
        down_0 = plane.down_col * widths * self._s_per_down
        down_1 = (plane.down_row + plane.down_area * widths) * self._s_per_down
        up_0 = plane.up_col * widths * self._s_per_up if plane.up_col else 0.0
        up_1 = (plane.up_row + plane.up_area * widths) * self._s_per_up
        work_1 = plane.flops_area * widths * self.rates.s_per_flop
        with np.errstate(divide="ignore", invalid="ignore"):
            if a:
                left_s = left_s - a * (down_0 + up_0)
                every = a * (down_1 + up_1 + work_1)
                found = np.fmin((left_s - b * down_0) / (every + b * down_1), left_s / (every + b * work_1))
                found = np.fmin(found, (left_s - b * up_0) / (every + b * up_1))
            else:
                found = np.fmin((left_s - down_0) / down_1, left_s / work_1)
                found = np.fmin(found, (left_s - up_0) / up_1)
            if self.most_down_bytes is not None:
                room_bytes = self.most_down_bytes - plane.down_col * widths
                found = np.fmin(found, room_bytes / (plane.down_row + plane.down_area * widths))
            if not self._has_room:
                found = np.minimum(found, self._most_rows(widths))
        np.fmax(found, 0.0, out=found)
        return np.minimum(found, plane.rows, out=found)

    def fits(self, rows: Floats, cols: Floats) -> bool:
        """Whether every device has the memory for its rectangle."""
        return self._has_room or bool((rows <= self._most_rows(cols) * (1 + _rounding)).all())

    def _most_rows(self, widths: Floats | float) -> Floats:
        """What memory leaves: one operand is held whole, of the other one strip for each tile in flight."""
        plane = self.plane
        with np.errstate(divide="ignore"):
            streams_cols = np.minimum(
                self.panel_bytes / plane.held_row, (self.window_bytes - plane.held_col) / plane.held_area
            )
        streams_rows = (plane.held_col * widths <= self.panel_bytes) & (
            plane.held_row + plane.held_area * widths <= self.window_bytes
        )
        match plane.strips:
            case "cols":
                most = streams_cols + 0.0 * widths
            case "rows":
                most = np.where(streams_rows, np.inf, 0.0)
            case "either":
                most = np.where(streams_rows, np.inf, streams_cols)
        if plane.kept_row:
            most = np.minimum(most, self.rates.kept / plane.kept_row)
        if plane.kept_col:
            most = np.where(plane.kept_col * widths <= self.rates.kept, most, 0.0)
        return most
