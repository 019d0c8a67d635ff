"""Which device a worker computes on, and in which precision; with the reason, so that the live view can show it.

What the machine can do is asked through a `Hardware` value, so that the choice itself is tested on any machine.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from potluck.types.errors import ResourceError
from potluck.types.profile import DeviceProfile


class Hardware:
    """What this machine has, as torch and the system report it. Tests give another one."""

    def num_cuda(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def has_mps(self) -> bool:
        return torch.backends.mps.is_available()

    def cuda_name(self, index: int) -> str:
        return torch.cuda.get_device_name(index)

    def cuda_memory(self, index: int) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = torch.cuda.mem_get_info(index)
        return int(free), int(total)

    def cuda_has_bf16(self, index: int) -> bool:
        """In hardware: compute capability 8.0 and later, and AMD's that report it."""
        if torch.version.hip is not None:
            return torch.cuda.is_bf16_supported()
        return torch.cuda.get_device_capability(index) >= (8, 0)

    def cpu_has_bf16(self) -> bool:
        """Whether the processor multiplies bfloat16 in hardware; emulated, it is slower than fp32."""
        probes = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
        if any(probe is not None and probe() for probe in probes):
            return True
        return platform.machine().lower() in ("aarch64", "arm64") and _cpu_flags() >= {"bf16"}

    def mps_has_bf16(self) -> bool:
        """From macOS 14 on."""
        release = platform.mac_ver()[0].partition(".")[0]
        return release.isdigit() and int(release) >= 14

    def mps_memory(self) -> tuple[int, int]:
        """Free and total bytes of the memory that a Mac's GPU shares with its CPU."""
        total = int(torch.mps.recommended_max_memory())
        return max(0, min(total - int(torch.mps.driver_allocated_memory()), self.memory()[0])), total

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of main memory, within a container's limit where there is one."""
        state = psutil.virtual_memory()
        free, total = int(state.available), int(state.total)
        limit, used = _cgroup_memory()
        if 0 < limit < total:
            return max(0, min(free, limit - used)), limit
        return free, total

    def num_cores(self) -> int:
        """Cores that this process may use."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def cpu_name(self) -> str:
        info = Path("/proc/cpuinfo")
        if info.exists():
            for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()


this_machine = Hardware()


@dataclass(frozen=True)
class Precision:
    """What a worker computes in: plain fp32, or autocast to `autocast`; `reason` says why."""

    name: str
    autocast: torch.dtype | None
    reason: str


def choose_device(asked: str, *, hardware: Hardware = this_machine) -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:N` or `mps`. ResourceError if this machine does not have it."""
    num_cuda = hardware.num_cuda()
    kind, colon, number = asked.strip().lower().partition(":")
    if kind == "auto" and not colon:
        if num_cuda:  # the one with most free memory, so that several workers spread by themselves
            return torch.device("cuda", max(range(num_cuda), key=lambda i: (hardware.cuda_memory(i)[0], -i)))
        return torch.device("mps" if hardware.has_mps() else "cpu")
    if kind == "cpu" and not colon:
        return torch.device("cpu")
    if kind == "mps" and not colon:
        if not hardware.has_mps():
            raise ResourceError(
                "--device mps was asked for and this machine has no Apple GPU; use --device auto or cpu"
            )
        return torch.device("mps")
    if kind == "cuda" and (number.isdecimal() if colon else True):
        index = int(number or 0)
        if index >= num_cuda:
            has = f"has {num_cuda} CUDA device{'s' if num_cuda > 1 else ''}" if num_cuda else "has no CUDA device"
            why = (
                "" if num_cuda or torch.version.cuda or torch.version.hip else " that this CPU build of torch could use"
            )
            remedy = f"use cuda:0 to cuda:{num_cuda - 1}" if num_cuda else "use --device auto or cpu"
            raise ResourceError(f"--device {asked} was asked for and this machine {has}{why}; {remedy}")
        return torch.device("cuda", index)
    raise ResourceError(f"--device {asked[:50]!r} is not a device; use auto, cpu, cuda:N or mps")


def precisions(device: torch.device | str, *, hardware: Hardware = this_machine) -> tuple[str, ...]:
    """The precisions a device does well."""
    return ("fp32", "bf16-mixed") if _has_bf16(torch.device(device), hardware) else ("fp32",)


def choose_precision(asked: str, device: torch.device | str, *, hardware: Hardware = this_machine) -> Precision:
    """What a recipe's precision means on a device. Parameters and optimizer stay fp32 in either."""
    device = torch.device(device)
    if asked != "bf16-mixed":
        return Precision("fp32", None, "the recipe asks for fp32")
    if _has_bf16(device, hardware):
        return Precision("bf16-mixed", torch.bfloat16, f"{device} multiplies bfloat16 in hardware")
    return Precision("fp32", None, f"{device} has no bfloat16 in hardware, so fp32 is faster and at least as exact")


def describe(
    device: torch.device | str, num_threads: int | None = None, *, hardware: Hardware = this_machine
) -> DeviceProfile:
    """The profile that a worker reports at join."""
    device = torch.device(device)
    free, total = free_and_total_memory(device, hardware=hardware)
    if device.type == "cuda":
        name = hardware.cuda_name(device.index or 0)
    elif device.type == "mps":
        name = f"Apple GPU ({hardware.cpu_name()})"
    else:
        name = hardware.cpu_name()
    return DeviceProfile(
        device=str(device),
        device_name=name[:200],
        platform=sys.platform,
        num_threads=num_threads or hardware.num_cores(),
        total_memory_bytes=total,
        free_memory_bytes=free,
        precisions=precisions(device, hardware=hardware),
        host_name=socket.gethostname()[:200],
        torch_version=torch.__version__,
    )


def free_and_total_memory(device: torch.device | str, *, hardware: Hardware = this_machine) -> tuple[int, int]:
    """Bytes of the memory that the device computes in."""
    device = torch.device(device)
    if device.type == "cuda":
        return hardware.cuda_memory(device.index or 0)
    if device.type == "mps":
        return hardware.mps_memory()
    return hardware.memory()


def require_memory(num_params: int, *, copies: int = 2, hardware: Hardware = this_machine) -> None:
    """ResourceError if the first parameters of a model cannot be made here: the model and its flat vector, in fp32."""
    need_bytes, (free_bytes, _) = copies * 4 * num_params, hardware.memory()
    if need_bytes > free_bytes:
        raise ResourceError(
            f"the model has {num_params:,} parameters, so making it needs {need_bytes / 2**30:,.1f} GiB of memory and "
            f"{free_bytes / 2**30:,.1f} GiB are free; make the model smaller or use a bigger machine"
        )


def _has_bf16(device: torch.device, hardware: Hardware) -> bool:
    if device.type == "cuda":
        return hardware.cuda_has_bf16(device.index or 0)
    if device.type == "mps":
        return hardware.mps_has_bf16()
    return hardware.cpu_has_bf16()


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return set()
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def _cgroup_memory() -> tuple[int, int]:
    """A container's limit and what it uses of it, in bytes; zeros where there is none."""
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used, stat = ((Path(folder) / name).read_text() for name in (limit_name, used_name, "memory.stat"))
        except OSError:
            continue
        if limit.strip().isdecimal() and used.strip().isdecimal():
            cached = [int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")]
            return int(limit), int(used) - sum(cached)  # a page cache is given back when memory is asked for
    return 0, 0
