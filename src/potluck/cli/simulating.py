"""`simulate`: a run on a virtual fleet, and whole runs under faults from seeds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from potluck.cli.simulating_tiles import simulate_tiles, tiles_text
from potluck.cli.units import format_bytes, format_count, format_rounds, format_seconds
from potluck.coordinator.events import Event
from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import load_recipe
from potluck.simulator.exact.fuzz import Verdict, fuzz
from potluck.simulator.fleet_files import load_fleet
from potluck.simulator.large.device_faults import draw_faults
from potluck.simulator.large.meta import CoordinatorMachine
from potluck.simulator.large.picture import timeline_svg
from potluck.simulator.large.report import DeviceReport, ScaleReport
from potluck.simulator.large.scale import simulate_scale
from potluck.storage.files import unfinished_name, write_atomic
from potluck.strategies.sub_gemm.strategy import SubGEMM
from potluck.types.errors import PotluckError, ResourceError

lines_shown = 40
progress_interval_s = 10.0


def run_fuzz(num_seeds: int, *, first_seed: int, num_jobs: int, keep_going: bool) -> dict[str, Any]:
    """Play that many seeds. PotluckError at the first violation, with the command that replays it."""
    torch.set_num_threads(1)
    every = max(num_seeds // 20, 1)

    def told(done: int, bad: int) -> None:
        if done % every == 0 or done == num_seeds:
            print(f"{done} of {num_seeds} seeds, {bad} violations", file=sys.stderr, flush=True)

    found = fuzz(range(first_seed, first_seed + num_seeds), num_jobs=num_jobs, told=told, until_first=not keep_going)
    if found.violated:
        first = found.violated[0]
        print(_story(first), file=sys.stderr)
        seeds = ", ".join(str(v.seed) for v in found.violated)
        raise PotluckError(
            f"seed {first.seed} violates an invariant: {first.detail}; replay it with `potluck simulate --fuzz 1 "
            f"--seed {first.seed}`" + (f"; all of them: {seeds}" if len(found.violated) > 1 else "")
        )
    return found.to_json()


def _story(verdict: Verdict) -> str:
    """The end of what happened, for people."""
    return "\n".join(verdict.history[-lines_shown:])


def simulate_recipe(
    recipe: str, fleet: str, *, seed: int, faults_per_hour: float, sizes: str, picture: Path | None,
    overrides: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Play a recipe on a fleet without its values: only time, bytes and energy. RecipeError."""
    if picture is not None:
        _require_writable(picture)
    plan = sketch(load_recipe(recipe, list(overrides)))
    machines = load_fleet(fleet)
    if isinstance(plan.strategy, SubGEMM):
        failing = [device.name for device in machines.devices if device.faults_per_hour]
        if faults_per_hour or failing:
            given = f"faults_per_hour of {failing[0]} in the fleet {machines.name}" if failing else "--faults"
            raise PotluckError(f"faults are not played for sub_gemm, whose recovery is computed; leave out {given}")
        return simulate_tiles(plan, machines, sizes=sizes, seed=seed, picture=picture)
    if sizes:
        name = plan.spec.strategy
        raise PotluckError(f"--devices is for sub_gemm and the strategy is {name}; set `count` in the fleet file")
    begun = time.monotonic()
    print(f"playing {plan.spec.name} on {machines.num_devices:,} machines", file=sys.stderr, flush=True)
    report = simulate_scale(
        plan,
        machines.devices,
        seed=seed,
        coordinator=CoordinatorMachine(
            up_bytes_per_s=machines.coordinator_up_bytes_per_s, down_bytes_per_s=machines.coordinator_down_bytes_per_s
        ),
        faults=draw_faults(machines.devices, seed=seed, per_hour=faults_per_hour),
        told=_Progress(),
    )
    played = f"{format_rounds(report.num_rounds)} in {format_seconds(report.seconds)}"
    title = f"{plan.spec.name} on {machines.name}: {played}"
    if picture is not None:
        write_atomic(picture, timeline_svg(report, title).encode())
    return {"recipe": plan.spec.name, "fleet": machines.name, "seed": seed} | _figures(report, time.monotonic() - begun)


