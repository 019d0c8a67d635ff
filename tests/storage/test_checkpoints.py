import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from potluck.storage import checkpoints as module
from potluck.storage.checkpoints import Checkpoints
from potluck.storage.params import ParamStore
from potluck.types.errors import CorruptError, ResourceError
from potluck.types.params import Params

weights = torch.arange(1000, dtype=torch.float32) / 7


@pytest.fixture
def params(tmp_path: Path) -> ParamStore:
    return ParamStore(tmp_path / "params", fragment_numel=300, slice_numel=128)


@pytest.fixture
def checkpoints(tmp_path: Path, params: ParamStore) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", params, keep=2)


def save(checkpoints: Checkpoints, params: ParamStore, round: int, *, prune: bool = True) -> dict[str, Params]:
    handles = {
        "params": params.create(f"theta-{round}", weights + round),
        "momentum": params.create(f"m-{round}", weights * round),
    }
    checkpoints.save(f"round-{round:06d}", {"state": {"round": round}}, handles, prune=prune)
    return handles


def loaded(checkpoints: Checkpoints, params: ParamStore) -> tuple[Any, torch.Tensor, torch.Tensor]:
    found = checkpoints.load_latest()
    assert found is not None
    manifest, handles = found
    return manifest["state"]["round"], params.read(handles["params"]), params.read(handles["momentum"])


def test_what_was_saved_comes_back_bit_for_bit_in_another_store(
    checkpoints: Checkpoints, params: ParamStore, tmp_path: Path
) -> None:
    save(checkpoints, params, 3)
    other = ParamStore(tmp_path / "other", fragment_numel=77)
    again = Checkpoints(tmp_path / "checkpoints", other)
    round, theta, momentum = loaded(again, other)
    assert round == 3
    assert torch.equal(theta, weights + 3)
    assert torch.equal(momentum, weights * 3)
    assert again.skipped == ()


def test_a_vector_opens_with_safetensors(checkpoints: Checkpoints, params: ParamStore, tmp_path: Path) -> None:
    save(checkpoints, params, 1)
    tensors = load_file(tmp_path / "checkpoints" / "round-000001" / "params.safetensors")
    assert list(tensors) == ["values"]
    assert torch.equal(tensors["values"], weights + 1)


def test_an_empty_vector_comes_back(checkpoints: Checkpoints, params: ParamStore) -> None:
    checkpoints.save("round-0", {}, {"nothing": params.create("nothing", torch.empty(0))})
    found = checkpoints.load_latest()
    assert found is not None
    assert params.read(found[1]["nothing"]).shape == (0,)


def test_all_are_kept_until_one_is_saved_that_removes_others(checkpoints: Checkpoints, params: ParamStore) -> None:
    for round in range(1, 5):
        save(checkpoints, params, round, prune=False)
    assert len(checkpoints.names()) == 4
    save(checkpoints, params, 5)
    assert checkpoints.names() == ("round-000004", "round-000005")


def test_the_last_ones_are_kept(checkpoints: Checkpoints, params: ParamStore) -> None:
    for round in (1, 2, 10, 3):  # 3 after a roll-back: the newest is the one saved last
        save(checkpoints, params, round)
    assert checkpoints.names() == ("round-000010", "round-000003")
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["round-000003", "round-000010"]
    assert loaded(checkpoints, params)[0] == 3


def test_saving_a_round_again_replaces_it(checkpoints: Checkpoints, params: ParamStore) -> None:
    save(checkpoints, params, 5)
    checkpoints.save("round-000005", {"state": {"round": 55}}, {})
    found = checkpoints.load_latest()
    assert found == ({"state": {"round": 55}}, {})
    assert [p.name for p in checkpoints.folder.iterdir()] == ["round-000005"]


def cut_file(folder: Path) -> None:
    path = folder / "params.safetensors"
    os.truncate(path, path.stat().st_size - 4)


