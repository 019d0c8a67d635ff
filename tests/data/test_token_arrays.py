from pathlib import Path

import numpy as np
import pytest

from potluck.data.token_arrays import check_vocabulary, document_stops, highest_token, open_tokens, token_type_for
from potluck.types.errors import DataError


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32", "int64"])
def test_npy_arrays_are_mapped(tmp_path: Path, kind: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=kind))
    tokens = open_tokens(tmp_path / "a.npy")
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == list(range(10))


def test_raw_files_are_little_endian_of_the_given_type(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x02\x01")
    assert open_tokens(tmp_path / "a.bin").tolist() == [1, 258]
    assert open_tokens(tmp_path / "a.bin", "uint32").tolist() == [1 + (258 << 16)]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.bin", b"", "holds no tokens: it is empty"),
        ("a.bin", b"abc", "is 3 bytes long and uint16 tokens need a multiple of 2"),
        ("a.npy", b"\x93NUMPY\x01\x00", "is not a whole .npy array"),
        ("a.npy", b"text", "is not a whole .npy array"),
        ("none.npy", None, "cannot be read: No such file"),
    ],
)
def test_files_that_hold_no_tokens_are_errors(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_tokens(tmp_path / name)


def test_arrays_of_another_shape_or_type_are_errors(tmp_path: Path) -> None:
    for array in (np.zeros((2, 2), np.uint16), np.zeros(4), np.array([None, 1])):
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(DataError, match=r"a\.npy"):
            open_tokens(tmp_path / "a.npy")


def test_a_cut_array_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000, dtype=np.uint16))
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data[:-100])
    with pytest.raises(DataError, match=r"is not a whole \.npy array"):
        open_tokens(tmp_path / "a.npy")


def test_tokens_out_of_range_are_errors() -> None:
    path = Path("a.npy")
    assert highest_token(path, np.array([3, 9, 1])) == 9
    check_vocabulary(path, 9, 10)
    with pytest.raises(DataError, match="holds token 9 and the vocabulary has 9 entries"):
        check_vocabulary(path, 9, 9)
    with pytest.raises(DataError, match="holds token -4 at position 1"):
        highest_token(path, np.array([3, -4]))


def test_documents_end_at_the_end_of_text_token_or_by_blocks() -> None:
    tokens = np.array([5, 0, 6, 7, 0, 8])
    assert document_stops(tokens, 0, 2).tolist() == [2, 5, 6]
    assert document_stops(tokens, 9, 2).tolist() == [2, 4, 6]
    assert document_stops(tokens, 9, 4).tolist() == [4, 6]
    assert document_stops(np.array([1, 0]), 0, 4).tolist() == [2]


def test_the_smallest_type_that_holds_the_vocabulary() -> None:
    assert token_type_for(65536) == np.uint16
    assert token_type_for(65537) == np.int32
