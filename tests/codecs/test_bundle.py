import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from potluck.codecs.base import codec, codec_names
from potluck.codecs.bundle import (
    Bundle,
    flat_size,
    pack_tensors,
    unpack_tensors,
    write_flat,
    write_flat_slices,
    write_tensors,
)
from potluck.codecs.elementwise import noise_key
from potluck.codecs.header import item_bytes
from potluck.types.errors import CorruptError, InvalidUpdate, ResourceError
from potluck.types.params import Layout

layout = Layout.of([("embed", (37, 100)), ("bias", (7,)), ("scale", ()), ("none", (0, 3)), ("head", (90, 1000))])
names = pytest.mark.parametrize("name", codec_names())


def vector(seed: int = 0) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    bits = torch.arange(240, dtype=torch.uint8)
    tensors = {name: bits.view(getattr(torch, name)).reshape(2, -1) for name in item_bytes}
    assert len(tensors) == 11
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4, dtype=torch.int64)}
    tensors |= {"strided": torch.arange(12, dtype=torch.int32).reshape(3, 4).T}
    size = write_tensors(tmp_path / "bundle", tensors)
    assert (tmp_path / "bundle").stat().st_size == size
    packed = pack_tensors(tensors)
    assert (tmp_path / "bundle").read_bytes() == packed
    with Bundle.open(tmp_path / "bundle") as bundle:
        found = [bundle.read_all(), unpack_tensors(packed), {name: bundle.tensor(name) for name in tensors}]
    for back in [*found, unpack_tensors(memoryview(b"odd" + packed)[3:]), unpack_tensors(bytearray(packed))]:
        assert list(back) == list(tensors)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
            assert raw(back[name]) == raw(tensor)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@given(st.dictionaries(st.text('abc./_0{["', min_size=1), st.lists(st.integers(0, 4), max_size=4), max_size=5))
def test_any_names_and_shapes_come_back(shapes: dict[str, list[int]]) -> None:
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    back = unpack_tensors(pack_tensors(tensors))
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_equal_tensors_make_equal_bytes() -> None:
    assert pack_tensors({"a": torch.ones(3), "b": torch.zeros(5)}) == pack_tensors(
        {"a": torch.ones(6)[::2], "b": torch.zeros(5)}
    )


def test_a_dtype_that_is_not_carried_is_named() -> None:
    with pytest.raises(TypeError, match=r"tensor mask is torch\.bool; bundles carry float64"):
        pack_tensors({"mask": torch.ones(3, dtype=torch.bool)})


def test_the_bytes_of_a_bundle_stay_as_they_are(tmp_path: Path) -> None:
    """Stored objects are read by later versions, and their digests by everyone."""
    header = b'{"tensors":[["t","int16",[3],"raw",[[0,6]]],["u","float32",[],"raw",[[64,4]]]]}'
    data = b"POTLUCK\x01" + (116).to_bytes(4, "little") + header.ljust(116)
    data += bytes.fromhex("0100feff0300").ljust(64, b"\0") + bytes.fromhex("0000c03f")
    assert pack_tensors({"t": torch.tensor([1, -2, 3], dtype=torch.int16), "u": torch.tensor(1.5)}) == data
    small = Layout.of([("w", (1, 2))])
    write_flat(tmp_path / "flat", "delta", torch.tensor([1.0, -127.0]), small, codec("int8"))
    header = b'{"tensors":[["delta/w","float32",[1,2],"int8",[[0,4],[64,2]]]]}'
    data = b"POTLUCK\x01" + (116).to_bytes(4, "little") + header.ljust(116)
    data += bytes.fromhex("0000803f").ljust(64, b"\0") + bytes.fromhex("0181")
    assert (tmp_path / "flat").read_bytes() == data


