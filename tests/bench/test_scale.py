"""The bench's run: a large model costs a simulated fleet bytes and time, and this machine hardly any memory."""

from __future__ import annotations

import tracemalloc

from potluck.bench.scale import home_machines, large_plan
from potluck.simulator.large.scale import simulate_scale


def test_a_model_of_a_billion_parameters_takes_no_memory() -> None:
    plan = large_plan(40, 2)
    assert 1.2e9 < plan.layout.numel < 1.25e9
    tracemalloc.start()
    try:
        report = simulate_scale(plan, home_machines(40), seed=1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.num_rounds == 2 and report.stopped == "" and len(report.devices) == 40
    assert report.up_bytes > 40 * 2 * plan.layout.numel  # int8
    assert peak_bytes < 40 << 20
