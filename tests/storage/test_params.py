import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.storage.files import boot_id, rest
from potluck.storage.params import ParamStore
from potluck.types.errors import CorruptError, PotluckError
from potluck.types.params import Fragment, Layout, Params

layout = Layout.of([("a", (10, 100)), ("b", (7,))])


@pytest.fixture
def store(tmp_path: Path) -> ParamStore:
    return ParamStore(tmp_path / "params", fragment_numel=300, slice_numel=128)


def vector(seed: int = 0, numel: int = layout.numel) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def files(store: ParamStore) -> list[str]:
    return sorted(p.name for p in store.root.iterdir() if p.name != "boot")


def test_a_vector_comes_back_and_its_handle_names_its_files(store: ParamStore) -> None:
    handle = store.create("theta", vector())
    assert handle == Params(tuple(Fragment(f"theta.{i:04d}", n) for i, n in enumerate([300, 300, 300, 107])))
    assert files(store) == [f"theta.{i:04d}.f32" for i in range(4)]
    assert torch.equal(store.read(handle), vector())
    assert store.path(handle.fragments[3]).read_bytes() == vector()[900:].numpy().astype("<f4").tobytes()
    again = ParamStore(store.root)
    assert torch.equal(again.read(handle), vector())


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (299, 301), (250, 950), (900, 1007), (1007, 1007)])
def test_any_slice_can_be_read(store: ParamStore, start: int, stop: int) -> None:
    assert torch.equal(store.read_slice(store.create("x", vector()), start, stop), vector()[start:stop])


def test_zeros_and_nothing(store: ParamStore) -> None:
    assert torch.equal(store.read(store.zeros("zeros", 1007)), torch.zeros(1007))
    empty = store.create("empty", torch.empty(0))
    assert empty == Params(()) and store.read(empty).shape == (0,) and store.norm(empty) == 0.0


def test_pieces_of_any_size_make_a_vector(store: ParamStore) -> None:
    with store.writer("x", 1007) as writer:
        writer.write(vector()[:1].reshape(1, 1))
        writer.write(vector()[1:700].double())
        writer.write(torch.empty(0))
        writer.write_zeros(100)
        writer.write(vector()[800:])
    expected = vector()
    expected[700:800] = 0
    assert torch.equal(store.read(writer.params), expected)


def test_a_vector_of_the_wrong_length_or_an_exception_leaves_nothing(store: ParamStore) -> None:
    def short() -> None:
        with store.writer("x", 1007) as writer:
            writer.write(vector()[:1000])

    def long() -> None:
        with store.writer("x", 1007) as writer:
            writer.write(vector(numel=1008))

    def failing() -> None:
        with store.writer("x", 1007) as writer:
            writer.write(vector()[:1000])
            raise KeyboardInterrupt

    with pytest.raises(ValueError, match="got 1000 elements and has 1007"):
        short()
    with pytest.raises(ValueError, match="gets 1008 elements and has 1007"):
        long()
    with pytest.raises(KeyboardInterrupt):
        failing()
    assert files(store) == []


def test_a_vector_in_the_making_is_not_there_until_it_is_whole(store: ParamStore) -> None:
    old = store.create("x", vector())
    with store.writer("x", 1007) as writer:
        writer.write(vector(1))
        assert torch.equal(store.read(old), vector())
        store.remove_except([old])  # does not touch what is being written
    assert writer.params == old
    assert torch.equal(store.read(old), vector(1))


def test_what_a_killed_writer_left_goes_at_the_next_start(store: ParamStore) -> None:
    handle = store.create("x", vector())
    writer = store.writer("y", 1007)
    writer.write(vector()[:400])
    assert len(files(store)) == 6
    writer.__exit__(KeyboardInterrupt)  # only so that the open file is closed
    (store.root / "y.0000.f32.0123.tmp").write_bytes(b"1234")
    assert files(ParamStore(store.root)) == [f.name + ".f32" for f in handle.fragments]


def scaled_sum(x: Tensor, y: Tensor, *, a: float, layout: Layout, offset: int) -> tuple[Tensor, Tensor]:
    x.mul_(a)  # slices may be changed in place
    return x + y, torch.arange(offset, offset + x.numel(), dtype=torch.float32)


def test_apply_runs_slice_by_slice_into_new_handles(store: ParamStore) -> None:
    x, y = store.create("x", vector(0)), store.create("y", vector(1))
    total, offsets = store.apply(scaled_sum, x, y, name="out", layout=layout, num_outputs=2, a=3.0)
    assert torch.equal(store.read(total), vector(0) * 3 + vector(1))
    assert torch.equal(store.read(offsets), torch.arange(1007, dtype=torch.float32))
    assert torch.equal(store.read(x), vector(0)) and torch.equal(store.read(y), vector(1))
    assert total.fragments[0].name == "out-0.0000" and offsets.fragments[0].name == "out-1.0000"


