"""`potluck manifest`: what it lists is what workers find."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.cli.manifests import write_manifest
from potluck.data.manifest import Manifest
from potluck.storage.digest import digest_file
from potluck.types.errors import DataError


def test_arrays_below_a_folder_are_listed_without_a_tokenizer(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "corpus" / "manifest.json"
    for name, count in (("b/x.npy", 50), ("a.npy", 20), (".hidden/y.npy", 5)):
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(corpus / name, np.arange(count, dtype=np.uint16), allow_pickle=False)
    for _ in range(2):  # a second time it does not list itself
        result = CliRunner().invoke(app, ["manifest", str(corpus), "--out", str(out)])
        assert result.exit_code == 0
    listed = Manifest.load(out)
    assert [(f.path, f.num_tokens) for f in listed.files] == [("a.npy", 20), ("b/x.npy", 50)]
    assert listed.files[1].digest == digest_file(corpus / "b" / "x.npy")


def test_a_folder_is_named_from_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    np.save(tmp_path / "corpus" / "a.npy", np.arange(20, dtype=np.uint16), allow_pickle=False)
    monkeypatch.chdir(tmp_path)
    write_manifest(Path("corpus"), Path("manifest.json"), tokenizer=None, token_type="uint16")
    assert [f.path for f in Manifest.load(tmp_path / "manifest.json").files] == ["a.npy"]
    with pytest.raises(DataError, match=r"^corpus cannot be written .*; give another --out$"):
        write_manifest(Path("corpus"), Path("corpus"), tokenizer=None, token_type="uint16")


def test_what_cannot_be_listed_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(DataError, match=r"a\.txt is text and counting its tokens needs a tokenizer"):
        write_manifest(tmp_path, tmp_path / "out", tokenizer=None, token_type="uint16")
    with pytest.raises(DataError, match="'int8' is no type of tokens; choose one of uint16"):
        write_manifest(tmp_path, tmp_path / "out", tokenizer=None, token_type="int8")
    with pytest.raises(DataError, match="is not a folder"):
        write_manifest(tmp_path / "a.txt", tmp_path / "out", tokenizer=None, token_type="uint16")
