"""How good plans of tiles are: time against its lower bound, tile sides, processor seconds to plan and re-plan.

Plain plans, without inner split and kept weights, under full overlap, for forward, input and weight gradients of layers
of a 13B-class and a 124M-class model, 2 bytes an element. Two kinds of fleet: drawn from the published ranges, and
far more unequal ones. A ratio is a plan's time by the bound on all plans whose mean tile side is 64 or more, which use
at most m q / 64^2 devices; `any_side_ratio` is by the bound that knows no such limit, `tight_ratio`, for up to 32
devices, by one that knows how little room a strong device leaves to others. The worst over the seeds counts.

`--worked true` plans a batch of OPT-13B instead, once with the published settings and then with each change to them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from potluck.bench.rig.dominant import dominant_bound_s
from potluck.bench.worked import a100_s, plan_batch, published_devices, unequal_devices, variants, whole_layers_s
from potluck.planner.tiles.bound import lower_bound_s
from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import TileDevice, rates_of
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.tiling import most_sliced
from potluck.planner.tiles.verify import boxes_of, faults, tiling_fault
from potluck.simulator.large.recovery import deal_again

Result = TypeVar("Result")

num_tokens = 128 * 1024
least_side = 64
options = Options(may_keep_weights=False, may_split_inner=False, num_tiles=0, least_side=least_side)


def product_of(m: int, n: int, q: int) -> Product:
    return Product(m=m, n=n, q=q, down_bytes=2.0, up_bytes=2.0, held_bytes=2.0)


products: dict[str, Product] = {
    "13b forward": product_of(num_tokens, 5120, 20480),
    "13b input gradient": product_of(num_tokens, 20480, 5120),
    "13b weight gradient": product_of(5120, num_tokens, 20480),
    "13b square forward": product_of(num_tokens, 5120, 5120),
    "13b square weight gradient": product_of(5120, num_tokens, 5120),
    "124m forward": product_of(num_tokens, 768, 3072),
    "124m input gradient": product_of(num_tokens, 3072, 768),
    "124m weight gradient": product_of(768, num_tokens, 3072),
}
fleets: dict[str, Callable[..., tuple[TileDevice, ...]]] = {
    "published": published_devices,
    "unequal": unequal_devices,
}


def bench_tiles(*, devices: int = 256, seeds: int = 5, worked: bool = False) -> dict[str, float]:
    """Figures of each product and kind of fleet."""
    if worked:
        return _worked(devices)
    gc.freeze()  # as the coordinator does
    first_fleet = fleets["published"](devices, seed=0)
    cheapest(next(iter(products.values())), first_fleet, options=options)  # loads what is compiled
    figures: dict[str, float] = {"num_devices": devices, "num_seeds": seeds}
    for kind, make in fleets.items():
        for name, product in products.items():
            found = [_measure(product, make(devices, seed=seed)) for seed in range(seeds)]
            worst = {key: max(each[key] for each in found) for key in found[0]}
            worst["mean_side"] = min(each["mean_side"] for each in found)
            worst["devices_used"] = min(each["devices_used"] for each in found)
            figures |= {f"{kind}: {name} {key}": value for key, value in worst.items()}
    for key in ("ratio", "tight_ratio", "plan_s", "orphans_s"):
        figures[f"worst_{key}"] = max(value for name, value in figures.items() if name.endswith(f" {key}"))
    figures["worst_published_ratio"] = max(
        value for name, value in figures.items() if name.startswith("published") and name.endswith(" ratio")
    )
    figures["least_mean_side"] = min(value for name, value in figures.items() if name.endswith(" mean_side"))
    return figures


def _measure(product: Product, devices: Sequence[TileDevice]) -> dict[str, float]:
    plan_s, plan = _timed(lambda: cheapest(product, devices, options=options))
    verify_s, fault = _timed(lambda: faults(plan))
    assert not fault, fault
    lost = max(plan.loads, key=lambda worker: plan.loads[worker].compute_s)
    survivors = [device for device in devices if device.id != lost]
    orphans_s, orphans = _timed(lambda: deal_again(plan, {lost}, survivors))
    rest = boxes_of([tile for tile in plan.tiles if tile.device != lost])
    boxes = np.concatenate((rest, np.array([box for _, box in orphans])))
    assert not tiling_fault(boxes, (0, product.m, 0, product.q, 0, product.n))
    rates = rates_of(devices)
    most = max(1, product.m * product.q // least_side**2)
    bound_s = lower_bound_s(product, rates, most_devices=most)
    tight_s = max(bound_s, dominant_bound_s(product, rates)) if len(devices) <= most_sliced else bound_s
    return {
        "ratio": round(plan.first_s / bound_s, 4),
        "tight_ratio": round(plan.first_s / tight_s, 4),
        "any_side_ratio": round(plan.first_s / plan.lower_bound_s, 4),
        "mean_side": round(_mean_side(plan), 1),
        "devices_used": len(plan.loads),
        "plan_s": round(plan_s, 4),
        "verify_s": round(verify_s, 4),
        "orphans_s": round(orphans_s, 4),
        "recovery_percent": round(100 * max(lane.free_at for lane, _ in orphans) / plan.first_s, 2),
    }


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def _mean_side(plan: Plan) -> float:
    """The mean over tiles of the square root of their area."""
    boxes = boxes_of(plan.tiles)
    return float(np.sqrt((boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])).mean())


def _worked(num_devices: int) -> dict[str, float]:
    devices = published_devices(num_devices, seed=0)
    figures: dict[str, float] = {"num_devices": num_devices, "a100_at_40_percent_s": round(a100_s(), 1)}
    figures |= {f"{name}: s": round(seconds, 1) for name, seconds in whole_layers_s(devices).items()}
    for name, terms in variants.items():
        batch = plan_batch(devices, terms)
        found = {
            "s": round(batch.seconds, 1),
            "down_gb_per_device": round(batch.down_bytes / num_devices / 1e9, 1),
            "up_gb_per_device": round(batch.up_bytes / num_devices / 1e9, 1),
            "egress_gbit_per_s": round(batch.egress_bytes_per_s * 8e-9, 1),
            "ingress_gbit_per_s": round(batch.ingress_bytes_per_s * 8e-9, 1),
            "devices_used": batch.num_devices_used,
            "kept_percent": round(100 * batch.kept_share, 1),
        }
        found |= {f"{what}_bound_percent": round(100 * share, 1) for what, share in sorted(batch.bindings.items())}
        figures |= {f"{name}: {key}": value for key, value in found.items()}
    return figures
