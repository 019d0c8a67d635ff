import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck.codecs.base import Codec, codec, codec_names
from potluck.codecs.elementwise import Elementwise
from potluck.types.errors import InvalidUpdate, RecipeError

F32 = npt.NDArray[np.float32]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 300), elements=finite)
names = pytest.mark.parametrize("name", codec_names())


def encoded(which: Codec, values: F32) -> list[npt.NDArray[np.uint8]]:
    buffers = [np.ascontiguousarray(b).reshape(-1).view(np.uint8) for b in which.encode(values, values.shape)]
    assert tuple(map(len, buffers)) == which.buffer_sizes(values.shape)
    return buffers


def round_trip(name: str, values: F32) -> F32:
    out = np.full(len(values), np.nan, np.float32)
    codec(name).decode(encoded(codec(name), values), values.shape, 0, out)
    return out


def long_vector(numel: int = 150_000) -> F32:
    rng = np.random.default_rng(7)
    return (rng.standard_normal(numel) * np.exp(rng.normal(0, 4, numel))).astype(np.float32)


def test_every_codec_is_known_by_its_name() -> None:
    assert codec_names() == ("fp32", "bf16", "int8")
    assert [codec(name).name for name in codec_names()] == list(codec_names())


def test_an_unknown_codec_is_a_sentence() -> None:
    with pytest.raises(RecipeError, match=r"^'in8' is not a codec; did you mean 'int8'\?$"):
        codec("in8")
    with pytest.raises(RecipeError, match="there are bf16, fp32, int8"):
        codec("gzip")


@given(vectors)
def test_fp32_is_exact(values: F32) -> None:
    assert round_trip("fp32", values).tobytes() == values.tobytes()


@given(vectors)
def test_bf16_is_the_nearest_with_eight_bits(values: F32) -> None:
    decoded = round_trip("bf16", values).astype(np.float64)
    wide = values.astype(np.float64)
    largest = float(np.uint32(0x7F7F0000).view(np.float32))
    bound = np.where(np.abs(wide) > largest, np.abs(wide) - largest, np.abs(wide) * 2.0**-8 + 2.0**-134)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - wide) <= bound).all()


@given(vectors)
def test_bf16_equals_pytorch_where_that_is_finite(values: F32) -> None:
    import torch

    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    stays = np.isfinite(expected)
    assert round_trip("bf16", values)[stays].tobytes() == expected[stays].tobytes()


@given(vectors)
def test_int8_is_within_half_a_level(values: F32) -> None:
    decoded = round_trip("int8", values).astype(np.float64)
    largest = float(np.abs(values).max(initial=0))
    bound = largest / 254 * (1 + 1e-6) if largest > 1.6e-36 else largest
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - values) <= bound).all()


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 65536, 65537, 70_000, 150_000])
def test_int8_scales_belong_to_their_blocks(numel: int) -> None:
    values = long_vector(numel)
    decoded = round_trip("int8", values)
    for start in range(0, numel, 4096):
        block, back = values[start : start + 4096], decoded[start : start + 4096]
        assert np.abs(back - block).max() <= np.abs(block).max() / 254 * (1 + 1e-6)
        assert np.abs(back).max() == pytest.approx(np.abs(block).max(), rel=1e-6)


def test_sizes_follow_from_the_number_of_elements() -> None:
    assert codec("fp32").estimate_bytes(10_000) == 40_000
    assert codec("bf16").estimate_bytes(10_000) == 20_000
    assert codec("int8").estimate_bytes(10_000) == 10_000 + 3 * 4
    assert codec("int8").estimate_bytes(1 << 24) / (4 << 24) == pytest.approx(0.2502, abs=1e-4)
    assert [codec(name).estimate_bytes(0) for name in codec_names()] == [0, 0, 0]


