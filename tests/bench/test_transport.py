import pytest

from potluck.bench.soak import growth
from potluck.bench.transport import bench_transport


def test_figures_carry_their_units_and_agree_with_each_other() -> None:
    figures = bench_transport(size_mb=8, repeats=1)
    assert set(figures) == {
        "size_mb", "chunk_bytes", "repeats", "cut_10_times_sent_ratio", *(
            name.format(way) for way in ("down", "up") for name in (
                "{}_mb_per_s", "bare_{}_mb_per_s", "bare_files_{}_mb_per_s", "{}_cpu_s_per_gb", "bare_{}_cpu_s_per_gb",
                "bare_files_{}_cpu_s_per_gb", "{}_ratio", "{}_files_ratio",
            )
        ),
    }  # fmt: skip
    assert figures["down_ratio"] == pytest.approx(figures["down_mb_per_s"] / figures["bare_down_mb_per_s"], rel=0.05)
    assert 1.0 < figures["cut_10_times_sent_ratio"] < 11


def test_growth_is_from_the_fiftieth_round_to_the_last() -> None:
    memory_mb = [*map(float, range(50)), *[100.0] * 40, *[300.0] * 100, *[101.5] * 40]
    assert growth(memory_mb) == {"warm_mb": 100.0, "last_mb": 101.5, "growth_percent": 1.5}