def flip_bit(folder: Path) -> None:
    data = bytearray((folder / "momentum.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "momentum.safetensors").write_bytes(data)


def flip_header(folder: Path) -> None:
    data = bytearray((folder / "momentum.safetensors").read_bytes())
    data[0] ^= 8
    (folder / "momentum.safetensors").write_bytes(data)


def cut_manifest(folder: Path) -> None:
    path = folder / "state.json"
    os.truncate(path, path.stat().st_size // 2)


def remove_file(folder: Path) -> None:
    (folder / "params.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "state.json").unlink()


def climb_out(folder: Path) -> None:
    value = json.loads((folder / "state.json").read_text())
    value["files"]["params"]["file"] = "../../secret.safetensors"
    (folder / "state.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_file, "has 4076 bytes and 4080"),
        (flip_bit, "does not match its digest"),
        (flip_header, "does not start like"),
        (cut_manifest, "cannot be read"),
        (remove_file, "is missing"),
        (remove_manifest, "cannot be read"),
        (climb_out, "does not say file"),
    ],
)
def test_a_damaged_one_is_passed_over_with_a_reason(
    checkpoints: Checkpoints, params: ParamStore, damage: Any, reason: str
) -> None:
    save(checkpoints, params, 1)
    save(checkpoints, params, 2)
    damage(checkpoints.folder / "round-000002")
    round, theta, momentum = loaded(checkpoints, params)
    assert round == 1
    assert torch.equal(theta, weights + 1) and torch.equal(momentum, weights)
    assert len(checkpoints.skipped) == 1
    assert checkpoints.skipped[0].startswith("checkpoint round-000002 was passed over:")
    assert reason in checkpoints.skipped[0]
    assert not list(params.root.glob("*.tmp"))


def test_a_good_one_is_kept_while_newer_ones_are_damaged(checkpoints: Checkpoints, params: ParamStore) -> None:
    for round in (1, 2):
        save(checkpoints, params, round)
    cut_file(checkpoints.folder / "round-000002")
    save(checkpoints, params, 3)
    assert checkpoints.names() == ("round-000001", "round-000003")


def test_nothing_there_is_none(checkpoints: Checkpoints) -> None:
    assert checkpoints.load_latest() is None
    (checkpoints.folder / "round-000001").mkdir()
    assert checkpoints.load_latest() is None
    assert "round-000001" in checkpoints.skipped[0]


def test_too_little_disk_is_said_before_anything_is_written(
    checkpoints: Checkpoints, params: ParamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, params, 1)
    monkeypatch.setattr("potluck.types.disk.free_bytes", lambda _: 1000)
    with pytest.raises(ResourceError, match=r"checkpoints has 1,000 bytes free and 1,056,576 bytes are needed"):
        save(checkpoints, params, 2)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["round-000001"]


def test_a_save_that_fails_leaves_the_last_one(
    checkpoints: Checkpoints, params: ParamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = save(checkpoints, params, 1)
    params.path(handles["momentum"].fragments[1]).unlink()
    with pytest.raises(CorruptError):
        checkpoints.save("round-000001", {}, handles)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["round-000001"]
    assert loaded(checkpoints, params)[0] == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    checkpoints: Checkpoints, params: ParamStore, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, params, 1)
    real_replace, real_fsync = Path.replace, os.fsync
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls > moment:
            raise Killed

    def replace(path: Path, target: Path) -> Path:
        step()
        return real_replace(path, target)

    def fsync(descriptor: int) -> None:
        step()
        real_fsync(descriptor)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(module.Path, "replace", replace)
        patch.setattr(module.os, "fsync", fsync)
        patch.setattr(module.shutil, "rmtree", nothing)  # a kill cleans nothing up
        with pytest.raises(Killed):
            checkpoints.save("round-000001", {"state": {"round": 100}}, {"params": params.zeros("z", 1000)})
    again = Checkpoints(checkpoints.folder, params)
    found = again.load_latest()
    assert found is not None
    assert found[0]["state"]["round"] in (1, 100)
    expected = weights + 1 if found[0]["state"]["round"] == 1 else torch.zeros(1000)
    assert torch.equal(params.read(found[1]["params"]), expected)
    assert [p.name for p in checkpoints.folder.iterdir()] == ["round-000001"]


def test_checkpoints_that_are_no_good_are_removed_but_never_the_last_one(tmp_path: Path, params: ParamStore) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", params, keep=4)
    for round in (1, 2, 3, 4):
        save(checkpoints, params, round)
    checkpoints.remove_where(lambda content: content["state"]["round"] > 2)
    assert checkpoints.names() == ("round-000001", "round-000002")
    checkpoints.remove_where(lambda content: True)
    assert checkpoints.names() == ("round-000001",)
