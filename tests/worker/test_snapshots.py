"""A task that is killed between two steps goes on from its snapshot, bit for bit as if it had not been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import gpt2
from torch import Tensor
from worker.test_replica import some_batches, spec_of

from potluck.models.build import build
from potluck.models.flat import FlatModel
from potluck.protocol import pb
from potluck.strategies.diloco import inner
from potluck.strategies.replica import Replica
from potluck.strategies.run import RunSpec
from potluck.strategies.task import Result, TaskFunction, task
from potluck.types.vector import Vector
from potluck.worker import snapshots
from potluck.worker.replica import TorchReplica
from potluck.worker.resumable import ResumableReplica, TaskCancelled, TaskSuspended
from potluck.worker.snapshots import Pace
from potluck.worker.state import RunFolder
from potluck.worker.trainer import Trainer

num_steps = 7
step_s = 0.25


class Killed(BaseException):
    """As kill -9, for a task."""


@dataclass
class Fed:
    """Batches of a task; reading the one after `dies_after` kills. With `is_private` there is a place in them."""

    is_private: bool = False
    dies_after: int = 1000
    num_read: int = 0
    start: int = 0
    batches: list[Tensor] = field(default_factory=lambda: some_batches(40))

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            if self.num_read == self.dies_after:
                raise Killed
            self.num_read += 1
            yield self.batches[self.start + self.num_read - 1]

    @property
    def cursor(self) -> dict[str, Any]:
        return {"position": self.start + self.num_read} if self.is_private else {}

    def seek(self, cursor: dict[str, Any]) -> None:
        self.start = int(cursor.get("position", 0)) if self.is_private else 0


class Machine:
    """A worker's trainer and folder. `restart` is a new process on the same disk."""

    def __init__(self, folder: Path, spec: RunSpec, *, every_steps: int = 3) -> None:
        self.spec, self.every_steps, self.root = spec, every_steps, folder
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.folder, self.notes, self.num_computed = RunFolder(self.root), [], 0
        self.replica = TorchReplica(self.spec)
        self.trainer = Trainer(
            self.replica, self.folder, self.notes.append, now=lambda: self.now, snapshot_every_steps=self.every_steps
        )
        step = self.replica.on_step

        def stepped(info: Any) -> None:
            self.num_computed += 1
            self.now += step_s
            step(info)

        self.replica.on_step = stepped

    def do(
        self, function: TaskFunction, lease: pb.Lease, fed: Fed | None = None, num_steps: int = num_steps,
        **options: Any,
    ) -> Result:  # fmt: skip
        fed = fed or Fed()
        replica = self.trainer.prepare(lease, fed, pinned=True, **options)
        result = function.function(replica, theta=theta(self.spec), **{**arguments, "num_steps": num_steps})
        result = Result(result.scalars, {name: Vector.of(v).tensor() for name, v in result.tensors.items()})
        self.trainer.keep(lease, fed)
        return result


arguments = {"num_steps": num_steps, "progress": (0.2, 0.4)}


def theta(spec: RunSpec) -> Vector:
    return Vector.of(FlatModel(build(spec.model_config_json, seed=1)).params())


def lease(round: int = 1, **changes: Any) -> pb.Lease:
    base = f"r{round - 1}" if round else ""
    return pb.Lease(
        key="inner/w1", round=round, task="diloco.inner", kind="pinned", base_version=base, next_version=f"r{round}",
        **changes,
    )  # fmt: skip


def undisturbed(folder: Path, spec: RunSpec, function: TaskFunction, is_private: bool) -> tuple[Result, Any]:
    """The first round and then the second, as a worker does them that is never killed and takes no snapshots."""
    machine = Machine(folder / "undisturbed", spec, every_steps=0)
    machine.do(function, lease(0), Fed(is_private))
    result = machine.do(function, lease(1), Fed(is_private))
    assert machine.folder.snapshot.paths == []
    return result, machine.folder.load_version("r1")


