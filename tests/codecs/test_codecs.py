import contextlib
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from codecs_references import F32, decode, encode_int, kept_of, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck.codecs import threads
from potluck.codecs.base import Codec, codec, codec_names
from potluck.types.errors import CorruptError, InvalidUpdate

random_ones = ("bf16(stochastic)", "fp8(stochastic)", "int8(stochastic)", "int4(stochastic)")
more = ("topk(1.5625%)+bf16", "topk(25%)+int8", "2bit+zstd", "topk(1.5625%)+2bit+zstd", "powersgd(1)+zstd", "fp32+zstd")
all_names = (*codec_names(), *random_ones, *more)
names = pytest.mark.parametrize("name", all_names)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
shapes = st.one_of(
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9), st.tuples(st.sampled_from([64, 128]), st.just(64))
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[F32, tuple[int, ...]]:
    shape = draw(shapes)
    numel = math.prod(shape)
    if numel > 800 or draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        return (rng.standard_normal(numel) * 10.0 ** rng.integers(-44, 38, numel)).astype(np.float32), shape
    return draw(hnp.arrays(np.float32, numel, elements=finite)), shape


def as_bytes(buffers: object) -> list[npt.NDArray[np.uint8]]:
    return [np.ascontiguousarray(b).reshape(-1).view(np.uint8) for b in buffers]  # type: ignore[attr-defined]


def encoded(which: Codec, values: F32, shape: tuple[int, ...], seed: int = 0) -> list[npt.NDArray[np.uint8]]:
    buffers = as_bytes(which.encode(values, shape, seed=seed))
    sizes = which.buffer_sizes(shape)
    assert len(buffers) == len(sizes)
    assert all(len(b) == s if which.is_sized else len(b) <= s for b, s in zip(buffers, sizes, strict=True))
    return buffers


def decoded(which: Codec, buffers: list[npt.NDArray[np.uint8]], shape: tuple[int, ...]) -> F32:
    out = np.full(math.prod(shape), np.nan, np.float32)
    which.decode(buffers, shape, 0, out)
    return out


def round_trip(name: str, values: F32, shape: tuple[int, ...] | None = None, seed: int = 0) -> F32:
    shape = values.shape if shape is None else shape
    return decoded(codec(name), encoded(codec(name), values, shape, seed), shape)


def long_vector(numel: int = 150_000) -> F32:
    rng = np.random.default_rng(7)
    return (rng.standard_normal(numel) * np.exp(rng.normal(0, 4, numel))).astype(np.float32)


@names
@settings(max_examples=40)
@given(tensors())
def test_what_is_decoded_is_finite_and_what_the_bytes_mean(name: str, made: tuple[F32, tuple[int, ...]]) -> None:
    values, shape = made
    kept = values.copy()
    buffers = encoded(codec(name), values, shape)
    found = decoded(codec(name), buffers, shape)
    assert values.tobytes() == kept.tobytes()
    assert np.isfinite(found).all()
    if not name.endswith("+zstd"):
        assert found.tobytes() == decode(name, buffers, shape, len(values)).astype(np.float32).tobytes()
    else:
        assert found.tobytes() == round_trip(name.removesuffix("+zstd"), values, shape).tobytes()
    wide = found.astype(np.float64)
    assert codec(name).sum_squares(buffers, shape) == pytest.approx(float(wide @ wide), rel=1e-12)


@given(hnp.arrays(np.float32, st.integers(0, 300), elements=finite))
def test_how_far_off_a_value_may_be(values: F32) -> None:
    wide = values.astype(np.float64)
    largest = float(np.abs(wide).max(initial=0))
    blocks = np.repeat([np.abs(wide[i : i + 64]).max() for i in range(0, len(wide), 64)], 64)[: len(wide)]
    top_bf16 = float(np.uint32(0x7F7F0000).view(np.float32))
    tiny = 2.0**-126
    bounds = {
        "fp32": wide * 0,
        "bf16": np.where(np.abs(wide) > top_bf16, np.abs(wide) - top_bf16, np.abs(wide) * 2.0**-8 + 2.0**-134),
        "fp16": np.abs(wide) * 2.0**-11 + max(largest * 2.0**-39, 2.0**-126),
        "fp8": np.abs(wide) * 2.0**-4 * (1 + 1e-6) + largest / 448 * 2.0**-10 * (1 + 1e-6) + 448 * tiny,
        "int8": wide * 0 + (largest / 254 * (1 + 3e-5) if largest > 1.6e-36 else largest),
        "int4": blocks / 14 * (1 + 2.0**-7) + 7 * tiny,
        "topk(100%)": wide * 0,
    }
    for name, bound in bounds.items():
        assert (np.abs(round_trip(name, values).astype(np.float64) - wide) <= bound).all(), name