def test_a_mapped_tensor_outlives_its_bundle_and_is_a_private_copy(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write_tensors(path, {"pad": torch.zeros(5000), "tokens": torch.arange(20_000, dtype=torch.int32)})
    bundle = Bundle.open(path)
    tokens = bundle.tensor("tokens")
    bundle.close()
    before = path.read_bytes()
    assert torch.equal(tokens, torch.arange(20_000, dtype=torch.int32))
    tokens.zero_()
    assert path.read_bytes() == before
    with pytest.raises(KeyError):
        bundle.tensor("token")


@names
def test_a_flat_vector_comes_back_as_its_codec_has_it(name: str, tmp_path: Path) -> None:
    size = write_flat(tmp_path / "flat", "delta", vector(), layout, codec(name), seed=5)
    assert size == (tmp_path / "flat").stat().st_size
    most = flat_size("delta", layout, codec(name))
    assert size == most if codec(name).is_sized else size < most
    with Bundle.open(tmp_path / "flat") as bundle:
        decoded = bundle.decode_flat("delta", layout)
        for tensor in layout:
            values = vector()[tensor.offset : tensor.stop].numpy()
            expected = np.empty(tensor.numel, np.float32)
            key = noise_key(5, tensor.offset)
            buffers = [b.reshape(-1).view(np.uint8) for b in codec(name).encode(values, tensor.shape, seed=key)]
            codec(name).decode(buffers, tensor.shape, 0, expected)
            assert decoded[tensor.offset : tensor.stop].numpy().tobytes() == expected.tobytes()
            assert torch.equal(bundle.tensor(f"delta/{tensor.name}"), torch.from_numpy(expected).reshape(tensor.shape))
        assert bundle.check_flat("delta", layout) == pytest.approx(float(decoded.double().norm()), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in codec_names() if codec(name).is_sized])
def test_the_size_does_not_depend_on_values(name: str, tmp_path: Path) -> None:
    sizes = {write_flat(tmp_path / "flat", "p", vector() * x, layout, codec(name)) for x in (0.0, 1e-30, 1.0, 1e30)}
    assert sizes == {flat_size("p", layout, codec(name))}


@names
def test_accumulate_adds_any_slice_as_decode_then_add_does(name: str, tmp_path: Path) -> None:
    write_flat(tmp_path / "flat", "delta", vector(), layout, codec(name))
    with Bundle.open(tmp_path / "flat") as bundle:
        decoded = bundle.decode_flat("delta", layout)
        expected = (vector(1).numpy() + np.float32(0.3) * decoded.numpy()).astype(np.float32)
        for size in (layout.numel, 1000, 3700):
            total = vector(1)
            for start in range(0, layout.numel, size):
                bundle.accumulate("delta", layout, total[start : start + size], start, 0.3)
            assert total.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int8(stochastic)", "int4", "2bit", "1bit", "fp8"])
def test_a_large_tensor_is_read_in_pieces_and_gives_the_same_bytes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_flat(tmp_path / "whole", "p", vector(), layout, codec(name), seed=3, residual=(whole := vector()))
    for module in ("elementwise", "fp32"):
        monkeypatch.setattr(f"potluck.codecs.{module}.piece_numel", 4096)
    write_flat(tmp_path / "pieces", "p", vector(), layout, codec(name), seed=3, residual=(pieces := vector()))
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    assert torch.equal(whole, pieces)


def test_slices_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return vector()[start:stop]

    write_flat(tmp_path / "whole", "p", vector(), layout, codec("int8"))
    write_flat_slices(tmp_path / "slices", "p", read, layout, codec("int8"))
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "slices").read_bytes()
    assert asked == [(t.offset, t.stop) for t in layout if t.numel]


def test_memory_for_reading_is_bounded(tmp_path: Path) -> None:
    large = Layout.of([("w", (4000, 1000))])
    write_flat(tmp_path / "flat", "p", torch.randn(large.numel), large, codec("int8"))
    total = torch.zeros(large.numel)
    tracemalloc.start()
    with Bundle.open(tmp_path / "flat") as bundle:
        bundle.accumulate("p", large, total, 0, 0.5)
        bundle.check_flat("p", large)
        bundle.decode_flat("p", large)  # its result is PyTorch's memory, which is not counted here
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20


