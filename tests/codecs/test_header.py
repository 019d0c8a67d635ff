import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.codecs.bundle import Bundle, pack_tensors, unpack_tensors
from potluck.codecs.header import MAGIC, MAX_HEADER_BYTES, MAX_TENSORS
from potluck.types.errors import CorruptError


def bundle(rows: Any, data: bytes = b"", *, key: str = "tensors") -> bytes:
    return framed(json.dumps({key: rows}).encode(), data)


def framed(text: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = text.ljust(-(-(12 + len(text)) // 64) * 64 - 12)
    return MAGIC + (len(text) if length is None else length).to_bytes(4, "little") + text + data


def row(
    name: Any = "t", dtype: Any = "float32", shape: Any = (2,), codec: Any = "raw", buffers: Any = ((0, 8),)
) -> Any:
    return [name, dtype, shape, codec, buffers]


good = bundle([row()], bytes(8))


def test_what_is_made_by_hand_here_is_what_is_read() -> None:
    assert torch.equal(unpack_tensors(good)["t"], torch.zeros(2))
    assert unpack_tensors(bundle([])) == {}


hostile = {
    "nothing": b"",
    "a short file": good[:11],
    "another magic": b"POTLUCK\x02" + good[8:],
    "a header beyond the file": framed(b"", length=1 << 20),
    "a header beyond the limit": framed(b"", bytes(1 << 10), length=MAX_HEADER_BYTES + 52),
    "a header of no aligned length": MAGIC + (5).to_bytes(4, "little") + b"{    " + bytes(8),
    "not JSON": framed(b"\x80\x81{"),
    "deep nesting": framed(b"[" * 200_000),
    "not an object": framed(b"[]"),
    "another key": bundle([], key="tensor"),
    "more keys": framed(b'{"tensors": [], "more": 1}'),
    "not a list": bundle({}),
    "too many tensors": bundle([1] * (MAX_TENSORS + 1)),
    "too many brackets": framed(b"[" * (MAX_TENSORS * 5 + 1)),
    "a row that is none": bundle([1]),
    "a short row": bundle([row()[:4]], bytes(8)),
    "a name that is none": bundle([row(name=3)], bytes(8)),
    "an empty name": bundle([row(name="")], bytes(8)),
    "a long name": bundle([row(name="n" * 513)], bytes(8)),
    "a name with a newline": bundle([row(name="a\nb")], bytes(8)),
    "a lone surrogate": bundle([row(name="\ud800")], bytes(8)),
    "a name twice": bundle([row(), row(buffers=[[64, 8]])], bytes(72)),
    "another dtype": bundle([row(dtype="bool", buffers=[[0, 2]])], bytes(2)),
    "object as dtype": bundle([row(dtype="object")], bytes(8)),
    "an unknown codec": bundle([row(codec="zip")], bytes(8)),
    "a codec's name beyond reason": bundle([row(codec="int8" + "+zstd" * 20)], bytes(8)),
    "a lossless buffer that is too large": bundle([row(codec="fp32+zstd", buffers=[[0, 13]])], bytes(13)),
    "a lossless buffer below nothing": bundle([row(codec="fp32+zstd", buffers=[[0, -1]])], b""),
    "two lossless buffers": bundle([row(codec="fp32+zstd", buffers=[[0, 4], [64, 4]])], bytes(68)),
    "a codec of another dtype": bundle([row(codec="fp32", dtype="int32")], bytes(8)),
    "a negative shape": bundle([row(shape=[-1, -2])], bytes(8)),
    "a shape of floats": bundle([row(shape=[2.0])], bytes(8)),
    "a shape of truth": bundle([row(shape=[True, 2])], bytes(8)),
    "NaN as shape": framed(b'{"tensors": [["t", "float32", [NaN], "raw", [[0, 8]]]]}', bytes(8)),
    "a huge shape": bundle([row(shape=[1 << 40, 1 << 40], buffers=[[0, 1 << 82]])], bytes(8)),
    "a huge shape of nothing": bundle([row(shape=[0, 1 << 40, 1 << 40], buffers=[[0, 0]])]),
    "a huge number": framed(b'{"tensors": [["t", "float32", [' + b"9" * 5000 + b'], "raw", [[0, 8]]]]}', bytes(8)),
    "many dimensions": bundle([row(shape=[1] * 16 + [2])], bytes(8)),
    "no buffer": bundle([row(buffers=[])], bytes(8)),
    "a buffer too many": bundle([row(buffers=[[0, 8], [64, 0]])], bytes(64)),
    "a buffer of another size": bundle([row(buffers=[[0, 4]])], bytes(4)),
    "a buffer that is none": bundle([row(buffers=[8])], bytes(8)),
    "a buffer without size": bundle([row(buffers=[[0]])], bytes(8)),
    "a negative offset": bundle([row(buffers=[[-8, 8]])], bytes(8)),
    "an offset beyond": bundle([row(buffers=[[64, 8]])], bytes(72)),
    "an unaligned offset": bundle([row(), row(name="u", buffers=[[8, 8]])], bytes(16)),
    "an overlap": bundle([row(), row(name="u", buffers=[[0, 8]])], bytes(8)),
    "an offset of truth": bundle([row(buffers=[[False, 8]])], bytes(8)),
    "bytes after the end": good + b"\0",
    "bytes missing at the end": good[:-1],
}


@pytest.mark.parametrize("what", hostile)
def test_a_hostile_bundle_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="a packed bundle "):
        unpack_tensors(hostile[what])
    (tmp_path / "object").write_bytes(hostile[what])
    with pytest.raises(CorruptError, match="object "):
        Bundle.open(tmp_path / "object")


@settings(max_examples=300)
@given(st.data())
def test_a_bundle_with_bytes_changed_is_refused_or_read_but_never_breaks(data: st.DataObject) -> None:
    packed = bytearray(pack_tensors({"a": torch.arange(5.0), "b/c": torch.ones(2, 3, dtype=torch.int16)}))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, 160))] = data.draw(st.integers(0, 255))
    try:
        back = unpack_tensors(packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed)
    except CorruptError:
        return
    assert sum(t.numel() * t.element_size() for t in back.values()) <= len(packed)


def test_a_header_that_would_not_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"needs a header of \d+ bytes"):
        pack_tensors({f"{'n' * 400}{i}": torch.empty(0) for i in range(20_000)})
