import struct

import pytest

from potluck.protocol.frames import CHUNK_BYTES, pack_chunk, pack_data, unpack_chunk, unpack_data
from potluck.types.errors import CorruptError


def test_a_chunk_is_header_and_bytes() -> None:
    frame = pack_chunk(7, b"abc")
    assert frame == struct.pack("<QIQ", 7, 3, 0x78AF5F94892F3950) + b"abc"  # XXH3 of abc
    offset, data = unpack_chunk(frame)
    assert (offset, bytes(data)) == (7, b"abc")


@pytest.mark.parametrize("position", [0, 8, 12, 20, 22])
def test_a_flipped_bit_in_a_chunk_is_seen(position: int) -> None:
    frame = bytearray(pack_chunk(0, b"abc"))
    frame[position] ^= 1
    if position == 0:  # the offset is not covered by the checksum: the receiver knows which offset it waits for
        assert unpack_chunk(bytes(frame))[0] == 1
    else:
        with pytest.raises(CorruptError):
            unpack_chunk(bytes(frame))


@pytest.mark.parametrize("frame", [b"", b"x" * 19, pack_chunk(0, b"abc")[:-1], pack_chunk(0, b"abc") + b"d"])
def test_a_cut_or_padded_chunk_is_refused(frame: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack_chunk(frame)


def test_a_chunk_beyond_the_limit_is_refused() -> None:
    with pytest.raises(CorruptError):
        unpack_chunk(pack_chunk(0, bytes(2 * CHUNK_BYTES + 1)))


def test_a_data_frame_round_trips() -> None:
    head, data = unpack_data(pack_data({"lease": [1, 2, "k"], "offset": 0, "total": 3}, b"xyz"))
    assert head == {"lease": [1, 2, "k"], "offset": 0, "total": 3}
    assert bytes(data) == b"xyz"


@pytest.mark.parametrize(
    "frame",
    [b"", b"\1\0\0", struct.pack("<I", 9) + b"{}", struct.pack("<I", 2) + b"[]", struct.pack("<I", 2) + b"{x"],
)
def test_a_data_frame_of_nonsense_is_refused(frame: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack_data(frame)