def assert_same(got: Result, machine: Machine, expected: tuple[Result, Any]) -> None:
    result, (tensors, scalars) = expected
    assert got.scalars == result.scalars
    assert torch.equal(torch.as_tensor(got.tensors["delta"]), torch.as_tensor(result.tensors["delta"]))
    found, facts = machine.folder.load_version("r1")
    assert facts == scalars
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def killed(folder: Path, spec: RunSpec, function: TaskFunction, *, is_private: bool = False, after: int) -> Machine:
    """A worker that did the first round and was killed in the second, when it read the batch after so many."""
    machine = Machine(folder / "killed", spec)
    machine.do(function, lease(0), Fed(is_private))
    with pytest.raises(Killed):
        machine.do(function, lease(1), Fed(is_private, dies_after=after))
    machine.restart()
    return machine


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": "sgd"}, {"accumulation": 2}, {"dropout": True}],
    ids=["adamw", "sgd", "accumulation", "dropout"],
)
def test_it_goes_on_bit_for_bit(tmp_path: Path, settings: dict[str, Any], is_private: bool) -> None:
    inner_settings, config = dict(settings), gpt2()
    if inner_settings.pop("dropout", False):
        config = {**config, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    spec = spec_of(config, **inner_settings)
    expected = undisturbed(tmp_path, spec, inner, is_private)
    after = 5 * spec.inner.accumulation
    machine = killed(tmp_path, spec, inner, is_private=is_private, after=after)
    got = machine.do(inner, lease(1), Fed(is_private))
    assert_same(got, machine, expected)
    assert machine.num_computed == num_steps - 3
    assert machine.trainer.num_steps == num_steps
    assert machine.notes == ["going on after step 3 of the task that was under way"]


def test_it_may_be_killed_again_and_again(tmp_path: Path) -> None:
    spec = spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, inner, False)
    machine = killed(tmp_path, spec, inner, after=5)
    with pytest.raises(Killed):
        machine.do(inner, lease(1), Fed(dies_after=6))
    machine.restart()
    got = machine.do(inner, lease(1))
    assert_same(got, machine, expected)
    assert machine.num_computed == 1


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_cut_short_after_so_many_steps_it_has_taken_just_these(tmp_path: Path, at: int, is_private: bool) -> None:
    """Also where it was killed after its snapshot of step 3: what that holds is told first, then it ends."""
    spec = spec_of(gpt2())
    short = Machine(tmp_path / "short", spec, every_steps=0)
    short.do(inner, lease(0), Fed(is_private))
    fed = Fed(is_private)
    got = short.do(inner, lease(1), fed, is_cut_short=lambda: short.trainer.num_steps >= at)
    assert got.scalars["num_steps"] == short.trainer.num_steps == fed.num_read == at
    expected = got, short.folder.load_version("r1")
    machine = killed(tmp_path, spec, inner, is_private=is_private, after=5)
    again = machine.do(inner, lease(1, cut_short=True), Fed(is_private), is_cut_short=lambda: True)
    assert again.scalars["num_steps"] == 3 and machine.num_computed == 0
    if at == 3:
        assert_same(again, machine, expected)
    else:
        assert again.scalars != got.scalars


def test_its_steps_are_the_first_of_the_whole_task(tmp_path: Path) -> None:
    """The schedule goes by what was granted: a plain loop over the same progress has the same parameters."""
    spec = spec_of(gpt2())
    machine = Machine(tmp_path, spec, every_steps=0)
    got = machine.do(inner, lease(0), is_cut_short=lambda: machine.trainer.num_steps >= 2)
    plain = TorchReplica(spec)
    plain.feed(some_batches(40))
    plain.load(theta(spec))
    for i in range(2):
        plain.train_step(progress=0.2 + 0.2 * i / num_steps)
    delta = theta(spec).tensor() - plain.params().tensor()
    assert torch.allclose(torch.as_tensor(got.tensors["delta"]), delta, rtol=1e-6, atol=1e-8)


def test_the_time_before_the_kill_counts_as_worked(tmp_path: Path) -> None:
    """Deadlines are predicted from it."""
    machine = killed(tmp_path, spec_of(gpt2()), inner, after=5)
    machine.now += 1000.0
    begun = machine.now
    machine.do(inner, lease(1), begun_at=begun)
    assert machine.now - begun + machine.trainer.seconds_before == num_steps * step_s


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink])
def test_a_damaged_snapshot_costs_its_steps(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    spec = spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, inner, False)
    machine = killed(tmp_path, spec, inner, after=5)
    (path,) = machine.folder.snapshot.paths
    damage(path)
    got = machine.do(inner, lease(1))
    assert_same(got, machine, expected)
    assert machine.num_computed == num_steps
    assert [note.endswith("the task starts again") for note in machine.notes] == (
        [] if damage is Path.unlink else [True]
    )


@pytest.mark.parametrize(
    "changes", [{"attempt": 1}, {"num_sequences": 8}, {"objects": ["another"]}, {"arguments_json": "{}"}]
)
def test_a_snapshot_of_another_task_is_not_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    machine = killed(tmp_path, spec_of(gpt2()), inner, after=5)
    machine.do(inner, lease(1, **changes))
    assert machine.num_computed == num_steps


def test_a_lost_state_before_the_task_voids_the_snapshot(tmp_path: Path) -> None:
    machine = killed(tmp_path, spec_of(gpt2()), inner, after=5)
    machine.folder.keep_versions([])
    machine.do(inner, lease(1))
    assert machine.num_computed == num_steps
    assert "starts afresh" in machine.notes[0]


