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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from potluck.simulator.fleets import Device, Range
from potluck.types.errors import RecipeError
from potluck.types.mistakes import nearest, sentence

folder = Path(__file__).resolve().parent.parent / "fleets"
MAX_DEVICES = 100_000


def _number(value: object) -> object:
    """TOML's true and false are no numbers."""
    ends: tuple[object, ...] = (value,)
    if isinstance(value, list):
        ends = tuple(cast(list[object], value))
    if any(isinstance(end, bool) for end in ends):
        raise ValueError("true and false are no quantities; write a number")
    return value


def _within(least: float, most: float) -> Callable[[float | tuple[float, float]], float | tuple[float, float]]:
    """Between what such a machine can be: a play of anything else would have no end or no meaning."""

    def check(value: float | tuple[float, float]) -> float | tuple[float, float]:
        low, high = value if isinstance(value, tuple) else (value, value)
        if not low <= high:
            raise ValueError(f"{low:g} to {high:g} is no range; write the smaller number first")
        if not least <= low <= high <= most:
            raise ValueError(f"{low if low < least else high:g} is not in {least:g} to {most:g}")
        return value

    return check


Quantity = float | tuple[float, float]
Flops = Annotated[Quantity, AfterValidator(_within(0.01, 1e8)), BeforeValidator(_number)]
Memory = Annotated[Quantity, AfterValidator(_within(0.001, 1e6)), BeforeValidator(_number)]
Rate = Annotated[Quantity, AfterValidator(_within(0.01, 1e7)), BeforeValidator(_number)]
RoundTrip = Annotated[Quantity, AfterValidator(_within(0.0, 10_000.0)), BeforeValidator(_number)]
Share = Annotated[Quantity, AfterValidator(_within(0.01, 1.0)), BeforeValidator(_number)]
Power = Annotated[Quantity, AfterValidator(_within(0.0, 1e6)), BeforeValidator(_number)]
FaultRate = Annotated[float, Field(ge=0.0, le=60.0), BeforeValidator(_number)]
LinkRate = Annotated[float, Field(ge=0.01, le=1e7), BeforeValidator(_number)]


class DeviceClass(BaseModel):
    """One `[[devices]]` table. Each quantity is a number, or the two ends of a range."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,40}$", description="of the class; its machines are NAME-1, NAME-2, …")
    count: Annotated[int, BeforeValidator(_number)] = Field(
        default=1, ge=1, le=MAX_DEVICES, description="machines of this class"
    )
    gflops: Flops = Field(description="10^9 floating-point operations a second that training reaches")
    memory_gb: Memory = Field(default=8.0, description="free memory")
    up_mbit_s: Rate | None = Field(default=None, description="to the coordinator; left out, no limit")
    down_mbit_s: Rate | None = Field(default=None, description="from the coordinator; left out, no limit")
    rtt_ms: RoundTrip = Field(default=0.0, description="round-trip time")
    duty: Share = Field(default=1.0, description="share of its time in which its owner lets it work")
    idle_w: Power = Field(default=0.0, description="watts while it waits")
    busy_w: Power = Field(default=0.0, description="watts while it computes")
    faults_per_hour: FaultRate = Field(default=0.0, description="of each machine, besides those of --faults")

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
            faults_per_hour=self.faults_per_hour,
        )


class CoordinatorLink(BaseModel):
    """The `[coordinator]` table: its own link, which all workers share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    up_mbit_s: LinkRate | None = Field(default=None, description="to the workers, together; left out, no limit")
    down_mbit_s: LinkRate | None = Field(default=None, description="from the workers, together; left out, no limit")
    compare_mbit_s: tuple[LinkRate, ...] = Field(
        default=(), max_length=8, description="other rates of it, both ways, that a simulation of sub_gemm sets beside"
    )


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
    compared_bytes_per_s: tuple[float, ...] = ()  # other rates of the coordinator's link, both ways

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
        if path.is_dir():
            raise RecipeError(f"{name} is a folder, not a fleet file; give a .toml file, or {', '.join(known)}")
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
        compared_bytes_per_s=tuple(map(_rate, read.coordinator.compare_mbit_s)),
    )


def _range(value: float | tuple[float, float] | None, unit: float) -> Range:
    if value is None:
        return (math.inf, math.inf)
    low, high = value if isinstance(value, tuple) else (value, value)
    return (low * unit, high * unit)


def _rate(mbit_s: float | None) -> float:
    return math.inf if mbit_s is None else mbit_s * 1e6 / 8
