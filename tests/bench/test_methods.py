"""What `bench methods` makes of runs, and of a fleet; the runs themselves are those of `bench convergence`."""

from __future__ import annotations

import json
import math
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from potluck.bench.convergence import Absence, Conditions, Point, Trained
from potluck.bench.methods import (
    Found,
    Job,
    _at_sites,  # pyright: ignore
    _charts,  # pyright: ignore
    _figures,  # pyright: ignore
    _or_worst,  # pyright: ignore
    alone,
    bench_methods,
    methods,
    reference,
)
from potluck.bench.records import Records
from potluck.types.errors import PotluckError, ResourceError


def trained(loss: float, up: float, down: float = 1.0) -> Trained:
    return Trained(
        params=torch.zeros(1), loss=loss, first_loss=4.0, tokens=1, bytes_up_per_worker=up, bytes_down_per_worker=down,
        seconds=10.0, utilisation=0.5,
    )  # fmt: skip


def test_progress_is_against_runs_of_the_same_length_and_bytes_are_those_of_the_second_half() -> None:
    found: Found = {
        (reference, 8): [trained(3.0, 800.0, 80.0), trained(2.0, 800.0, 80.0)],
        (reference, 4): [trained(3.5, 400.0, 40.0)],
        ("diloco", 8): [trained(3.2, 30.0, 3.0), trained(3.0, 30.0, 3.0)],
        ("diloco", 4): [trained(3.75, 20.0, 2.0)],
    }
    figures = _figures("diloco", found, 8, 1e-3)
    assert figures["progress_of_seeds"] == [0.8, 0.5] and figures["progress"] == 0.65
    assert figures["progress_of_half_the_steps"] == 0.5  # of the first seed
    assert (figures["fewer_bytes_up"], figures["fewer_bytes_down"]) == (40.0, 40.0)
    own = _figures(reference, found, 8, 1e-3)
    assert (own["progress"], own["fewer_bytes_up"]) == (1.0, 1.0)


def test_the_machines_of_a_fleet_are_workers_with_the_steps_and_bytes_of_the_recipe() -> None:
    found = _at_sites(methods["diloco"], "five_sites", seed=1, model_bytes=4.0 * 124_439_808)
    assert len(found.links) == len(found.step_s) == 8 and found.balance == "time"
    assert found.links[0].up_bytes_per_s == pytest.approx(250e6 / 8, rel=0.01)  # as large a model: the file's own rates
    cluster, lab = found.step_s[0], found.step_s[4]
    assert lab == pytest.approx(2 * cluster) and cluster == pytest.approx(6 * 124e6 * 32768 / 4e13, rel=0.25)
    assert {absence.worker for absence in found.absences} == {5}  # the flaky one
    assert (found.always_here(8), found.always_here(1), found.among(1).absences) == (7, 1, ())  # one worker alone
    assert all(a.at_s + a.away_s <= b.at_s for a, b in zip(found.absences, found.absences[1:], strict=False))
    smaller = _at_sites(methods[reference], "five_sites", seed=1, model_bytes=4.0 * 1_244_398)
    assert smaller.links[0].up_bytes_per_s == pytest.approx(found.links[0].up_bytes_per_s / 100, rel=0.01)
    assert smaller.step_s == found.step_s and smaller.balance == "none"


def test_a_run_waits_for_one_worker_at_least_though_all_are_away_at_times() -> None:
    conditions = Conditions(absences=(Absence(0, 10.0, 5.0), Absence(1, 20.0, 5.0), Absence(0, 30.0, 5.0)))
    assert [conditions.always_here(workers) for workers in (1, 2, 3)] == [1, 1, 1]
    assert conditions.among(1).absences == (Absence(0, 10.0, 5.0), Absence(0, 30.0, 5.0))


def test_only_what_may_be_balanced_is() -> None:
    given = {"diloco": True, "streaming_diloco, int4": False, "sync_sgd": False, "sparse_diloco, Muon": True,
             "fed_avg": False, "fed_avg, normalised": True, "scaffold, plain SGD": False}  # fmt: skip
    assert {name: methods[name].balances for name in given} == given
    assert all(method.balances for method in methods.values() if method.is_unequal)


def test_every_method_can_be_made_and_what_is_none_is_named() -> None:
    for method in methods.values():
        method.made()
    assert methods[alone].workers == 1
    with pytest.raises(
        PotluckError, match=r"no method 'sparse_dilco'; did you mean 'sparse_diloco, Muon'\? there are sync"
    ):
        bench_methods(only="diloco; sparse_dilco")


