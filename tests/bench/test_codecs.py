import pytest

from potluck.bench.codecs import bench_codecs, gpt2_layout
from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size
from potluck.types.params import Layout

kinds = {
    "encode_gb_per_s", "encode_ratio", "accumulate_gb_per_s", "accumulate_ratio", "check_gb_per_s", "check_ratio",
    "relative_l2_error", "wire_percent", "fewer_bytes_ratio", "wire_with_default_policy_percent",
}  # fmt: skip


def test_figures_carry_their_units_and_agree_with_each_other() -> None:
    names = ("int8", "fp32+zstd")
    layout = Layout.of([("w", (64, 128)), ("b", (128,))])
    figures = bench_codecs(shape=(64, 128), num_turns=1, num_threads=1, names=names, layout=layout)
    assert set(figures) == {
        "num_threads", "num_turns", "numel", "layout_numel", *(f"{name} {kind}" for name in names for kind in kinds)
    }  # fmt: skip
    assert figures["int8 relative_l2_error"] == pytest.approx(0.0086, abs=1e-3)
    assert figures["fp32+zstd relative_l2_error"] == 0
    assert figures["int8 wire_percent"] * figures["int8 fewer_bytes_ratio"] == pytest.approx(100, rel=1e-3)


def test_the_layout_is_gpt2_and_topk_with_two_bits_sends_a_hundred_and_forty_second_of_it() -> None:
    layout = gpt2_layout()
    assert (len(layout.tensors), layout.numel) == (148, 124_439_808)
    whole = 4 * layout.numel
    assert whole / flat_size("delta", layout, codec("topk(1.5625%)+2bit")) >= 142
    assert flat_size("delta", layout, codec("int4")) <= 0.141 * whole
    assert flat_size("delta", layout, codec("2bit")) <= 0.066 * whole
