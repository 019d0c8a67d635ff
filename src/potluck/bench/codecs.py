"""How fast each codec encodes and decodes beside PyTorch's fp32 addition, how small it gets, and what it loses.

Encoding, decode-accumulate and `Tensor.add_` go over the same 100 M values, on the same threads, in turns; a ratio is
the median over the turns of the addition's time by the codec's, so above 1 the codec is faster. Gigabytes are those of
the fp32 values. Sizes are of whole bundle files, headers included, for GPT-2's 124 M parameters.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from potluck.codecs.base import Codec, codec, codec_names
from potluck.codecs.bundle import flat_size, write_flat
from potluck.codecs.elementwise import Shape, Values, as_bytes
from potluck.codecs.policy import CodecPolicy
from potluck.types.params import Layout, type_bytes

random_names = ("bf16(stochastic)", "fp8(stochastic)", "int8(stochastic)", "int4(stochastic)")
other_names = ("topk(1.5625%)+bf16", "topk(1.5625%)+2bit+zstd", "bf16+zstd")


def gpt2_layout(n_layer: int = 12, n_embd: int = 768, vocab_size: int = 50257, n_positions: int = 1024) -> Layout:
    """GPT-2's tensors as `transformers` names them; 148 of them and 124.4 M parameters by default."""
    shapes: list[tuple[str, Sequence[int]]] = [
        ("transformer.wte.weight", (vocab_size, n_embd)),
        ("transformer.wpe.weight", (n_positions, n_embd)),
    ]
    for i in range(n_layer):
        for name, shape in (
            ("ln_1", (n_embd,)), ("attn.c_attn", (n_embd, 3 * n_embd)), ("attn.c_proj", (n_embd, n_embd)),
            ("ln_2", (n_embd,)), ("mlp.c_fc", (n_embd, 4 * n_embd)), ("mlp.c_proj", (4 * n_embd, n_embd)),
        ):  # fmt: skip
            shapes += [(f"transformer.h.{i}.{name}.weight", shape), (f"transformer.h.{i}.{name}.bias", shape[-1:])]
    return Layout.of([*shapes, ("transformer.ln_f.weight", (n_embd,)), ("transformer.ln_f.bias", (n_embd,))])


def bench_codecs(
    *,
    shape: Shape = (9984, 10048),
    num_turns: int = 5,
    num_threads: int = 2,
    names: Sequence[str] | None = None,
    layout: Layout | None = None,
) -> dict[str, float]:
    """Figures of every codec, by its name. About two minutes."""
    torch.set_num_threads(num_threads)
    chosen = names or (*codec_names(), *random_names, *other_names)
    sizes_of = layout or gpt2_layout()
    values = np.random.default_rng(1).standard_normal(shape[0] * shape[1], dtype=np.float32)
    figures: dict[str, float] = {
        "num_threads": num_threads, "num_turns": num_turns, "numel": len(values), "layout_numel": sizes_of.numel,
    }  # fmt: skip
    for name in chosen:
        found = _speed(codec(name), values, shape, num_turns) | _sizes(name, sizes_of)
        figures |= {f"{name} {figure}": value for figure, value in found.items()}
    return figures


def _speed(which: Codec, values: Values, shape: Shape, num_turns: int) -> dict[str, float]:
    out = which.allocate(shape) if which.is_sized else None
    held = [as_bytes(b) for b in which.encode(values, shape)]
    total, summand = torch.zeros(len(values)), torch.from_numpy(values)
    decoded = np.empty(len(values), np.float32)
    which.decode(held, shape, 0, decoded)
    np.subtract(decoded, values, out=decoded)
    error = float(np.linalg.norm(decoded) / np.linalg.norm(values))
    del decoded
    contestants: tuple[Callable[[], object], ...] = (
        lambda: total.add_(summand),
        lambda: which.encode(values, shape, out=out),
        lambda: which.accumulate(held, shape, 0, total.numpy(), 0.5),
        lambda: which.sum_squares(held, shape),
    )
    for run in contestants:  # warm-up: pages and kernels
        run()
    turns = [[_seconds(run) for run in contestants] for _ in range(num_turns)]
    gigabytes = type_bytes * len(values) / 1e9
    figures: dict[str, float] = {}
    for number, what in ((1, "encode"), (2, "accumulate"), (3, "check")):
        figures[f"{what}_gb_per_s"] = round(gigabytes / statistics.median(turn[number] for turn in turns), 2)
        figures[f"{what}_ratio"] = round(statistics.median(turn[0] / turn[number] for turn in turns), 3)
    return figures | {"relative_l2_error": round(error, 5)}


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _sizes(name: str, layout: Layout) -> dict[str, float]:
    def percent(chosen: Codec | CodecPolicy) -> float:
        if codec(name).is_sized:
            return 100 * flat_size("delta", layout, chosen) / (type_bytes * layout.numel)
        vector = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
        with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
            size = write_flat(Path(folder) / "bundle", "delta", vector, layout, chosen)
        return 100 * size / (type_bytes * layout.numel)

    whole = percent(codec(name))
    return {
        "wire_percent": round(whole, 4),
        "fewer_bytes_ratio": round(100 / whole, 2),
        "wire_with_default_policy_percent": round(percent(CodecPolicy(default=name)), 4),
    }