def test_apply_takes_a_single_tensor_and_names_from_anything(store: ParamStore) -> None:
    def double(x: Tensor, **_: Any) -> Tensor:
        return (x * 2).double()

    (out,) = store.apply(double, store.create("x", vector()), name="r0/<lambda> ü", layout=layout)
    assert torch.equal(store.read(out), vector() * 2)
    assert out.fragments[0].name == "r0__lambda___-0.0000"


def test_an_operation_that_returns_something_else_is_told_so(store: ParamStore) -> None:
    x = store.create("x", vector())
    for op in (lambda x, **_: (x, x), lambda x, **_: x[1:], lambda x, **_: x.reshape(1, -1)):
        with pytest.raises(PotluckError, match=r"operation of mine returned tensors of shapes .* 1 of shape \[128\]"):
            store.apply(op, x, name="mine", layout=layout)
    with pytest.raises(ValueError, match=r"\[1007, 5\] elements"):
        store.apply(scaled_sum, x, store.zeros("z", 5), name="mine", layout=layout)
    assert len(files(store)) == 5


def test_the_norm_is_summed_in_fp64(store: ParamStore) -> None:
    handle = store.create("x", vector() * 1e25)
    assert store.norm(handle) == pytest.approx(float((vector() * 1e25).double().norm()), rel=1e-14)


@pytest.mark.parametrize("how", ["cut", "longer", "missing"])
def test_a_damaged_file_is_named(store: ParamStore, how: str) -> None:
    handle = store.create("x", vector())
    store.check(handle)
    path = store.path(handle.fragments[1])
    match how:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "longer":
            path.write_bytes(path.read_bytes() + b"\0")
        case _:
            path.unlink()
    for use in (store.check, store.read, store.norm, lambda h: store.apply(scaled_sum, h, name="o", layout=layout)):
        with pytest.raises(CorruptError, match=r"x\.0001\.f32 (has 1199 bytes|has 1201 bytes|is missing)"):
            use(handle)


@pytest.mark.parametrize("name", ["../secret", "a/b", "", ".hidden", "a\\b", "x" * 300])
def test_a_handle_from_a_file_never_leaves_the_folder(store: ParamStore, name: str) -> None:
    with pytest.raises(CorruptError, match="is not the name of a parameter file"):
        store.read(Params((Fragment(name, 1),)))


def test_removing_keeps_what_is_named(store: ParamStore) -> None:
    x, y = store.create("x", vector()), store.create("y", vector(1))
    assert store.remove_except([x]) == 4 * 1007
    assert torch.equal(store.read(x), vector())
    with pytest.raises(CorruptError, match=r"y\.0000\.f32 is missing"):
        store.check(y)


def test_memory_does_not_grow_with_the_vector(tmp_path: Path) -> None:
    def copied(x: Tensor, **_: Any) -> Tensor:
        return x

    store = ParamStore(tmp_path, slice_numel=1 << 14)
    handle = store.zeros("x", 4_000_000)
    tracemalloc.start()
    store.apply(copied, handle, name="y", layout=layout)
    store.norm(handle)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_distance_of_two_vectors_is_exact_while_they_are_small_and_sampled_where_they_are_not(
    store: ParamStore,
) -> None:
    one, other = store.create("one", vector(1)), store.create("other", vector(2))
    exact = (vector(1) - vector(2)).double().norm().item()
    assert store.distance(one, other, at_most=layout.numel) == pytest.approx(exact, rel=1e-12)
    assert store.distance(one, one, at_most=layout.numel) == 0.0
    assert store.distance(one, other, at_most=500) == pytest.approx(exact, rel=0.15)
    assert store.distance(one, other, at_most=500) == store.distance(one, other, at_most=500)


def test_files_that_were_put_to_rest_count_after_any_start_of_the_machine(store: ParamStore) -> None:
    resting, left = store.create("x", vector()), ParamStore(store.root.parent / "left")
    lost = left.create("x", vector())
    rest(store.root)
    for root in (store.root, left.root):
        if (root / "boot").exists():
            (root / "boot").write_text("another machine's")
    assert torch.equal(ParamStore(store.root, fragment_numel=300).read(resting), vector())
    if boot_id():
        with pytest.raises(CorruptError):
            ParamStore(left.root).check(lost)
