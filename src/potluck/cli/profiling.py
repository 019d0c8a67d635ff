"""`profile`: measures this machine as a worker does when it joins, and says what came out."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from potluck.cli.units import format_bytes
from potluck.models.device import choose_device, describe
from potluck.types.profile import DeviceProfile
from potluck.worker.measure import measured


def profile_machine(*, device: str, num_threads: int, state_dir: Path, refresh: bool) -> DeviceProfile:
    """What a worker with these options would report. ResourceError if the device is not here. Blocks."""
    described = describe(choose_device(device), num_threads or None)
    console = Console(stderr=True, highlight=False)
    return measured(described, state_dir, now=time.time(), num_threads=num_threads, refresh=refresh, told=console.print)


def profile_text(profile: DeviceProfile, width: int = 100) -> str:
    """A table for people."""
    console = Console(width=width, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(_table(profile))
    return capture.get()


def _table(profile: DeviceProfile) -> Table:
    speeds = profile.speeds
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("what")
    table.add_column(f"{profile.device}: {profile.device_name}")
    memory = f"{format_bytes(profile.free_memory_bytes)} of {format_bytes(profile.total_memory_bytes)} free"
    table.add_row("memory", f"{memory}, {format_bytes(profile.usable_memory_bytes)} to plan with")
    table.add_row("threads", str(profile.num_threads))
    for gemm in speeds.gemm:
        table.add_row(f"matrix product, {gemm.dtype}, {gemm.dim}", _flops(gemm.s_per_flop))
    table.add_row("attention, fp32", _flops(speeds.attention_s_per_flop))
    table.add_row("element-wise", _rate(speeds.elementwise_bytes_per_s))
    table.add_row("optimizer step", _rate(speeds.optimizer_bytes_per_s))
    for codec in speeds.codecs:
        encode, decode = _rate(codec.encode_bytes_per_s), _rate(codec.decode_bytes_per_s)
        table.add_row(f"codec {codec.name}", f"{encode} encoding, {decode} decoding")
    table.add_row("disk, writing", _rate(speeds.disk_write_bytes_per_s))
    power = f"{speeds.idle_w:.1f} W idle, {speeds.load_w:.1f} W under load" if speeds.load_w else "not known"
    table.add_row("power", power)
    table.add_row("measured", time.strftime("%Y-%m-%d %H:%M", time.localtime(speeds.measured_at)))
    return table


def _flops(s_per_flop: float) -> str:
    return f"{1e-9 / s_per_flop:.3g} GFLOP/s" if s_per_flop else "not known"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s" if bytes_per_s else "not known"
