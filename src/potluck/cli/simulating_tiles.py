"""`simulate` for a recipe with `sub_gemm`: one optimizer step beside the baselines, as a table, JSON and charts."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.cli.units import format_bytes, format_count, format_seconds
from potluck.coordinator.plan import Plan
from potluck.planner.baselines.layered import BaselineTime
from potluck.simulator.fleet_files import MAX_DEVICES, FleetFile
from potluck.simulator.large.charts import Chart, Line, charts_svg
from potluck.simulator.large.comparison import Case, Comparison, compare
from potluck.simulator.large.recovery import RecoveryTimes
from potluck.storage.files import write_atomic
from potluck.types.errors import PotluckError

gbit = 1e9 / 8
ways = {"egress": "coordinator out", "ingress": "coordinator in"}
"""What binds a plan, in words; the names of its devices' ways are words already."""
common = (
    "products of linear layers only: attention, norms, loss and optimizer are left out everywhere",
    "nobody fails, and links hold their rates; what k pieces of work can overlap of transfers and work is (k-1)/k",
)


def simulate_tiles(plan: Plan, fleet: FleetFile, *, sizes: str, seed: int, picture: Path | None) -> dict[str, Any]:
    """`sizes` of fleets, such as `64,256`; of the fleet file where empty. PotluckError."""
    begun = time.monotonic()
    fleet_sizes = parse_sizes(sizes) or [fleet.num_devices]
    wanted = ", ".join(f"{size:,}" for size in fleet_sizes)
    print(f"planning a step of {plan.spec.name} on {fleet.name} with {wanted} devices", file=sys.stderr, flush=True)

    def told(size: int) -> None:
        print(f"after {time.monotonic() - begun:.0f} s: planned for {size:,} devices", file=sys.stderr, flush=True)

    found = compare(plan, fleet, fleet_sizes=fleet_sizes, seed=seed, told=told)
    if picture is not None:
        write_atomic(picture, charts_svg(charts(found, f"{plan.spec.name} on {fleet.name}")).encode())
    model = found.model
    return {
        "recipe": plan.spec.name,
        "fleet": fleet.name,
        "seed": seed,
        "tokens": model.num_tokens,
        "micro_batches": found.num_micro_batches,
        "flops": model.flops,
        "a100_s": round(found.a100_s, 3),
        "fastest_device_alone_s": round(found.fastest_alone_s, 3),
        "sub_gemm": [_case(case) for case in found.cases],
        "baselines": [{"devices": size} | _baseline(baseline) for size, baseline in found.baselines],
        "recovery": [{"devices": size} | _recovery(times) for size, times in found.recoveries],
        "assumptions": [*common, found.cases[0].step.assumptions, *dict.fromkeys(
            f"{baseline.name}: {baseline.assumptions}" for _, baseline in found.baselines
        )],
        "real_s": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def parse_sizes(text: str) -> list[int]:
    """`64,256,1024`. PotluckError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 1 <= int(word) <= MAX_DEVICES for word in words):
        raise PotluckError(f"--devices is {text!r} and must be numbers from 1 to {MAX_DEVICES:,}, such as 64,256,1024")
    return sorted({int(word) for word in words})


def _case(case: Case) -> dict[str, Any]:
    step = case.step.plan
    return {
        "devices": case.num_devices,
        "coordinator_out_gbit_s": _gbit(case.egress_bytes_per_s),
        "coordinator_in_gbit_s": _gbit(case.ingress_bytes_per_s),
        "seconds": round(step.seconds, 3),
        "devices_used": step.num_devices_used,
        "down_bytes_per_device": round(step.down_bytes / case.num_devices),
        "up_bytes_per_device": round(step.up_bytes / case.num_devices),
        "used_out_gbit_s": round(step.egress_bytes_per_s / gbit, 3),
        "used_in_gbit_s": round(step.ingress_bytes_per_s / gbit, 3),
        "binding": {name: round(share, 3) for name, share in sorted(step.bindings.items(), key=lambda b: -b[1])},
        "kept_share": round(step.kept_share, 4),
        "compute_share": round(case.step.utilisation, 5),
        "head_check_flops": step.check_flops,
        "energy_kwh": None if case.step.energy_j is None else round(case.step.energy_j / 3.6e6, 4),
        "products": [
            {
                "shape": [use.product.m, use.product.n, use.product.q],
                "has_weight": use.product.has_weight,
                "num_weights": each.count,
                "num_uses": use.num_uses,
                "method": plan.method,
                "first_s": round(plan.first_s, 4),
                "later_s": round(plan.later_s, 4),
                "why": plan.reason,
            }
            for each in step.planned
            for use, plan in ((each.use, each.plan),)
        ],
    }


def _baseline(baseline: BaselineTime) -> dict[str, Any]:
    return {
        "name": baseline.name,
        "fits": baseline.fits,
        "seconds_if_it_fits": round(baseline.seconds, 3),
        "layout": baseline.layout,
        "devices_used": baseline.num_devices_used,
        "down_bytes_per_device": round(baseline.down_bytes_per_device),
        "up_bytes_per_device": round(baseline.up_bytes_per_device),
        "needs_bytes": round(baseline.needs_bytes),
        "least_bytes": round(baseline.least_bytes),
        "has_bytes": round(baseline.has_bytes) if math.isfinite(baseline.has_bytes) else None,
    }


def _recovery(times: RecoveryTimes) -> dict[str, Any]:
    return {
        "lost": times.num_lost,
        "tiles_s": round(times.tiles_s, 4),
        "worst_tiles_s": round(times.worst_tiles_s, 4),
        "pipeline_reload_s": None if times.reload_s is None else round(times.reload_s, 3),
        "pipeline_replay_s": None if times.replay_s is None else round(times.replay_s, 3),
        "times_sooner": None if times.ratio is None else round(times.ratio),
    }


def _gbit(rate: float) -> float | None:
    return None if math.isinf(rate) else round(rate / gbit, 6)


def tiles_text(report: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        f"{report['recipe']} on {report['fleet']}: one step of {format_count(report['tokens'])} tokens in "
        f"{report['micro_batches']} micro-batches, {report['flops'] / 1e15:.3g} PFLOP; planned in {report['real_s']} s",
        f"one A100 at 40 %: {format_seconds(report['a100_s'])}; the fastest device alone, had it the memory: "
        f"{format_seconds(report['fastest_device_alone_s'])}",
        "",
    ]
    rows = [
        ("devices", "method", "coordinator", "step", "down each", "up each", "Gbit/s out, in", "binds", "computing")
    ]
    for each in report["sub_gemm"]:
        link = each["coordinator_out_gbit_s"]
        binds = ", ".join(f"{ways.get(name, name)} {share:.0%}" for name, share in list(each["binding"].items())[:2])
        rows.append((
            f"{each['devices']:,}", "sub_gemm", "unlimited" if link is None else f"{link:g} Gbit/s",
            format_seconds(each["seconds"]), format_bytes(each["down_bytes_per_device"]),
            format_bytes(each["up_bytes_per_device"]), f"{each['used_out_gbit_s']:.3g}, {each['used_in_gbit_s']:.3g}",
            binds, f"{each['compute_share']:.2%}",
        ))  # fmt: skip
    for each in report["baselines"]:
        seconds = format_seconds(each["seconds_if_it_fits"])
        rows.append((
            f"{each['devices']:,}", each["name"], "not used", seconds if each["fits"] else f"({seconds})",
            format_bytes(each["down_bytes_per_device"]), format_bytes(each["up_bytes_per_device"]), "",
            each["layout"], "",
        ))  # fmt: skip
    lines += _table(rows)
    if any(not each["fits"] for each in report["baselines"]):
        lines += ["", "In brackets: does not run here; the figure is for devices that had the memory."]
        lines += [
            f"  {each['name']} with {each['devices']:,} devices needs {format_bytes(each['needs_bytes'])} on one, "
            f"{format_bytes(each['least_bytes'])} where laid out to take least; it may use "
            f"{format_bytes(each['has_bytes'])}"
            for each in report["baselines"]
            if not each["fits"]
        ]
    if report["recovery"]:
        lines += ["", "after devices are lost, from when it is noticed:"]
        rows = [("devices", "lost", "tiles again", "pipeline: reload", "replay", "times sooner")]
        rows += [
            (
                f"{each['devices']:,}", str(each["lost"]), f"{each['tiles_s']:.3f} s",
                _maybe(each["pipeline_reload_s"]), _maybe(each["pipeline_replay_s"]),
                "" if each["times_sooner"] is None else f"{each['times_sooner']:,}",
            )
            for each in report["recovery"]
        ]  # fmt: skip
        lines += _table(rows)
    return "\n".join([*lines, "", "assumed:", *(f"  {each}" for each in report["assumptions"])]) + "\n"


def _maybe(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def charts(found: Comparison, title: str) -> list[Chart]:
    times: dict[str, list[tuple[float, float]]] = {}
    moved: dict[str, list[tuple[float, float]]] = {}
    unfit: set[str] = set()
    for case in found.cases:
        rate = case.egress_bytes_per_s
        link = "" if math.isinf(rate) else f", {rate / gbit:g} Gbit/s"
        times.setdefault(f"sub_gemm{link}", []).append((case.num_devices, case.step.plan.seconds))
        if case.egress_bytes_per_s == found.cases[0].egress_bytes_per_s:
            for way, num_bytes in (("down", case.step.plan.down_bytes), ("up", case.step.plan.up_bytes)):
                moved.setdefault(f"sub_gemm, {way}", []).append((case.num_devices, num_bytes / case.num_devices / 1e9))
    for size, baseline in found.baselines:
        if not baseline.fits:
            unfit.add(baseline.name)
        times.setdefault(baseline.name, []).append((size, baseline.seconds))
        if baseline.up_bytes_per_device:
            moved.setdefault(f"{baseline.name}, each way", []).append((size, baseline.up_bytes_per_device / 1e9))
    times["one A100 at 40 %"] = [(case.num_devices, found.a100_s) for case in found.cases]
    again: dict[str, list[tuple[float, float]]] = {}
    for size, each in found.recoveries:
        again.setdefault(f"tiles, {size:,} devices", []).append((each.num_lost, each.tiles_s))
        if each.pipeline_s:
            again.setdefault(f"pipeline, {size:,} devices", []).append((each.num_lost, each.pipeline_s))
    return [
        _chart(f"{title}: time of a step", "devices", "seconds", times, unfit),
        _chart(f"{title}: bytes of a device in a step", "devices", "GB", moved, unfit),
        _chart(f"{title}: recovery once noticed", "devices lost", "seconds", again, {"pipeline"} & unfit),
    ]


def _chart(
    title: str, x_name: str, y_name: str, lines: Mapping[str, list[tuple[float, float]]], unfit: set[str]
) -> Chart:
    """Lines of what the devices have no memory for are dashed, with a star."""
    has_unfit = any(name.partition(",")[0] in unfit for name in lines)
    return Chart(
        title=title + " (*: had they the memory)" * has_unfit,
        x_name=x_name,
        y_name=y_name,
        lines=tuple(
            Line(name=f"{name} *" if is_unfit else name, points=tuple(points), is_dashed=is_unfit)
            for name, points in lines.items()
            for is_unfit in (name.partition(",")[0] in unfit,)
        ),
    )