def test_runs_that_were_recorded_are_not_done_again(tmp_path: Path) -> None:
    jobs = [Job(method=name, lr=1e-3, num_steps=4, seed=1, folder=tmp_path) for name in ("diloco", "fed_avg")]
    done = replace(trained(3.0, 8.0), curve=(Point(seconds=1.0, bytes_per_worker=2.0, loss=3.5),))
    records = Records(tmp_path / "runs.jsonl")
    records.add(jobs[0].settings, done)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"settings": {"meth')  # a power cut
    again = Records(tmp_path / "runs.jsonl")
    found = again.get(jobs[0].settings)
    assert found is not None and (found.loss, found.curve, found.utilisation) == (3.0, done.curve, 0.5)
    assert again.get(jobs[1].settings) is None and again.get(replace(jobs[0], lr=2e-3).settings) is None
    again.add(jobs[1].settings, done)
    assert list(again.completed(NoPool(), pytest.fail, jobs, told=pytest.fail, before=pytest.fail)) == jobs


def test_a_run_that_came_apart_is_the_worst_and_spoils_no_picture() -> None:
    assert min((math.nan, 3.0, math.inf), key=_or_worst) == 3.0
    points = tuple(Point(seconds=s, bytes_per_worker=8.0, loss=x) for s, x in ((0.0, 4.0), (1.0, 3.0), (2.0, math.nan)))
    (by_time, by_bytes) = _charts({"diloco": replace(trained(math.nan, 8.0), curve=points)})
    assert by_time.lines[0].points == ((1.0, 3.0),)
    assert by_bytes.lines[0].points == ((8.0, 4.0), (8.0, 3.0))


def test_a_fleet_file_that_was_edited_is_another_fleet(tmp_path: Path) -> None:
    fleet = tmp_path / "mine.toml"
    fleet.write_text('[[devices]]\nname = "a"\ngflops = 10\n')
    job = Job(method="diloco", lr=1e-3, num_steps=4, seed=1, folder=tmp_path, fleet=str(fleet))
    before = job.settings
    assert job.settings == before
    fleet.write_text('[[devices]]\nname = "a"\ngflops = 20\n')
    assert job.settings != before


whole = {
    "loss": 3.0, "first_loss": 4.0, "tokens": 1, "bytes_up_per_worker": 1.0, "bytes_down_per_worker": 1.0, "curve": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00\x01", b"[]", b"7", b"null", b"[" * 100_000, b'{"result": 1, "settings": {}}',
        json.dumps({"result": whole}).encode(), json.dumps({"settings": {}}).encode(),
        json.dumps({"settings": {}, "result": {**whole, "loss": "low"}}).encode(),
        json.dumps({"settings": {}, "result": {**whole, "loss": None}}).encode(),
        json.dumps({"settings": {}, "result": {**whole, "params": 1}}).encode(),
        json.dumps({"settings": {}, "result": {**whole, "curve": [1]}}).encode(),
        json.dumps({"settings": {}, "result": {**whole, "curve": [{"seconds": 1, "bytes_per_worker": []}]}}).encode(),
    ],
)  # fmt: skip
def test_a_line_that_is_no_run_does_not_count(line: bytes, tmp_path: Path) -> None:
    good = {"settings": {"lr": 1}, "result": whole}
    path = tmp_path / "runs.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(good).encode() + b"\n")
    found = Records(path)
    assert found.get({}) is None
    kept = found.get({"lr": 1})
    assert kept is not None and kept.loss == 3.0


def test_a_file_that_cannot_keep_runs_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot keep runs \(Is a directory\); give another file to --record"):
        bench_methods(record=str(tmp_path))


def test_a_run_is_not_lost_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = tmp_path / "runs.jsonl", list[str]()
    records = Records(path, told=told.append)
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda *_, **__: open("/dev/full", "w"))  # noqa: SIM115
        records.add({"lr": 1}, trained(3.0, 8.0))
    assert records.get({"lr": 1}) is not None
    assert told == [f"{path} does not take a run that is done (No space left on device); free some space"]
    records.add({"lr": 2}, trained(3.0, 8.0))
    again = Records(path)
    assert again.get({"lr": 1}) is None and again.get({"lr": 2}) is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 1}, "--steps is 1 .* give 2 or more"),
        ({"picture": "/nowhere/at/all.svg"}, "--picture is /nowhere/at/all.svg, whose folder is not there"),
        ({"fleet": "six_sites"}, "six_sites"),
    ],
)
def test_what_a_long_bench_cannot_do_is_known_before_it_trains(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PotluckError, match=sentence):
        bench_methods(**options)


def test_runs_too_short_to_send_anything_have_no_ratios() -> None:
    found: Found = {
        (reference, 2): [trained(4.0, 800.0, 80.0)], (reference, 1): [trained(4.0, 400.0, 40.0)],
        ("diloco", 2): [trained(3.9, 0.0, 0.0)], ("diloco", 1): [trained(4.0, 0.0, 0.0)],
    }  # fmt: skip
    figures = _figures("diloco", found, 2, 1e-3)
    for name in ("progress", "fewer_bytes_up", "fewer_bytes_down"):
        assert math.isnan(figures[name])


class NoPool(Executor):
    def submit(self, *_: object) -> Never:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("it was done before")
