import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.data.config import ReadOptions
from potluck.data.manifest import Manifest, is_safe_name, listed_data, make_manifest
from potluck.data.tokenizer import train_bpe
from potluck.types.errors import DataError

OPTIONS = ReadOptions(seq_len=4, validation=0.2)
FILE = {"path": "a.npy", "digest": "sha256:" + "0" * 64, "bytes": 10, "num_tokens": 100}


def arrays(root: Path, sizes: dict[str, int]) -> list[Path]:
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / name, np.arange(size, dtype=np.uint16))
    return [root / name for name in sizes]


def test_a_manifest_is_made_saved_and_read(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, arrays(tmp_path, {"b/x.npy": 50, "a.npy": 20}), options=OPTIONS)
    assert [(f.path, f.num_tokens) for f in manifest.files] == [("a.npy", 20), ("b/x.npy", 50)]
    assert manifest.files[0].bytes == (tmp_path / "a.npy").stat().st_size
    assert manifest.tokenizer == ""
    manifest.save(tmp_path / "lines.jsonl")
    (tmp_path / "whole.json").write_text(manifest.model_dump_json())
    assert Manifest.load(tmp_path / "lines.jsonl") == Manifest.load(tmp_path / "whole.json") == manifest


def test_text_is_counted_with_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello hello")
    with pytest.raises(DataError, match="counting its tokens needs a tokenizer"):
        make_manifest(tmp_path, [tmp_path / "a.txt"], options=OPTIONS)
    tokenizer = train_bpe(iter(["hello"]), 257, tmp_path / "tok")
    manifest = make_manifest(tmp_path, [tmp_path / "a.txt"], options=OPTIONS, tokenizer=tokenizer)
    assert manifest.files[0].num_tokens == len(tokenizer.encode(["hello hello"])[0]) + 1
    assert manifest.tokenizer == tokenizer.digest()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"files": []}, "at least 1 item"),
        ({"files": [FILE], "extra": 1}, "extra: Extra inputs"),
        ({"version": 2, "files": [FILE]}, "version"),
        ({"files": [{**FILE, "path": "../a"}]}, r"files\.0\.path: .*stay within its folder"),
        ({"files": [{**FILE, "path": "/etc/passwd"}]}, "stay within its folder"),
        ({"files": [{**FILE, "path": "C:\\x"}]}, "stay within its folder"),
        ({"files": [{**FILE, "digest": "zzz"}]}, "algorithm:hex"),
        ({"files": [{**FILE, "num_tokens": -1}]}, r"files\.0\.num_tokens"),
        ({"files": [{**FILE, "num_tokens": 1 << 60}]}, r"files\.0\.num_tokens"),
        ({"files": [FILE, FILE]}, r"lists a\.npy twice"),
        ({"files": [{"path": "a"}]}, r"files\.0\.digest: Field required"),
        ({"files": 3}, "files"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, value: dict[str, Any], message: str) -> None:
    (tmp_path / "m.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        Manifest.load(tmp_path / "m.json")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps({"version": 1}) + "\n" + json.dumps(FILE) + '\n{"path": \n')
    with pytest.raises(DataError, match=r"m\.jsonl:3: not JSON"):
        Manifest.load(tmp_path / "m.jsonl")
    (tmp_path / "m.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not text at byte offset 0"):
        Manifest.load(tmp_path / "m.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        Manifest.load(tmp_path / "none.jsonl")


def test_names_that_leave_the_folder_are_not_safe() -> None:
    assert is_safe_name("a/b-1_2.npy")
    for name in ("", ".", "a//b", "a/../b", "/a", "a\\b", "a:b", "a\0b", "../a", "x" * 501, "a/"):
        assert not is_safe_name(name), name


def test_files_are_divided_whole_and_every_tail_is_counted(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, arrays(tmp_path, {f"{i}.npy": 43 for i in range(10)}), options=OPTIONS)
    data = listed_data(manifest, OPTIONS, seed=1)
    assert len(data.shards) == 8 and len(data.validation) == 2
    names = [s.name for s in (*data.shards, *data.validation)]
    assert sorted(names) == [f"{i}.npy" for i in range(10)]
    assert all(s.num_sequences == 10 and s.digest.startswith("blake3:") for s in data.shards)
    assert data.num_dropped_tokens == 10 * 2
    assert listed_data(manifest, OPTIONS, seed=1) == data != listed_data(manifest, OPTIONS, seed=2)


def test_marked_files_are_held_out() -> None:
    marked = {**FILE, "path": "v.npy", "split": "validation"}
    data = listed_data(Manifest.model_validate({"files": [FILE, marked]}), OPTIONS, seed=1)
    assert [s.name for s in data.shards] == ["a.npy"] and [s.name for s in data.validation] == ["v.npy"]


def test_of_few_files_the_smallest_is_held_out() -> None:
    small = {**FILE, "path": "small.npy", "num_tokens": 90}
    data = listed_data(Manifest.model_validate({"files": [small, FILE]}), OPTIONS, seed=1)
    assert [s.name for s in data.validation] == ["small.npy"]
    with pytest.raises(DataError, match="lists 1 files and none for training"):
        listed_data(Manifest.model_validate({"files": [FILE]}), OPTIONS, seed=1)
