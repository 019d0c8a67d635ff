"""What compressing updates costs in quality: DiLoCo from one start, with each codec, at equal tokens.

    relative progress = (L0 - L_codec) / (L0 - L_fp32)         L0: the common start's validation loss

Seeds are paired: with one seed every codec has the same start, data and rates. Otherwise as `bench convergence`, but
for sparse codecs: they take the outer step of SparseLoCo (arXiv:2508.15706), rate 1 and no momentum, whose part error
feedback plays, and synchronise five times as often, since a round sends one value of 64.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from potluck.bench.convergence import Lab, Setting, diloco, num_workers
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig

sparse = {"num_inner_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
compared = ("int8+ef", "int4+ef", "topk(1.5625%)+2bit+ef")


def bench_quality(
    *, seeds: int = 3, first_seed: int = 1, codecs: Sequence[str] = compared, lr: float = 4e-3,
    setting: Setting | None = None, told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Relative progress as a mean and as the lowest over seeds, and bytes of updates per worker."""
    torch.set_num_threads(1)
    setting = setting or Setting()
    figures: dict[str, Any] = {"seeds": seeds, "lr": lr, "tokens": 0}
    found: dict[str, list[float]] = {name: [] for name in codecs}
    for seed in range(first_seed, first_seed + seeds):
        with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name:
            lab = Lab(setting, Path(name), seed)
            start = lab.train(
                SyncSGD(SyncSGDConfig()), lab.start(), workers=num_workers, num_steps=setting.num_warm_steps,
                lr=setting.warm_lr, data_seed=seed * 10 + 1,
            )  # fmt: skip
            whole_gain = 0.0
            for codec in ("fp32", *codecs):
                own = replace(setting, **sparse) if codec.startswith("topk") else setting
                done = lab.train(
                    diloco(own), start.params, workers=num_workers, num_steps=setting.num_steps, lr=lr,
                    data_seed=seed * 10 + 2, codecs=(codec, "fp32"),
                )  # fmt: skip
                gain = done.first_loss - done.loss
                told(f"seed {seed}: {codec}: {done.first_loss:.4f} -> {done.loss:.4f}")
                figures[f"{_key(codec)}_up_bytes_per_worker"] = round(done.bytes_up_per_worker)
                figures["tokens"] = done.tokens
                if codec == "fp32":
                    whole_gain = gain
                else:
                    found[codec].append(gain / whole_gain)
    for codec, ratios in found.items():
        figures[f"{_key(codec)}_relative_progress_ratio"] = round(sum(ratios) / len(ratios), 4)
        figures[f"{_key(codec)}_lowest_relative_progress_ratio"] = round(min(ratios), 4)
    return figures


def _key(codec: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", codec.lower()).strip("_")