def test_ways_the_inputs_travel_do_not_name_a_task() -> None:
    assert snapshots.task_name(lease(deltas=[pb.Delta(target="t")])) == snapshots.task_name(lease())
    assert snapshots.task_name(lease(attempt=1)) != snapshots.task_name(lease())


def test_a_full_disk_costs_the_snapshot_and_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, inner, False)
    machine = Machine(tmp_path / "full", spec, every_steps=1)
    machine.do(inner, lease(0))
    machine.folder.snapshot.drop()
    free_bytes = 400_000  # more than one snapshot, less than two
    monkeypatch.setattr("potluck.types.disk.free_bytes", lambda _: free_bytes)
    got = machine.do(inner, lease(1))
    assert_same(got, machine, expected)
    assert machine.folder.snapshot.paths == []
    (note,) = machine.notes
    assert note.startswith("no snapshot of the task was taken: the disk for ") and "400,000 bytes free" in note


def test_a_new_snapshot_that_is_torn_leaves_the_one_before(tmp_path: Path) -> None:
    """Killed before the older one was put away, and the power went too."""
    spec = spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, inner, False)
    machine = killed(tmp_path, spec, inner, after=5)
    (path,) = machine.folder.snapshot.paths
    path.with_name("snapshot-00000099").write_bytes(path.read_bytes()[:-1000])
    got = machine.do(inner, lease(1))
    assert_same(got, machine, expected)
    assert machine.num_computed == num_steps - 3
    assert len(machine.folder.snapshot.paths) == 1


def test_snapshots_are_written_over_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.storage.spares.least_bytes", 1)
    machine = Machine(tmp_path, spec_of(gpt2()), every_steps=1)
    machine.do(inner, lease(0))
    machine.folder.snapshot.drop()
    assert machine.folder.snapshot.paths == []
    spares = list((tmp_path / "objects" / "spare").iterdir())
    assert len(spares) == 2
    machine.do(inner, lease(1))
    assert len(list((tmp_path / "objects" / "spare").iterdir())) == 1
    machine.folder.objects.spares.clear()


# Tasks that do more than load and step


def middle(replica: Replica, what: str) -> float:
    if what == "evaluate":
        return replica.evaluate(some_batches(1, seed=3)[0]).loss_sum
    if what == "params":
        return float(replica.params().tensor().double().sum())
    if what == "gradient":
        return replica.gradient(num_sequences=4)[1].loss_sum
    if what == "batches":
        return float(next(iter(replica.batches())).sum())
    if what == "load":
        replica.load(replica.params() * 0.5)
    return 0.0


def meddling(what: str, at: int) -> TaskFunction:
    """A task that does something else before step `at`."""

    @task(f"toysnap.{what}{at}", kind="pinned")
    def meddle(replica: Replica, *, theta: Vector, num_steps: int, progress: tuple[float, float]) -> Result:
        replica.load(theta)
        seen, losses = 0.0, []
        for i in range(num_steps):
            if i == at:
                seen = middle(replica, what)
            losses.append(replica.train_step(progress=progress[0]).loss)
        return Result({"seen": seen, "losses": repr(losses)}, {"delta": theta - replica.params()})

    return meddle


@pytest.mark.parametrize("what", ["evaluate", "params", "gradient", "batches", "load"])
@pytest.mark.parametrize("at", [2, 4])
def test_a_task_that_does_more_is_gone_on_with_rightly(tmp_path: Path, what: str, at: int) -> None:
    """Before the snapshot: no snapshot is taken after that, and one of earlier code is seen through. After it: used."""
    function, spec = meddling(what, at), spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, function, False)
    machine = killed(tmp_path, spec, function, after=6)
    assert machine.folder.snapshot.num_steps(snapshots.task_name(lease(1))) == (0 if at == 2 else 3)
    got = machine.do(function, lease(1))
    assert_same(got, machine, expected)
    extra = 1 if what == "gradient" else 0
    assert machine.num_computed == num_steps + extra - (0 if at == 2 else 3)


@pytest.mark.parametrize("what", ["evaluate", "params", "gradient", "batches", "load"])
def test_a_snapshot_of_another_history_is_seen_through(tmp_path: Path, what: str) -> None:
    """The task is not what it was when the snapshot was taken: its steps are taken again."""
    function, spec = meddling(what, 2), spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, function, False)
    machine = Machine(tmp_path / "killed", spec)
    machine.do(function, lease(0))
    with pytest.raises(Killed):
        machine.do(inner_at_one_progress, lease(1), Fed(dies_after=5))
    machine.restart()
    got = machine.do(function, lease(1))
    assert_same(got, machine, expected)
    with pytest.raises(Killed):
        machine.do(inner_at_one_progress, lease(2), Fed(dies_after=5))
    assert machine.do(inner, lease(2)).scalars["num_tokens"] == num_steps * 48  # at other rates than those steps had
    assert machine.trainer.seconds_before == 0.0


