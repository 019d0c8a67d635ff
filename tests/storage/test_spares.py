"""Files that are kept to be written over: what they save must never show."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from potluck.storage.checkpoints import Checkpoints
from potluck.storage.digest import digest_bytes
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.storage.spares import Spares
from potluck.types import disk
from potluck.types.errors import CorruptError
from potluck.worker.snapshots import Snapshot
from potluck.worker.state import RunFolder

mib = 1 << 20
linux = pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="where boots are told apart")


def made(path: Path, size: int) -> Path:
    path.write_bytes(b"x" * size)
    return path


@linux
def test_a_retired_file_becomes_the_next_of_about_its_size(tmp_path: Path) -> None:
    spares = Spares(tmp_path)
    inode = made(tmp_path / "large", 8 * mib).stat().st_ino
    freed = spares.retire([tmp_path / "large", made(tmp_path / "middle", 2 * mib), made(tmp_path / "small", 100)])
    assert freed == 10 * mib + 100
    assert not spares.take(tmp_path / "new", 100 * mib)
    assert not spares.take(tmp_path / "new", mib // 2)
    assert spares.take(tmp_path / "new", 7 * mib)
    assert (tmp_path / "new").stat().st_ino == inode
    assert not spares.take(tmp_path / "newer", 7 * mib)
    assert spares.clear() == 2 * mib
    assert not list((tmp_path / "spare").iterdir())


def test_a_file_that_another_folder_has_too_is_not_written_over(tmp_path: Path) -> None:
    spares = Spares(tmp_path)
    os.link(made(tmp_path / "shared", 2 * mib), tmp_path / "theirs")
    assert spares.retire([tmp_path / "shared"]) == 2 * mib
    assert not spares.take(tmp_path / "new", 2 * mib)
    assert (tmp_path / "theirs").read_bytes() == b"x" * 2 * mib


def test_nothing_is_kept_on_a_full_disk_nor_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spares = Spares(tmp_path)
    spares.retire([made(tmp_path / "one", 2 * mib)])
    again = Spares(tmp_path)
    assert not again.take(tmp_path / "new", 2 * mib)
    assert not spares.take(tmp_path / "new", 2 * mib)  # it went under its feet
    monkeypatch.setattr("potluck.storage.spares.free_bytes", lambda _: 3 * mib)
    again.retire([made(tmp_path / "two", 2 * mib)])
    assert not again.take(tmp_path / "new", 2 * mib)


@linux
@pytest.mark.parametrize("what", ["vector", "object", "checkpoint", "snapshot", "version"])
def test_spares_go_before_a_disk_is_too_full(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something much larger than the spare is written, so that it cannot be written over."""
    params, folder = ParamStore(tmp_path / "params"), RunFolder(tmp_path / "run")
    handle = params.create("small", torch.ones(10))
    spares = params.spares if what in ("vector", "checkpoint") else folder.objects.spares
    spares.retire([made(tmp_path / "old", 2 * mib)])
    real = disk.free_bytes

    def nearly_none(path: Path) -> int:
        return 3 * mib if any(tmp_path.rglob("spare/*")) else real(path)

    for module in ("storage.spares", "types.disk"):
        monkeypatch.setattr(f"potluck.{module}.free_bytes", nearly_none)
    large = torch.ones(2 * mib)  # 8 MiB
    match what:
        case "vector":
            params.create("large", large)
        case "object":
            folder.objects.put(bytes(8 * mib))
        case "checkpoint":
            monkeypatch.setattr("potluck.storage.checkpoints._slack_bytes", 8 * mib)
            Checkpoints(tmp_path / "checkpoints", params).save("one", {}, {"params": handle})
        case "snapshot":
            snapshot = Snapshot(task="t", steps=(), num_batches=0, seconds=0.0, scalars={})
            folder.snapshot.save(snapshot, {"large": large})
        case _:
            folder.save_version("v1", {"large": large}, {})
    assert not any(tmp_path.rglob("spare/*"))


@linux
@pytest.mark.parametrize("size", [3 * mib - 7, 2 * mib, 4 * mib])
def test_an_upload_over_a_spare_holds_only_what_was_sent(tmp_path: Path, size: int) -> None:
    store = ObjectStore(tmp_path)
    store.remove(store.put(b"y" * 3 * mib))
    store.collect(lambda _: False)
    old = store.put(b"z" * 3 * mib)
    store.collect(lambda digest: digest != old)
    data = os.urandom(size)
    digest = digest_bytes(data)
    partial = store.begin(digest, size)
    assert partial.path.stat().st_size == 3 * mib
    assert partial.offset == store.arrived(digest) == 0
    partial.write(0, data[:mib])
    again = ObjectStore(tmp_path)  # after the death of the process
    assert again.arrived(digest) == mib
    rest = again.begin(digest, size)
    assert rest.offset == mib
    rest.write(mib, data[mib:])
    rest.finish()
    assert again.path(digest).read_bytes() == data


@linux
@pytest.mark.parametrize("fails", [True, False])
def test_a_spare_that_became_no_object_is_not_left_behind(tmp_path: Path, fails: bool) -> None:
    store = ObjectStore(tmp_path)
    store.put(b"z" * 3 * mib)
    store.collect(lambda _: False)
    with contextlib.suppress(CorruptError), store.scratch("version", 3 * mib) as path:
        assert path.stat().st_size == 3 * mib
        if fails:
            raise CorruptError("the version before is cut short")
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "boot"]


@linux
def test_vectors_over_spares_hold_only_what_was_written(tmp_path: Path) -> None:
    store = ParamStore(tmp_path, fragment_numel=1 << 19)
    ones = store.create("ones", torch.ones(3 << 18))
    inodes = {p.stat().st_ino for p in tmp_path.glob("*.f32")}
    store.remove_except([])
    del ones
    values = torch.arange(3 << 18, dtype=torch.float32)
    counted = store.create("counted", values)
    assert {p.stat().st_ino for p in tmp_path.glob("*.f32")} == inodes
    assert torch.equal(store.read(counted), values)
    store.remove_except([])
    assert store.read(store.zeros("zeros", 3 << 18)).count_nonzero() == 0


@linux
def test_after_a_start_of_the_machine_only_what_was_checked_or_synced_is_believed(tmp_path: Path) -> None:
    store, params = ObjectStore(tmp_path / "objects"), ParamStore(tmp_path / "params")
    good, bad = store.put(b"good"), store.put(b"bad")
    store.path(bad).write_bytes(b"old")
    handle = params.create("theta", torch.ones(10))
    synced = ParamStore(tmp_path / "synced", durable=True)
    kept = synced.create("theta", torch.ones(10))
    for folder in ("objects", "params"):
        (tmp_path / folder / "boot").write_text("another")
    store, params = ObjectStore(tmp_path / "objects"), ParamStore(tmp_path / "params")
    assert store.digests() == {good}
    with pytest.raises(CorruptError, match="is missing"):
        params.check(handle)
    ParamStore(tmp_path / "synced", durable=True).check(kept)
    assert ObjectStore(tmp_path / "objects").digests() == {good}
