"""Inline tensors: frames go together again, and little that claims to be much is not believed."""

from __future__ import annotations

import pytest
import torch

from potluck.codecs.bundle import pack_tensors, unpack_tensors
from potluck.codecs.header import make_header
from potluck.transport.inline import MAX_BUNDLE_BYTES, Assembler, frames
from potluck.types.errors import CorruptError

name = (3, 1024, "stage/w1")


def test_frames_go_together_again() -> None:
    sent = {"0": torch.arange(700_000, dtype=torch.float32), "1": torch.ones(3, dtype=torch.int64)}
    assembler, parts = Assembler(4 << 20), list(frames(name, pack_tensors(sent)))
    assert len(parts) == 3 and all(assembler.add(part) is None for part in parts[:-1])
    done = assembler.add(parts[-1])
    assert done is not None and done[0] == name
    back = unpack_tensors(done[1], MAX_BUNDLE_BYTES)
    assert all(torch.equal(back[key], sent[key]) for key in sent)


@pytest.mark.parametrize(
    ("codec", "shape", "limit_bytes"),
    [("powersgd(1)", (20_000, 20_000), 1 << 40), ("topk(0.0244%)+2bit", (1 << 28,), 1 << 40), ("1bit", (4096,), 4096)],
)
def test_little_that_claims_to_be_much_is_refused(codec: str, shape: tuple[int, ...], limit_bytes: int) -> None:
    """160 KB as factors of a matrix would be 1.6 GB of it."""
    header = make_header([("t", "float32", shape, codec)])
    data = header.data + bytes(header.total_bytes - len(header.data))
    with pytest.raises(CorruptError, match=r"claims \d+ (elements, which is not believed|bytes of tensors)"):
        unpack_tensors(data, limit_bytes)