class _Progress:
    """A line on standard error now and then, once a play takes long."""

    def __init__(self) -> None:
        self._begun = self._said = time.monotonic()

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if now - self._said < progress_interval_s:
            return
        self._said = now
        print(f"after {now - self._begun:.0f} s: {event.text}", file=sys.stderr, flush=True)


def _require_writable(path: Path) -> None:
    """Before minutes are spent on what is to be written there. ResourceError."""
    if path.is_dir():
        raise ResourceError(f"{path} is a folder; give the name of a file to write the picture to")
    scratch = unfinished_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise ResourceError(f"{path} cannot be written ({error.strerror}); give another place for it") from error


def _figures(report: ScaleReport, real_s: float) -> dict[str, Any]:
    energies = [d.energy_j for d in report.devices if d.energy_j is not None]
    classes: dict[str, list[DeviceReport]] = {}
    for device in report.devices:
        classes.setdefault(device.device, []).append(device)
    return {
        "seconds": round(report.seconds, 3),
        "rounds": report.num_rounds,
        "tokens": report.num_tokens,
        "stopped": report.stopped,
        "median_round_s": round(statistics.median(report.round_s), 3) if report.round_s else None,
        "up_bytes": round(report.up_bytes),
        "down_bytes": round(report.down_bytes),
        "energy_kwh": round(sum(energies) / 3.6e6, 4) if len(energies) == len(report.devices) else None,  # of devices
        "tasks_lost": report.num_lost,
        "too_small": list(report.unfit),
        "real_s": round(real_s, 1),
        "classes": {name: _class_figures(devices) for name, devices in classes.items()},
        "devices": {d.id: _class_figures([d]) for d in report.devices},
    }


def _class_figures(devices: Sequence[DeviceReport]) -> dict[str, Any]:
    """Of one class, or of one machine: means."""
    energies = [d.energy_j for d in devices if d.energy_j is not None]
    return {
        "machines": len(devices),
        "compute_share": round(statistics.fmean(d.utilisation for d in devices), 4),
        "send_s": round(statistics.fmean(d.phases.send_s for d in devices), 1),
        "receive_s": round(statistics.fmean(d.phases.receive_s for d in devices), 1),
        "wait_s": round(statistics.fmean(d.phases.wait_s for d in devices), 1),
        "rounds": round(statistics.fmean(d.num_rounds for d in devices), 2),
        "tokens": sum(d.num_tokens for d in devices),
        "up_bytes": round(statistics.fmean(d.up_bytes for d in devices)),
        "down_bytes": round(statistics.fmean(d.down_bytes for d in devices)),
        "energy_kwh": round(statistics.fmean(energies) / 3.6e6, 5) if len(energies) == len(devices) else None,
    }


def report_text(report: Mapping[str, Any]) -> str:
    """For people: the run in two lines, then one for each class of machines."""
    if "sub_gemm" in report:
        return tiles_text(report)
    energy = f"{report['energy_kwh']:.3g} kWh" if report["energy_kwh"] else "energy not known"
    lines = [
        f"{report['recipe']} on {report['fleet']}: {format_rounds(report['rounds'])}, "
        f"{format_count(report['tokens'])} tokens in {format_seconds(report['seconds'])}; "
        f"simulated in {report['real_s']} s",
        f"{format_bytes(report['up_bytes'])} up, {format_bytes(report['down_bytes'])} down, {energy}, "
        f"{report['tasks_lost']} tasks lost",
    ]
    if report["stopped"]:
        lines.append(f"stopped: {report['stopped']}")
    if report["too_small"]:
        lines.append(f"{len(report['too_small'])} machines have too little memory for this model and take no part")
    names = ("class", "machines", "computing", "sending", "receiving", "waiting", "rounds", "up each", "down each")
    rows: list[tuple[str, ...]] = [names]
    for name, each in report["classes"].items():
        rows.append((
            name, str(each["machines"]), f"{each['compute_share']:.0%}", format_seconds(each["send_s"]),
            format_seconds(each["receive_s"]), format_seconds(each["wait_s"]), f"{each['rounds']:g}",
            format_bytes(each["up_bytes"]), format_bytes(each["down_bytes"]),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"
