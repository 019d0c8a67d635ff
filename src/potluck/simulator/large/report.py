"""What a simulated run of a large fleet came to."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.planner.cost import Phases
from potluck.simulator.large.network import Phase
from potluck.types.ids import WorkerId


@dataclass(frozen=True)
class PhaseSpan:
    """One phase of one device, in seconds of the run."""

    device: int  # its place among the report's devices
    phase: Phase
    start_s: float
    stop_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    id: WorkerId
    device: str  # its class
    phases: Phases
    up_bytes: float  # of objects
    down_bytes: float
    num_rounds: int  # in which its work counted
    num_tokens: int
    energy_j: float | None  # None where its power is not known
    seconds: float  # of the run: what it sends and receives while it computes is in two phases at once

    @property
    def utilisation(self) -> float:
        """Share of the run in which it computed."""
        return self.phases.compute_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    """How a simulated run went. Seconds are the run's."""

    seconds: float
    num_rounds: int
    num_tokens: int
    stopped: str  # why it ended before its budget; "" if it did not
    round_s: tuple[float, ...]
    devices: tuple[DeviceReport, ...]
    unfit: tuple[WorkerId, ...]  # whose memory cannot hold the training
    num_lost: int  # pieces of work that were given up
    coordinator_compute_s: float
    coordinator_energy_j: float | None
    timeline: tuple[PhaseSpan, ...]

    @property
    def up_bytes(self) -> float:
        return sum(d.up_bytes for d in self.devices)

    @property
    def down_bytes(self) -> float:
        return sum(d.down_bytes for d in self.devices)

    @property
    def energy_j(self) -> float | None:
        """Of all machines; None where the power of one is not known."""
        parts = [*(d.energy_j for d in self.devices), self.coordinator_energy_j]
        known = [p for p in parts if p is not None]
        return sum(known) if len(known) == len(parts) else None
