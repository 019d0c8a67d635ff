"""Measures the device that a worker computes on: seconds per FLOP, bytes per second, watts. About two seconds.

What was measured is kept in the state folder (speeds.json) for one device, host, version of torch and number of
threads, and measured again after 30 days. Every figure is of the fastest repetition that fits into a tenth of a
second: what the machine can do. What else runs on it shows in how tasks go (planner/cost.py, `Calibration`). A figure
that cannot be had (no memory, no kernel, no room on the disk) is 0, *not known*, and costs nobody the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from potluck.codecs.base import codec
from potluck.codecs.elementwise import as_bytes
from potluck.planner.flops import adamw_passes
from potluck.storage.files import unfinished_name, write_atomic
from potluck.types.errors import PotluckError
from potluck.types.params import type_bytes
from potluck.types.profile import CodecSpeed, DeviceProfile, GemmSpeed, Speeds
from potluck.worker.power import PowerMeter

usual_codecs = ("fp32", "bf16", "int8")
max_age_s = 30 * 86400.0
piece_s = 0.1
"""Seconds for one figure, as long as one repetition does not take longer."""
max_repetitions = 100
idle_s = 0.2

_gemm_dims = {"cpu": (256, (1024, 768, 512))}
_gemm_dims_gpu = (1024, (8192, 4096, 2048))
_elementwise_numel = {"cpu": 1 << 19}
_elementwise_numel_gpu = 1 << 26
_attention_heads, _attention_len, _attention_dim = 8, 512, 64
_optimizer_tensors, _optimizer_numel = 16, 1 << 18
_codec_shape = (512, 1024)
_disk_part_bytes, _disk_parts = 4 << 20, 8


def measured(
    profile: DeviceProfile,
    folder: Path,
    *,
    now: float,
    num_threads: int = 0,
    codecs: Sequence[str] = usual_codecs,
    refresh: bool = False,
    told: Callable[[str], None] = lambda _: None,
) -> DeviceProfile:
    """The profile with its speeds: those kept in `folder`, measured now where they are missing, old or unwanted.

    `num_threads` as a replica has it: 0 for what torch takes by itself. Blocks. Run it in the thread that will
    compute: torch sets them for the calling one.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    profile = replace(profile, num_threads=torch.get_num_threads())
    path = folder / "speeds.json"
    kept = None if refresh else _kept(path, profile, now)
    if kept is None:
        told(f"measuring {profile.device_name or profile.device}; it takes a few seconds, once")
    missing = [name for name in codecs if kept is None or kept.codec(name) is None]
    if kept is not None and not missing:
        return replace(profile, speeds=kept)
    speeds = measure(profile, folder, now=now) if kept is None else kept
    speeds = replace(speeds, codecs=(*speeds.codecs, *map(_codec_speed, missing)))
    measured_profile = replace(profile, speeds=speeds)
    try:
        write_atomic(path, json.dumps({"key": _key(profile), "speeds": measured_profile.to_json()["speeds"]}).encode())
    except (PotluckError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        told(f"{path} cannot be written ({why}), so all is measured again next time; choose another folder")
    return measured_profile


def measure(profile: DeviceProfile, folder: Path, *, now: float, power: PowerMeter | None = None) -> Speeds:
    """Everything but the codecs."""
    power = power or PowerMeter()
    device = torch.device(profile.device)
    idle_w = power.watts_over(lambda: time.sleep(idle_s))
    dtypes = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if "bf16-mixed" in profile.precisions else {})
    gemm: list[GemmSpeed] = []

    def products() -> None:
        for name, dtype in dtypes.items():
            gemm.extend(_gemm(device, name, dtype))

    load_w = power.watts_over(products)
    return Speeds(
        measured_at=now,
        gemm=tuple(gemm),
        attention_s_per_flop=_known(lambda: _attention(device)),
        elementwise_bytes_per_s=_known(lambda: _elementwise(device)),
        optimizer_bytes_per_s=_known(lambda: _optimizer(device)),
        disk_write_bytes_per_s=_known(lambda: _disk(folder)),
        idle_w=idle_w,
        load_w=load_w,
    )


def _key(profile: DeviceProfile) -> list[str]:
    """What the figures depend on."""
    return [
        profile.device, profile.device_name, profile.host_name, profile.torch_version, str(profile.num_threads),
        ",".join(profile.precisions),
    ]  # fmt: skip


