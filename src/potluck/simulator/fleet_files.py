"""Fleet files: the machines of a simulated fleet as TOML, in classes with ranges: 4,000 laptops are three lines.

[coordinator]
up_mbit_s = 1000            # to the workers, all together
down_mbit_s = 1000

[[devices]]
name = "laptop"
count = 4000
gflops = [100, 1000]        # what training reaches; a pair is a range, from which each machine draws
up_mbit_s = [5, 50]
down_mbit_s = [20, 250]
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from potluck.coordinator.mistakes import nearest, sentence
from potluck.simulator.fleets import Device, Range
from potluck.types.errors import RecipeError

folder = Path(__file__).resolve().parent.parent / "fleets"
MAX_DEVICES = 100_000


def _ordered(value: float | tuple[float, float]) -> float | tuple[float, float]:
    low, high = value if isinstance(value, tuple) else (value, value)
    if not 0 <= low <= high < math.inf:
        raise ValueError(f"{low:g} to {high:g} is no range; write the smaller number first, neither below 0")
    return value


Quantity = Annotated[float | tuple[float, float], AfterValidator(_ordered)]


class DeviceClass(BaseModel):
    """One `[[devices]]` table. Each quantity is a number, or the two ends of a range."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,40}$", description="of the class; its machines are NAME-1, NAME-2, …")
    count: int = Field(default=1, ge=1, le=MAX_DEVICES, description="machines of this class")
    gflops: Quantity = Field(description="10^9 floating-point operations a second that training reaches")
    memory_gb: Quantity = Field(default=8.0, description="free memory")
    up_mbit_s: Quantity | None = Field(default=None, description="to the coordinator; left out, no limit")
    down_mbit_s: Quantity | None = Field(default=None, description="from the coordinator; left out, no limit")
    rtt_ms: Quantity = Field(default=0.0, description="round-trip time")
    duty: Quantity = Field(default=1.0, description="share of its time in which its owner lets it work")
    idle_w: Quantity = Field(default=0.0, description="watts while it waits")
    busy_w: Quantity = Field(default=0.0, description="watts while it computes")

    def device(self) -> Device:
        return Device(
            name=self.name,
            count=self.count,
            flops=_range(self.gflops, 1e9),
            memory_bytes=_range(self.memory_gb, 1e9),
            up_bytes_per_s=_range(self.up_mbit_s, 1e6 / 8),
            down_bytes_per_s=_range(self.down_mbit_s, 1e6 / 8),
            rtt_s=_range(self.rtt_ms, 1e-3),
            duty=_range(self.duty, 1.0),
            idle_w=_range(self.idle_w, 1.0),
            busy_w=_range(self.busy_w, 1.0),
        )


class CoordinatorLink(BaseModel):
    """The `[coordinator]` table: its own link, which all workers share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    up_mbit_s: float | None = Field(default=None, gt=0, description="to the workers, together; left out, no limit")
    down_mbit_s: float | None = Field(default=None, gt=0, description="from the workers, together; left out, no limit")


class _FleetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    coordinator: CoordinatorLink = CoordinatorLink()
    devices: tuple[DeviceClass, ...] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class FleetFile:
    """A fleet as its file says. Rates in bytes per second."""

    name: str
    devices: tuple[Device, ...]
    coordinator_up_bytes_per_s: float
    coordinator_down_bytes_per_s: float

    @property
    def num_devices(self) -> int:
        return sum(device.count for device in self.devices)


def shipped_fleets() -> dict[str, Path]:
    """Every shipped fleet's file by its name."""
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_fleet(name: str) -> FleetFile:
    """A fleet file, or a shipped fleet by its name. RecipeError with what is wrong with it."""
    known = shipped_fleets()
    path = Path(name)
    if name in known:
        path = known[name]
    elif not path.is_file():
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"shipped are {', '.join(known)}"
        raise RecipeError(f"there is no fleet file {name}; {hint}")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        read = _FleetFile.model_validate(raw)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        keys = [*DeviceClass.model_fields, *CoordinatorLink.model_fields]
        raise RecipeError(f"{path}: {sentence(error, '', keys)}") from error
    names = [device.name for device in read.devices]
    if twice := [n for n in names if names.count(n) > 1]:
        raise RecipeError(f"{path}: two classes are named {twice[0]}; give each a name of its own")
    if (total := sum(device.count for device in read.devices)) > MAX_DEVICES:
        raise RecipeError(f"{path} has {total} machines and {MAX_DEVICES} are the most that are simulated")
    return FleetFile(
        name=path.stem,
        devices=tuple(device.device() for device in read.devices),
        coordinator_up_bytes_per_s=_rate(read.coordinator.up_mbit_s),
        coordinator_down_bytes_per_s=_rate(read.coordinator.down_mbit_s),
    )


def _range(value: float | tuple[float, float] | None, unit: float) -> Range:
    if value is None:
        return (math.inf, math.inf)
    low, high = value if isinstance(value, tuple) else (value, value)
    return (low * unit, high * unit)


def _rate(mbit_s: float | None) -> float:
    return math.inf if mbit_s is None else mbit_s * 1e6 / 8