def test_a_vector_that_is_not_finite_is_refused_by_name_and_leaves_no_file(tmp_path: Path) -> None:
    broken = vector()
    broken[3702] = float("nan")
    with pytest.raises(InvalidUpdate, match=r"^delta/bias holds NaN or infinity, which bf16 does not send"):
        write_flat(tmp_path / "flat", "delta", broken, layout, codec("bf16"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"delta has shape \[3\]"):
        write_flat(tmp_path / "flat", "delta", torch.zeros(3), layout, codec("bf16"))


def as_tensors(values: Tensor, *, skip: str = "") -> dict[str, Tensor]:
    return {f"p/{t.name}": values[t.offset : t.stop].reshape(t.shape) for t in layout if t.name != skip}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 3707, layout.numel - 1])
def test_a_value_that_is_not_finite_is_found_also_in_raw_tensors(bad: float, place: int, tmp_path: Path) -> None:
    broken = vector()
    broken[place] = bad
    write_tensors(tmp_path / "bad", as_tensors(broken))
    with pytest.raises(InvalidUpdate, match="holds NaN or infinity"), Bundle.open(tmp_path / "bad") as bundle:
        bundle.check_flat("p", layout)


def test_a_scale_that_is_not_finite_is_found(tmp_path: Path) -> None:
    path = tmp_path / "flat"
    small = Layout.of([("w", (8,))])
    write_flat(path, "p", torch.ones(8), small, codec("int8"))
    data = bytearray(path.read_bytes())
    start = data.index(np.float32(1 / 127).tobytes())
    for scale in (np.nan, np.inf, 3e38):  # the last overflows only when it is multiplied
        data[start : start + 4] = np.float32(scale).tobytes()
        path.write_bytes(data)
        with pytest.raises(InvalidUpdate, match="p/w holds NaN or infinity"), Bundle.open(path) as bundle:
            bundle.check_flat("p", small)


def test_another_layout_is_refused_with_what_differs(tmp_path: Path) -> None:
    def reason(tensors: dict[str, Tensor]) -> str:
        write_tensors(tmp_path / "b", tensors)
        with Bundle.open(tmp_path / "b") as bundle:
            with pytest.raises(CorruptError, match="b: p"):
                bundle.decode_flat("p", layout)
            with pytest.raises(InvalidUpdate) as refused:
                bundle.check_flat("p", layout)
        return str(refused.value)

    good = as_tensors(vector())
    assert reason(as_tensors(vector(), skip="bias")) == "p has 4 tensors and the model has 5"
    assert reason({}) == "p has 0 tensors and the model has 5"
    assert reason({**good, "p/bias": torch.zeros(8)}) == "p/bias is float32 [8] and the model's is [7]"
    assert reason({**good, "p/bias": torch.zeros(7).half()}) == "p/bias is float16 [7] and the model's is [7]"
    swapped = dict(reversed(good.items()))
    assert reason(swapped) == "p has p/head where the model has embed"
    write_tensors(tmp_path / "b", as_tensors(vector(), skip="bias"))
    with Bundle.open(tmp_path / "b") as bundle, pytest.raises(CorruptError, match=r"does not hold p/bias as \[7\]"):
        bundle.accumulate("p", layout, torch.zeros(layout.numel), 0, 1.0)


def test_a_twin_shares_the_header_of_an_equal_one_only(tmp_path: Path) -> None:
    for i in range(2):
        write_flat(tmp_path / f"{i}", "p", vector(i), layout, codec("fp32"))
    write_flat(tmp_path / "other", "q", vector(), layout, codec("fp32"))
    with Bundle.open(tmp_path / "0") as first:
        with Bundle.open(tmp_path / "1", like=first) as twin:
            assert twin.entries is first.entries
            assert torch.equal(twin.decode_flat("p", layout), vector(1))
            assert torch.equal(first.decode_flat("p", layout), vector(0))
        with Bundle.open(tmp_path / "other", like=first) as other:
            assert torch.equal(other.decode_flat("q", layout), vector())


def test_a_full_disk_is_a_sentence_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("potluck.codecs.bundle._write_buffers", full)
    with pytest.raises(ResourceError, match=r"flat has [\d,]+ bytes free and 375,\d\d\d bytes are needed"):
        write_flat(tmp_path / "flat", "p", vector(), layout, codec("fp32"))
    assert list(tmp_path.iterdir()) == []
