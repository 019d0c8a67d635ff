import time

from potluck.bench.aggregate import _layout, bench_aggregate
from potluck.bench.rig.memory import memory_bytes, peak_memory


def test_every_rule_has_figures_with_units_that_agree_with_each_other() -> None:
    figures = bench_aggregate(numel=40_000, num_runs=1)
    for rule, num_updates in (("mean", 2), ("mean", 16), ("median", 16), ("krum", 16), ("norm_clipping", 16)):
        for codec in ("fp32", "int8"):
            stem = f"{rule}_{codec}_{num_updates}_updates"
            numel, seconds = figures[f"{stem}_parameters"], figures[f"{stem}_s"]
            assert numel == (40_000 if rule == "mean" else 5_000)
            taken_gb = 4 * numel * num_updates / 1e9
            slowest, fastest = taken_gb / (seconds + 0.0006), taken_gb / max(seconds - 0.0006, 1e-9)  # as rounded
            assert slowest - 0.01 <= figures[f"{stem}_gb_per_s"] <= fastest + 0.01
            assert figures[f"{stem}_anonymous_mb"] < 64
    units = ("_s", "_gb_per_s", "_mb", "_parameters", "_threads", "cores")
    assert all(name.endswith(units) for name in figures)


def test_the_layout_has_the_parameters_asked_for() -> None:
    for numel in (5, 3072 * 769, 124_439_808):
        assert _layout(numel).numel == numel


def test_a_peak_that_is_gone_is_seen() -> None:
    with peak_memory(memory_bytes()) as peak:
        taken = bytearray(64_000_000)
        for at in range(0, len(taken), 4096):
            taken[at] = 1
        time.sleep(0.3)  # a busy machine lets the sampler wait
        del taken
    assert 60 < peak()["anonymous_mb"] < 90