@given(hnp.arrays(np.float32, st.integers(0, 300), elements=finite), st.integers(0, 1 << 64))
def test_int_codes_are_those_of_the_equation(values: F32, seed: int) -> None:
    for random in (False, True):
        suffix, chosen = ("(stochastic)", seed) if random else ("", None)
        scales, levels = encode_int(values, 127, 4096, chosen, bf16_scale=False)
        found = encoded(codec("int8" + suffix), values, values.shape, seed)
        assert found[0].view(np.float32).tobytes() == scales.tobytes()
        assert found[1].view(np.int8).tolist() == levels.tolist()
        scales, levels = encode_int(values, 7, 64, chosen, bf16_scale=True)
        found = encoded(codec("int4" + suffix), values, values.shape, seed)
        assert (found[0].view(np.uint16).astype(np.uint32) << 16).view(np.float32).tobytes() == scales.tobytes()
        pairs = np.pad(levels.astype(np.int64) + 8, (0, len(levels) % 2))
        assert found[1].tolist() == (pairs[::2] | pairs[1::2] << 4).tolist()


@given(hnp.arrays(np.float32, st.integers(0, 300), elements=finite))
def test_bf16_and_fp8_equal_pytorch_where_that_is_finite(values: F32) -> None:
    import torch

    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    stays = np.isfinite(expected)
    assert round_trip("bf16", values)[stays].tobytes() == expected[stays].tobytes()
    with_largest = np.append(np.clip(values, -448, 448).astype(np.float32), np.float32(448))  # so that the scale is 1
    expected = torch.from_numpy(with_largest).to(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert round_trip("fp8", with_largest).tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(130_000,), (192, 256), (130, 300), (4097,)])
@pytest.mark.parametrize("k", [64, 1, 1000])
def test_topk_keeps_the_largest_of_each_chunk(shape: tuple[int, ...], k: int) -> None:
    values = long_vector(math.prod(shape)).round(1)  # with many of equal size
    expected = np.zeros_like(values)
    which = TopKNames[k]
    positions = kept_of(k, shape, values)
    buffers = encoded(codec(which), values, shape)
    assert decode_positions(buffers[0], len(positions)).tolist() == positions.tolist()
    kept = np.flatnonzero(decode(which, buffers, shape, len(values)))
    expected[kept] = values[kept]
    assert round_trip(which, values, shape).tobytes() == expected.tobytes()


TopKNames = {64: "topk(1.5625%)", 1: "topk(0.0244140625%)", 1000: "topk(24.4140625%)"}