def _kept(path: Path, profile: DeviceProfile, now: float) -> Speeds | None:
    try:
        value = json.loads(path.read_bytes())
        if value["key"] != _key(profile):
            return None
        speeds = Speeds.from_json(value["speeds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # not there, or broken: measured again
    return speeds if speeds.gemm and 0 <= now - speeds.measured_at <= max_age_s else None


def _known(figure: Callable[[], float]) -> float:
    """The figure, 0 where this device cannot give it."""
    try:
        return figure()
    except (RuntimeError, MemoryError, OSError):  # torch raises RuntimeError for no memory and for no kernel
        return 0.0


def _fastest_s(work: Callable[[], object], device: torch.device, budget_s: float = piece_s) -> float:
    """Seconds of the fastest repetition, the device's queue included; the first one is not counted."""
    times: list[float] = []
    work()
    _finish(device)
    ends = time.perf_counter() + budget_s
    while not times or (time.perf_counter() < ends and len(times) < max_repetitions):
        begun = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _gemm(device: torch.device, name: str, dtype: torch.dtype) -> list[GemmSpeed]:
    """At a small size, and at the largest one that takes no longer than a piece."""
    small, large = _gemm_dims.get(device.type, _gemm_dims_gpu)
    found: list[GemmSpeed] = []
    with contextlib.suppress(RuntimeError, MemoryError):
        found.append(_gemm_at(device, name, dtype, small))
        fitting = (dim for dim in large if 2 * dim**3 * found[0].s_per_flop <= piece_s)
        found.append(_gemm_at(device, name, dtype, next(fitting, large[-1])))
    return found


def _gemm_at(device: torch.device, name: str, dtype: torch.dtype, dim: int) -> GemmSpeed:
    a, b = (torch.randn(dim, dim, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    seconds = _fastest_s(lambda: torch.mm(a, b, out=product), device)
    return GemmSpeed(dtype=name, dim=dim, s_per_flop=seconds / (2 * dim**3))


def _attention(device: torch.device) -> float:
    """Seconds per FLOP of a causal forward pass, of which half the products are counted (planner/flops.py)."""
    shape = (1, _attention_heads, _attention_len, _attention_dim)
    query, key, value = (torch.randn(shape, device=device) for _ in range(3))
    with torch.no_grad():
        seconds = _fastest_s(lambda: scaled_dot_product_attention(query, key, value, is_causal=True), device)
    return seconds / (2 * _attention_len**2 * _attention_heads * _attention_dim)


def _elementwise(device: torch.device) -> float:
    """Bytes per second of a product and a tanh, too large for the caches, into new memory: as activations are made.

    A plain sum into memory that is there is several times faster and promises what no training step keeps.
    """
    numel = _elementwise_numel.get(device.type, _elementwise_numel_gpu)
    a, b = torch.ones(numel, device=device), torch.ones(numel, device=device)
    return 5 * type_bytes * numel / _fastest_s(lambda: torch.tanh(a * b), device)


def _optimizer(device: torch.device) -> float:
    """Bytes per second of AdamW as a replica runs it."""
    parameters = [torch.zeros(_optimizer_numel, device=device, requires_grad=True) for _ in range(_optimizer_tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    fused = True if device.type == "cuda" else None
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=fused)
    num_bytes = adamw_passes * type_bytes * _optimizer_tensors * _optimizer_numel
    return num_bytes / _fastest_s(optimizer.step, device)


def _codec_speed(name: str) -> CodecSpeed:
    """On the CPU, where codecs run, with values as an update has them: normal and small."""
    cpu = torch.device("cpu")
    chosen = codec(name)
    shape = _codec_shape
    values = np.random.default_rng(0).standard_normal(shape[0] * shape[1], dtype=np.float32) * np.float32(1e-3)
    encode_s = _fastest_s(lambda: chosen.encode(values, shape), cpu, piece_s / 2)
    buffers = [as_bytes(buffer) for buffer in chosen.encode(values, shape)]
    out = np.empty_like(values)
    decode_s = _fastest_s(lambda: chosen.decode(buffers, shape, 0, out), cpu, piece_s / 2)
    return CodecSpeed(
        name=name, encode_bytes_per_s=values.nbytes / encode_s, decode_bytes_per_s=values.nbytes / decode_s
    )


def _disk(folder: Path) -> float:
    """Bytes per second that are safe on the disk of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = unfinished_name(folder / "speed")
    part = os.urandom(_disk_part_bytes)  # a disk that compresses gets nothing for free
    times: list[float] = []
    try:
        with path.open("wb", buffering=0) as file:
            while not times or (len(times) < _disk_parts and sum(times) < 2 * piece_s):
                begun = time.perf_counter()
                file.write(part)
                os.fsync(file.fileno())
                times.append(time.perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)
    return _disk_part_bytes / max(statistics.median(times), 1e-9)
