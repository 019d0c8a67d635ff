"""What a device is and can do, as it reports it at join."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from potluck.types.untrusted import printable


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device of one machine. Memory in bytes; empty strings and zeros mean *not known*."""

    device: str  # "cpu", "cuda:0", "mps"
    device_name: str = ""
    platform: str = ""  # "linux", "darwin", "win32"
    num_threads: int = 1
    total_memory_bytes: int = 0
    free_memory_bytes: int = 0
    precisions: tuple[str, ...] = ("fp32",)
    host_name: str = ""
    torch_version: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "precisions": list(self.precisions)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> DeviceProfile:
        """Read a profile from the network: unknown keys are dropped, known ones checked."""
        known = DeviceProfile(device="cpu")
        fields: dict[str, Any] = {}
        for name, default in asdict(known).items():
            if name not in value:
                continue
            given = value[name]
            if name == "precisions":
                fields[name] = tuple(printable(str(p), 32) for p in list(given)[:16])
            elif isinstance(default, int):
                fields[name] = max(0, min(int(given), 1 << 60))
            else:
                fields[name] = printable(str(given), 200)
        return DeviceProfile(device=fields.pop("device", "cpu"), **fields)