def decode_positions(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(packed, bitorder="little")[: count * 12].reshape(count, 12).astype(np.int64)
    return bits @ (1 << np.arange(12))


def test_two_bits_are_the_means_of_four_bins() -> None:
    values = long_vector(10_000)
    expected = np.empty_like(values)
    for i in range(0, len(values), 4096):
        part = values[i : i + 4096].astype(np.float64)
        mean, sigma = part.mean(), part.std()
        bins = np.digitize(part, [mean - 3 * sigma, mean, mean + 3 * sigma])
        clipped = np.clip(part, mean - 6 * sigma, mean + 6 * sigma)
        for which in set(bins.tolist()):
            expected[i : i + 4096][bins == which] = clipped[bins == which].mean()
    assert round_trip("2bit", values) == pytest.approx(expected, rel=1e-6)


def test_one_bit_is_sign_times_mean_magnitude() -> None:
    values = long_vector(5000)
    expected = np.concatenate([np.where(p < 0, -1, 1) * np.abs(p).mean() for p in (values[:4096], values[4096:])])
    assert round_trip("1bit", values) == pytest.approx(expected, rel=1e-6)


def test_low_rank_finds_a_matrix_of_low_rank_and_the_best_part_of_any_other() -> None:
    rng = np.random.default_rng(1)
    exact = (rng.standard_normal((200, 3)) @ rng.standard_normal((3, 90))).astype(np.float32)
    assert round_trip("powersgd(4)", exact.reshape(-1), exact.shape) == pytest.approx(exact.reshape(-1), abs=1e-5)
    noisy = exact + 0.01 * rng.standard_normal(exact.shape).astype(np.float32)
    best = np.sqrt((np.linalg.svd(noisy, compute_uv=False)[3:] ** 2).sum())
    error = np.linalg.norm(round_trip("powersgd(3)", noisy.reshape(-1), noisy.shape) - noisy.reshape(-1))
    assert best <= error <= 1.01 * best
    assert (
        round_trip("powersgd(4)", exact.reshape(-1), (90, 200), 1).tobytes()
        != round_trip("powersgd(4)", exact.reshape(-1), (90, 200), 2).tobytes()
    )


@pytest.mark.parametrize("name", random_ones)
def test_rounding_at_random_is_right_on_average(name: str) -> None:
    values = np.full(40_000, 0.3337, np.float32)
    values[::40] = 1.0
    found = round_trip(name, values, seed=5).astype(np.float64)
    both = np.unique(found[values != 1])
    assert len(both) == 2 and both[0] < 0.3337 < both[1]
    assert found[values != 1].mean() == pytest.approx(0.3337, abs=4 * (both[1] - both[0]) / 2 / 39_000**0.5)
    assert round_trip(name, values, seed=5).tobytes() == found.astype(np.float32).tobytes()
    assert round_trip(name, values, seed=6).tobytes() != found.astype(np.float32).tobytes()


def test_chance_is_split_mix() -> None:
    from potluck.codecs.elementwise import noise_key
    from potluck.codecs.kernels import noise as compiled

    for seed, index in [(0, 0), (1, 2), (1 << 63, 1 << 40), ((1 << 64) - 1, 12345)]:
        assert int(compiled(np.uint64(noise_key(seed)), index)) == noise(seed, index)


@names
@settings(max_examples=20)
@given(made=tensors(), weight=st.floats(2.0**-10, 1000, width=32), data=st.data())
def test_accumulate_is_decode_then_add(
    name: str, made: tuple[F32, tuple[int, ...]], weight: float, data: st.DataObject
) -> None:
    values, shape = np.clip(made[0], -1e30, 1e30).astype(np.float32), made[1]
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    which = codec(name)
    buffers = encoded(which, values, shape)
    into = np.linspace(-1, 1, stop - start, dtype=np.float32)
    expected = into + np.float32(weight) * decoded(which, buffers, shape)[start:stop]
    which.accumulate(buffers, shape, start, into, weight)
    assert into.tobytes() == expected.tobytes()


@names
@pytest.mark.parametrize("shape", [(150_000,), (256, 576), (301, 499)])
def test_slices_and_threads_change_no_bit(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values, which = long_vector(math.prod(shape)), codec(name)
    numel = len(values)
    monkeypatch.setattr(threads, "smallest_numel", 1)
    results = []
    for count in (1, 3):
        monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
        buffers = encoded(which, values, shape, seed=3)
        whole = decoded(which, buffers, shape)
        rest = values.copy()
        again = as_bytes(which.encode_residual(rest, shape, seed=3))
        assert [b.tobytes() for b in again] == [b.tobytes() for b in buffers]
        assert rest.tobytes() == (values - whole).tobytes()
        results.append((*(b.tobytes() for b in buffers), whole.tobytes(), which.sum_squares(buffers, shape)))
    assert results[0] == results[1]
    for start, stop in [(0, 1), (4095, 4097), (4001, 70_001), (65_535, numel), (numel - 1, numel), (7, 7)]:
        out = np.empty(stop - start, np.float32)
        which.decode(buffers, shape, start, out)
        assert out.tobytes() == whole[start:stop].tobytes()
        into = np.ones(stop - start, np.float32)
        which.accumulate(buffers, shape, start, into, 1.0)
        assert into.tobytes() == (1 + whole[start:stop]).tobytes()


@names
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    for shape, place in [((70_000,), 0), ((70_000,), 4096), ((70_000,), 69_999), ((64, 128), 8191), ((3, 5), 7)]:
        values = np.zeros(math.prod(shape), np.float32)
        values[place] = bad
        with pytest.raises(InvalidUpdate, match=r"holds NaN or infinity, which .+ does not send"):
            codec(name).encode(values, shape)
        with pytest.raises(InvalidUpdate):
            codec(name).encode_residual(values, shape)


@names
def test_zeros_stay_zeros(name: str) -> None:
    for shape in [(5000,), (64, 64), (7, 3)]:
        assert not round_trip(name, np.zeros(math.prod(shape), np.float32), shape).any()


@names
def test_the_largest_and_the_smallest_numbers(name: str) -> None:
    top = np.finfo(np.float32).max
    for shape in [(4096,), (64, 64), (80, 51)]:
        for values in (np.full(math.prod(shape), top), np.where(np.arange(math.prod(shape)) % 2, top, -top)):
            found = round_trip(name, values.astype(np.float32), shape)
            assert np.isfinite(found).all()
            if not name.startswith(("topk", "powersgd")):
                assert found == pytest.approx(values, rel=2.0**-7)
        small = np.full(math.prod(shape), 1e-42, np.float32)
        assert (np.abs(round_trip(name, small, shape)) <= 1e-40).all()


@names
@settings(max_examples=60)
@given(shape=shapes, data=st.data())
def test_any_bytes_are_refused_or_decoded(name: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    which, numel = codec(name), math.prod(shape)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    buffers = [rng.integers(0, 256, size, dtype=np.uint8) for size in which.buffer_sizes(shape)]
    if not which.is_sized or data.draw(st.booleans()):  # nearly right
        buffers = [b.copy() for b in encoded(which, rng.standard_normal(numel).astype(np.float32), shape)]
        for buffer in buffers:
            for place in rng.integers(0, len(buffer), 2) if len(buffer) else ():
                buffer[place] = rng.integers(0, 256)
        if not which.is_sized and data.draw(st.booleans()):
            buffers = [b[: data.draw(st.integers(0, len(b)))] for b in buffers]
    guarded = np.full(numel + 128, 7.0, np.float32)
    for work in (which.decode, lambda *args: which.accumulate(*args, 0.5)):
        with contextlib.suppress(CorruptError):
            work(buffers, shape, 0, guarded[64 : 64 + numel])
    with contextlib.suppress(CorruptError):
        assert which.sum_squares(buffers, shape) >= 0
    assert (guarded[:64] == 7).all() and (guarded[64 + numel :] == 7).all()


def test_positions_twice_or_beyond_are_refused() -> None:
    which = codec("topk(1.5625%)")
    values = np.arange(200, dtype=np.float32)  # keeps 4
    buffers = encoded(which, values, (200,))
    out = np.empty(200, np.float32)
    for positions in ([196, 197, 198, 200], [196, 196, 197, 198], [198, 197, 196, 199], [4095, 0, 1, 2]):
        bits = np.array([p >> i & 1 for p in positions for i in range(12)], np.uint8)
        with pytest.raises(CorruptError, match="positions that do not ascend inside their chunk"):
            which.decode([np.packbits(bits, bitorder="little"), buffers[1]], (200,), 0, out)


def test_nothing_unpacks_to_more_than_the_shape_says() -> None:
    import zstandard

    which = codec("int8+zstd")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    scales = np.zeros(1, np.float32).tobytes()
    table = np.array([len(scales), len(bomb)], "<u4").tobytes()
    out = np.empty(4096, np.float32)
    with pytest.raises(CorruptError, match="does not unpack to 4096 bytes"):
        which.decode([np.frombuffer(table + scales + bomb, np.uint8)], (4096,), 0, out)
    with pytest.raises(CorruptError, match="has 9 bytes and describes 8200"):
        which.decode([np.frombuffer(np.array([4096, 4096], "<u4").tobytes() + b"x", np.uint8)], (4096,), 0, out)
    with pytest.raises(CorruptError, match="has 7 bytes and 8 are the least"):
        which.decode([np.zeros(7, np.uint8)], (4096,), 0, out)


def test_lossless_gets_smaller_what_has_structure() -> None:
    smooth = np.linspace(0, 1, 300_000, dtype=np.float32)
    for name in ("fp32+zstd", "bf16+zstd", "int8+zstd"):
        which = codec(name)
        assert len(encoded(which, smooth, (300_000,))[0]) < 0.7 * which.buffer_sizes((300_000,))[0]


def test_sizes_follow_from_the_number_of_elements() -> None:
    numel = 1 << 24
    percent = {name: 100 * codec(name).estimate_bytes(numel) / (4 * numel) for name in codec_names()}
    assert percent == pytest.approx(
        {
            "fp32": 100, "bf16": 50, "fp16": 50, "fp8": 25, "int8": 25.02, "int4": 13.28, "2bit": 6.35, "1bit": 3.15,
            "topk(1.5625%)": 2.148, "topk(1.5625%)+2bit": 0.6851, "powersgd(4)": 100, "int8+zstd": 25.02,
        }, abs=0.01,
    )  # fmt: skip
    assert [codec(name).estimate_bytes(0) for name in codec_names() if name != "fp16"] == [0] * 11


golden_values = np.array([0.0, 1.0, -1.0, 127.0, 0.49, -63.5, 3.14159274, 1e-3, 50, -50, 8e-8], np.float32)
golden_folder = Path(__file__).parent / "golden"


def golden_path(name: str) -> Path:
    return golden_folder / f"{name.replace('%', '').replace('(', '_').replace(')', '')}.bin"


@names
def test_the_bytes_of_each_codec_stay_as_they_are(name: str) -> None:
    """Stored models and updates are read by later versions. A file is the values decoded, then the buffers."""
    shape = (64, 64) if name.startswith(("topk", "powersgd")) else (2, 11)
    values = np.resize(golden_values, math.prod(shape))
    data = golden_path(name).read_bytes()
    held, stop = len(values) * 4, len(data)
    if name.endswith("+zstd"):  # whose encoder may change with its version
        buffers = [np.frombuffer(data[held:], np.uint8)]
    else:
        buffers = encoded(codec(name), values, shape, seed=1)
        assert b"".join(b.tobytes() for b in buffers) == data[held:stop]
    assert decoded(codec(name), buffers, shape).tobytes() == data[:held]
