"""What a device is and can do, as it reports it at join and when something of it changes.

`DeviceProfile` says what the device is, `Speeds` what was measured on it, `LinkRates` what its transfers showed. All
are read from the network with distrust: unknown keys are dropped, and a number that is out of bounds, not finite or
not a number counts as not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from potluck.types.untrusted import printable

MAX_PROFILE_BYTES = 65536
memory_share = 0.85
"""Of the memory that is free now, what may be planned with; the rest is for whoever else uses the machine."""
MAX_MEASURED = 64
"""Entries of one list of measured figures."""
_largest_number = 1e18
_smallest_number = 1e-18


@dataclass(frozen=True, kw_only=True)
class GemmSpeed:
    """Products of two square matrices of `dim` rows in one type."""

    dtype: str  # "fp32", "bf16"
    dim: int
    s_per_flop: float


@dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Bytes of fp32 values that a codec takes in or gives back in a second."""

    name: str
    encode_bytes_per_s: float
    decode_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Measured figures of one device; 0 means *not known*."""

    measured_at: float = 0.0  # seconds since 1970
    gemm: tuple[GemmSpeed, ...] = ()
    attention_s_per_flop: float = 0.0  # causal, fp32, forward
    elementwise_bytes_per_s: float = 0.0  # read and written
    optimizer_bytes_per_s: float = 0.0  # AdamW in fp32: parameters, gradients and moments, read and written
    codecs: tuple[CodecSpeed, ...] = ()
    disk_write_bytes_per_s: float = 0.0  # of the state folder, safe on the disk
    idle_w: float = 0.0
    load_w: float = 0.0

    def codec(self, name: str) -> CodecSpeed | None:
        return next((each for each in self.codecs if each.name == name), None)

    @staticmethod
    def from_json(value: object) -> Speeds:
        """From the network or a file."""
        given = _mapping(value)
        numbers = {f.name: _number(given.get(f.name)) for f in fields(Speeds) if f.name not in ("gemm", "codecs")}
        gemm = (
            GemmSpeed(
                dtype=_text(each.get("dtype"), 32),
                dim=int(min(_number(each.get("dim")), 1 << 20)),
                s_per_flop=_number(each.get("s_per_flop")),
            )
            for each in _mappings(given.get("gemm"))
        )
        codecs = (
            CodecSpeed(
                name=_text(each.get("name"), 64),
                encode_bytes_per_s=_number(each.get("encode_bytes_per_s")),
                decode_bytes_per_s=_number(each.get("decode_bytes_per_s")),
            )
            for each in _mappings(given.get("codecs"))
        )
        return Speeds(gemm=tuple(g for g in gemm if g.dim and g.s_per_flop), codecs=tuple(codecs), **numbers)


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """The device's link to its coordinator, each direction by itself; 0 means *not known*."""

    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    rtt_s: float = 0.0

    @staticmethod
    def from_json(value: object) -> LinkRates:
        given = _mapping(value)
        return LinkRates(**{f.name: _number(given.get(f.name)) for f in fields(LinkRates)})


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device of one machine. Memory in bytes; empty strings and zeros mean *not known*."""

    device: str  # "cpu", "cuda:0", "mps"
    device_name: str = ""
    platform: str = ""  # "linux", "darwin", "win32"
    num_threads: int = 1
    total_memory_bytes: int = 0
    free_memory_bytes: int = 0  # now, and no more than the owner gives
    precisions: tuple[str, ...] = ("fp32",)
    host_name: str = ""
    torch_version: str = ""
    adapter_rank: int = 0  # that it has the memory to train in the run that it is in
    duty: float = 1.0  # share of the day in which the owner lets it work
    speeds: Speeds = field(default_factory=Speeds)
    link: LinkRates = field(default_factory=LinkRates)

    @property
    def usable_memory_bytes(self) -> int:
        """What a plan may count on."""
        return int(memory_share * self.free_memory_bytes)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return value

    @staticmethod
    def from_json(value: object) -> DeviceProfile:
        """Read a profile from the network. ValueError, TypeError or OverflowError where it is none."""
        given = _mapping(value)
        known = DeviceProfile(device="cpu")
        found: dict[str, Any] = {}
        for each in fields(DeviceProfile):
            name, default = each.name, getattr(known, each.name)
            if name not in given:
                continue
            match name:
                case "precisions":
                    found[name] = tuple(printable(str(p), 32) for p in list(given[name])[:16])
                case "speeds":
                    found[name] = Speeds.from_json(given[name])
                case "link":
                    found[name] = LinkRates.from_json(given[name])
                case "duty":
                    found[name] = min(_number(given[name]), 1.0) or 1.0
                case _ if isinstance(default, int):
                    found[name] = max(0, min(int(given[name]), 1 << 60))
                case _:
                    found[name] = printable(str(given[name]), 200)
        return DeviceProfile(device=found.pop("device", "cpu"), **found)

    @staticmethod
    def parse(text: str) -> DeviceProfile:
        """From the JSON of a message. ValueError if it is not a profile or takes more than MAX_PROFILE_BYTES."""
        if len(text) > MAX_PROFILE_BYTES:
            raise ValueError(f"it takes {len(text)} bytes and {MAX_PROFILE_BYTES} are allowed")
        try:
            return DeviceProfile.from_json(json.loads(text or "{}"))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError("it cannot be read") from error


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    """The objects in what should be a list of them."""
    for each in value[:MAX_MEASURED] if isinstance(value, list) else []:
        if isinstance(each, dict):
            yield each


def _number(value: object) -> float:
    """A positive number within bounds, else 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if _smallest_number <= value <= _largest_number else 0.0


def _text(value: object, limit: int) -> str:
    return printable(value, limit) if isinstance(value, str) else ""