@task("toysnap.plain", kind="pinned")
def inner_at_one_progress(replica: Replica, *, theta: Vector, num_steps: int, progress: tuple[float, float]) -> Result:
    replica.load(theta)
    for _ in range(num_steps):
        replica.train_step(progress=progress[0])
    return Result({}, {"delta": theta - replica.params()})


@task("toysnap.short", kind="pinned")
def two_steps(replica: Replica, *, theta: Vector, num_steps: int, progress: tuple[float, float]) -> Result:
    replica.load(theta)
    for _ in range(2):
        replica.train_step(progress=progress[0])
    return Result({}, {})


def test_a_task_that_ends_before_the_snapshot_leaves_its_own_state(tmp_path: Path) -> None:
    spec = spec_of(gpt2())
    plain = Machine(tmp_path / "plain", spec, every_steps=0)
    plain.do(two_steps, lease(0))
    machine = Machine(tmp_path / "killed", spec)
    with pytest.raises(Killed):
        machine.do(inner_at_one_progress, lease(0), Fed(dies_after=5))
    machine.restart()
    machine.do(two_steps, lease(0))
    (expected, facts), (found, others) = (m.folder.load_version("r0") for m in (plain, machine))
    assert facts == others and facts["num_steps"] == 2
    assert all(torch.equal(expected[name], found[name]) for name in expected)


# Stopping


def suspend_in_step_four(machine: Machine) -> None:
    step = machine.replica.on_step

    def stop(info: Any) -> None:
        step(info)
        if machine.num_computed == 4:
            machine.trainer.suspend()

    machine.replica.on_step = stop


def test_a_task_that_is_suspended_goes_on_in_the_same_process(tmp_path: Path) -> None:
    spec = spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, inner, False)
    machine = Machine(tmp_path / "held", spec, every_steps=0)
    machine.do(inner, lease(0))
    machine.num_computed = 0
    suspend_in_step_four(machine)
    with pytest.raises(TaskSuspended):
        machine.do(inner, lease(1))
    assert machine.num_computed == 4
    got = machine.do(inner, lease(1))
    assert_same(got, machine, expected)
    assert machine.num_computed == num_steps


def test_a_task_of_which_no_snapshot_can_be_taken_starts_again_after_it_was_suspended(tmp_path: Path) -> None:
    function, spec = meddling("evaluate", 1), spec_of(gpt2())
    expected = undisturbed(tmp_path, spec, function, False)
    machine = Machine(tmp_path / "held", spec)
    machine.do(function, lease(0))
    machine.num_computed = 0
    suspend_in_step_four(machine)
    with pytest.raises(TaskCancelled):
        machine.do(function, lease(1))
    got = machine.do(function, lease(1))
    assert_same(got, machine, expected)
    assert machine.num_computed == 4 + num_steps


def test_stopping_after_so_many_steps(tmp_path: Path) -> None:
    machine = Machine(tmp_path, spec_of(gpt2()), every_steps=2)
    name = snapshots.task_name(lease(0))
    for expected in (2, 4, 6):
        with pytest.raises(TaskSuspended):
            machine.do(inner, lease(0), stop_after=expected)
        assert machine.folder.snapshot.num_steps(name) == expected
    machine.do(inner, lease(0))
    assert machine.num_computed == num_steps


# How often


def test_snapshots_cost_two_percent_at_most() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    taken: list[float] = []

    def save() -> None:
        taken.append(now[0])
        now[0] += 0.5

    while now[0] < 500.0:
        now[0] += 1.0
        if pace.stepped():
            pace.timed(save)
    assert taken[:3] == [5.0, 5.5 + 25.0, 5.5 + 25.0 + 25.5]
    assert 0.5 * len(taken) <= 0.0205 * 500.0


def test_a_setting_forces_them() -> None:
    pace = Pace(lambda: 0.0, every_steps=4)
    due = []
    for step in range(1, 13):
        if pace.stepped():
            due.append(step)
            pace.timed(lambda: None)
    assert due == [4, 8, 12]


def test_the_replica_in_between_has_all_that_the_device_s_own_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path, spec_of(gpt2()))
    replica = machine.trainer.prepare(lease(0), Fed(), pinned=True)
    assert isinstance(replica, ResumableReplica)
    assert replica.layout == machine.replica.layout
    assert replica.is_plain
    assert replica.module is machine.replica.module  # pyright: ignore[reportAttributeAccessIssue]
    assert not replica.is_plain
    with pytest.raises(AssertionError, match="only a session has a mailbox"):
        _ = replica.mailbox
    with pytest.raises(AttributeError):
        _ = replica.nothing  # pyright: ignore[reportAttributeAccessIssue]