@names
@given(values=vectors, weight=st.floats(2.0**-10, 1000, width=32), data=st.data())
def test_accumulate_is_decode_then_add(name: str, values: F32, weight: float, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    values = np.clip(values, -1e30, 1e30).astype(np.float32)
    buffers, which = encoded(codec(name), values), codec(name)
    into = np.linspace(-1, 1, stop - start, dtype=np.float32)
    expected = into + np.float32(weight) * round_trip(name, values)[start:stop]
    which.accumulate(buffers, values.shape, start, into, weight)
    assert into.tobytes() == expected.tobytes()


@names
def test_slices_of_a_long_vector_decode_to_the_same_bits(name: str) -> None:
    values = long_vector()
    whole = round_trip(name, values)
    buffers = encoded(codec(name), values)
    for start, stop in [(0, 1), (4095, 4097), (4000, 70_001), (65_535, 150_000), (149_999, 150_000), (7, 7)]:
        out = np.empty(stop - start, np.float32)
        codec(name).decode(buffers, values.shape, start, out)
        assert out.tobytes() == whole[start:stop].tobytes()
        into = np.ones(stop - start, np.float32)
        codec(name).accumulate(buffers, values.shape, start, into, 1.0)
        assert into.tobytes() == (1 + whole[start:stop]).tobytes()


@names
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4096, 69_999])
def test_what_is_not_finite_is_refused(name: str, bad: float, place: int) -> None:
    values = np.zeros(70_000, np.float32)
    values[place] = bad
    with pytest.raises(InvalidUpdate, match=f"holds NaN or infinity, which {name} does not send"):
        codec(name).encode(values, values.shape)


@names
def test_zeros_stay_zeros(name: str) -> None:
    assert round_trip(name, np.zeros(5000, np.float32)).tobytes() == bytes(20_000)


@names
def test_a_scalar_and_an_empty_tensor(name: str) -> None:
    for shape, numel in [((), 1), ((0, 7), 0), ((1, 1), 1)]:
        values = np.full(numel, -3.0, np.float32)
        buffers = codec(name).encode(values, shape)
        assert tuple(b.nbytes for b in buffers) == codec(name).buffer_sizes(shape)
        out = np.empty(numel, np.float32)
        codec(name).decode([b.reshape(-1).view(np.uint8) for b in buffers], shape, 0, out)
        assert out == pytest.approx(values, rel=1e-6)


def test_the_largest_and_the_smallest_numbers() -> None:
    top = np.finfo(np.float32).max
    values = np.array([top, -top, top / 2], np.float32)
    assert round_trip("fp32", values).tobytes() == values.tobytes()
    for name, tolerance in [("bf16", 2**-8), ("int8", 1 / 250)]:
        decoded = round_trip(name, values)
        assert np.isfinite(decoded).all()
        assert np.abs(decoded.astype(np.float64) - values).max() <= top * tolerance
    tiny = np.array([1e-45, -3e-39], np.float32)
    assert round_trip("fp32", tiny).tobytes() == tiny.tobytes()
    assert round_trip("int8", tiny).tobytes() == bytes(8)
    assert (round_trip("int8", np.array([1.6e-36, 0], np.float32)) > 0).tolist() == [True, False]


golden_values = np.array([0.0, 1.0, -1.0, 127.0, 0.49, -63.5, 3.14159274, 1e-3], np.float32)
golden = {
    "fp32": [golden_values.astype("<f4").tobytes().hex()],
    "bf16": ["0000803f80bffe42fb3e7ec249408 33a".replace(" ", "")],
    "int8": ["0000803f", "0001ff7f00c00300"],
}


@names
def test_the_bytes_of_each_codec_stay_as_they_are(name: str) -> None:
    """Stored models and updates are read by later versions."""
    assert [b.tobytes().hex() for b in encoded(codec(name), golden_values)] == golden[name]


def test_codecs_meet_the_protocol() -> None:
    for name in codec_names():
        which: Codec = codec(name)
        assert isinstance(which, Elementwise)
