"""A step in tiles on a modelled fleet: figures that add up, and the shipping scheduler takes that time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from sub_gemm_played import Played, play, terms, whole_numbers

from potluck.planner.baselines.layered import LayeredModel
from potluck.planner.baselines.pipeline import pipelines, quickest
from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import Head
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.step import Use
from potluck.planner.tiles.verify import boxes_of, tiling_fault
from potluck.simulator.fleets import Device, Machine, machines
from potluck.simulator.large.charts import Chart, Line, charts_svg
from potluck.simulator.large.comparison import resized
from potluck.simulator.large.recovery import deal_again, orphans_s, recovery_times
from potluck.simulator.large.sub_gemm import plannable, simulate_step, tile_devices
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.tile_bag import TileBag
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.strategies.sub_gemm.walk import Asked
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.profile import memory_share

phones = Device(
    name="phone", count=12, flops=(5e9, 7e9), memory_bytes=(1e9, 1e9), up_bytes_per_s=(5e6, 1e7),
    down_bytes_per_s=(1e7, 1e8), idle_w=(1.0, 1.0), busy_w=(5.0, 5.0),
)  # fmt: skip
uses = Counter({
    Use(Product(m=2048, n=512, q=1024, down_bytes=2, up_bytes=2), 4): 3,
    Use(Product(m=512, n=2048, q=1024, kind="weight_gradient", down_bytes=2, up_bytes=2), 4): 2,
})  # fmt: skip
options = Options()
found = machines([phones], seed=1)
devices = tile_devices(found, num_in_flight=3)


def test_machines_become_devices() -> None:
    machine = replace(found[0], flops=2e9, duty=0.5, memory_bytes=1e6, rtt_s=0.02)
    (device,) = tile_devices([machine], num_in_flight=3)
    assert device.s_per_flop == 1e-9 and device.memory_bytes == memory_share * 1e6
    assert (device.id, device.rtt_s, device.num_in_flight) == (machine.id, 0.02, 3)


def test_what_costs_the_same_is_planned_once() -> None:
    asked = Counter({
        Asked(64, 8, 32, "forward"): 3, Asked(64, 8, 32, "input_gradient"): 2, Asked(8, 64, 32, "weight_gradient"): 1,
        Asked(32, 64, 8, "weight_gradient"): 4, Asked(16, 8, 32, "forward", 4): 1,
    })  # fmt: skip
    merged = plannable(asked, wire="bf16", num_micro_batches=3)
    assert {(p.m, p.n, p.q, p.kind, times): count for (p, times), count in merged.items()} == {
        (64, 8, 32, "forward", 3): 5, (8, 64, 32, "weight_gradient", 3): 5, (16, 8, 32, "forward", 12): 1,
    }  # fmt: skip
    assert {(p.down_bytes, p.up_bytes) for p, _ in merged} == {(2, 2)}


def test_a_step_is_the_sum_of_its_products() -> None:
    step = simulate_step(uses, devices, found, head=Head(), options=options)
    plans = [(each.plan, each.count) for each in step.plan.planned]
    assert [(each.use, each.count) for each in step.plan.planned] == list(uses.items()) and step.plan.kept_share == 1.0
    assert step.plan.seconds == pytest.approx(sum(count * (p.first_s + 3 * p.later_s) for p, count in plans))
    assert step.plan.flops == 4 * (3 + 2) * 2 * 2048 * 512 * 1024
    assert step.plan.up_bytes == 4 * 2 * (3 * 2048 * 1024 + 2 * 512 * 1024 * plans[1][0].num_inner_parts)
    assert sum(step.plan.bindings.values()) == pytest.approx(1.0)
    busy_s = sum(m.flops for m in found)  # FLOPs a second of all; how they are shared decides what it costs
    assert step.compute_s >= step.plan.flops / busy_s * len(found) * 0.5
    assert 0 < step.utilisation < 1
    assert step.energy_j == pytest.approx(12 * step.plan.seconds + 4 * step.compute_s)
    silent = [replace(machine, busy_w=0.0) for machine in found]
    assert simulate_step(uses, devices, silent, head=Head(), options=options).energy_j is None


def test_a_slow_coordinator_binds_and_moves_fewer_bytes() -> None:
    free = simulate_step(uses, devices, found, head=Head(), options=options)
    slow = Head(egress_bytes_per_s=2e6, ingress_bytes_per_s=2e6)
    bound = simulate_step(uses, devices, found, head=slow, options=options)
    bound, free = bound.plan, free.plan
    assert bound.seconds > 2 * free.seconds and bound.down_bytes <= free.down_bytes
    assert bound.bindings.get("egress", 0) + bound.bindings.get("ingress", 0) > 0.5
    assert bound.egress_bytes_per_s <= 2e6 * 1.001


def test_devices_without_the_memory_end_it_with_a_reason() -> None:
    tiny = tile_devices([replace(machine, memory_bytes=10.0) for machine in found], num_in_flight=3)
    with pytest.raises(RoundFailed, match=r"2048 x 512 x 1024 cannot be spread: no device has the memory"):
        simulate_step(uses, tiny, found, head=Head(), options=options)


def test_the_scheduler_takes_the_time_that_is_simulated() -> None:
    """The shipping `TileBag` with real matrices on devices of these rates, on a clock of events."""
    product = whole_numbers(512, 256, 384)
    played = [
        Played(m.id, down=m.down_bytes_per_s / 100, up=m.up_bytes_per_s / 100, flops=m.flops / 100) for m in found
    ]
    times = TileTimes(num_in_flight=3)
    fleet = [times.device(each.info) for each in played]
    once = Options(num_tiles=1, least_side=16)  # these devices are sent all factors anew with each tile
    plan = cheapest(Product(m=512, n=256, q=384), fleet, Head(), once)
    bag = TileBag(product, [(t.device, Box(*t[1:7])) for t in plan.tiles], terms=terms(), times=times, secret=1)
    assert play(bag, played) == pytest.approx(plan.first_s, rel=0.1)


def test_orphans_take_the_survivors_less_than_the_product() -> None:
    step = simulate_step(uses, devices, found, head=Head(), options=options)
    plan = step.plan.planned[0].plan
    lost = {devices[3].id}
    survivors = [device for device in devices if device.id not in lost]
    dealt = deal_again(plan, lost, survivors)
    rest = boxes_of([tile for tile in plan.tiles if tile.device not in lost])
    boxes = np.concatenate((rest, np.array([box for _, box in dealt])))
    assert tiling_fault(boxes, (0, plan.product.m, 0, plan.product.q, 0, plan.product.n)) == ""
    assert not lost & {lane.id for lane, _ in dealt} and len({lane.id for lane, _ in dealt}) > 3
    alone = orphans_s(plan, lost, survivors, Head())
    assert 0 < alone < plan.first_s
    assert orphans_s(plan, set(), survivors, Head()) == 0.0
    share = sum(t.down_bytes for id, t in plan.loads.items() if id in lost)
    assert orphans_s(plan, lost, survivors, Head(egress_bytes_per_s=share / 100)) > 100  # sent once at least


def test_the_scheduler_gives_lost_tiles_to_the_same_devices() -> None:
    """The shipping `TileBag` loses a device at once, and others have nothing else to do."""
    product = whole_numbers(256, 128, 192)
    played = [Played(WorkerId(f"d{i}"), flops=1e8 * (1 + i)) for i in range(4)]
    times = TileTimes(num_in_flight=3)
    fleet = [times.device(each.info) for each in played]
    plan = cheapest(Product(m=256, n=128, q=192), fleet[:1], Head(), Options(least_side=16))
    placed = [(tile.device, Box(*tile[1:7])) for tile in plan.tiles]
    bag = TileBag(product, placed, terms=terms(), times=times, secret=1)
    sent = [*bag.issue(tuple(each.info for each in played[1:]), 0.0)]
    dealt = deal_again(plan, {played[0].id}, fleet[1:])
    firsts = {id: {piece.label for worker, piece in sent if worker == id} for id in {worker for worker, _ in sent}}
    for id, labels in firsts.items():
        own = [box for lane, box in dealt if lane.id == id][: len(labels)]
        assert labels == {
            label for label in labels if any(f"[{b.row0}:{b.row1}, {b.col0}:{b.col1}]" in label for b in own)
        }
    assert set(firsts) == {lane.id for lane, _ in dealt}


def test_recovery_is_set_beside_a_pipeline() -> None:
    step = simulate_step(uses, devices, found, head=Head(), options=options)
    model = LayeredModel(
        num_layers=4, layer_params=1e6, head_params=0.0, hidden_dim=512, num_heads=4, num_sequences=8, seq_len=256
    )  # fmt: skip
    row = quickest(pipelines(model, devices))
    times = recovery_times(step, devices, Head(), row, num_lost=2, seed=0)
    again = recovery_times(step, devices, Head(), row, num_lost=2, seed=0)
    assert times == again
    assert 0 < times.tiles_s <= times.worst_tiles_s
    assert times.reload_s is not None and times.reload_s > 0 and times.replay_s is not None
    assert times.pipeline_s == times.reload_s + times.replay_s
    assert times.ratio == pytest.approx(times.pipeline_s / times.tiles_s)
    assert recovery_times(step, devices, Head(), None, num_lost=1, seed=0).ratio is None


def test_a_fleet_of_another_size_has_the_same_mixture() -> None:
    other = replace(phones, name="board", count=4)
    assert [d.count for d in resized([phones, other], 64)] == [48, 16]
    assert [d.count for d in resized([phones, other], 3)] == [2, 1]
    assert [d.count for d in resized([phones, other], 1)] == [1]
    large: list[Machine] = machines(resized([phones], 40), seed=1)
    assert [m.flops for m in large[:12]] == [m.flops for m in found]  # the same ones, and more


def test_a_chart_of_many_points_in_a_narrow_range_has_round_marks() -> None:
    points = tuple((100.0 + 7 * i, 5.1 - 0.07 * i) for i in range(20))
    root = ElementTree.fromstring(
        charts_svg([Chart(title="", x_name="s", y_name="nats", lines=(Line(name="a", points=points),))])
    )
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"4", "5"} <= set(texts) and "200" in texts and "107" not in texts


def test_no_two_lines_of_a_chart_look_alike() -> None:
    lines = tuple(Line(name=str(i), points=((1.0, 2.0), (2.0, 3.0))) for i in range(18))
    root = ElementTree.fromstring(charts_svg([Chart(title="", x_name="s", y_name="nats", lines=lines)]))
    drawn = [{**e.attrib, "points": ""} for e in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(drawn) == 18 and len({tuple(sorted(each.items())) for each in drawn}) == 18


def test_charts_are_drawn_to_scale() -> None:
    chart = Chart(
        title="time & <devices>", x_name="devices", y_name="seconds",
        lines=(Line(name="a", points=((64, 100.0), (256, 10.0), (1024, 1.0))), Line(name="b", points=((64, 10.0),))),
    )  # fmt: skip
    empty = Chart(title="none", x_name="x", y_name="y", lines=())
    root = ElementTree.fromstring(charts_svg([chart, empty]))
    space = "{http://www.w3.org/2000/svg}"
    texts = [e.text for e in root.iter(f"{space}text")]
    assert "time & <devices>" in texts and "1,024" in texts and "none" not in texts
    line, _ = root.iter(f"{space}polyline")
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert places[0][0] < places[1][0] < places[2][0] and places[0][1] < places[1][1] < places[2][1]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[1][1] - places[0][1] == pytest.approx(places[2][1] - places[1][1], abs=0.2)
    other = list(root.iter(f"{space}circle"))[4]  # after the key's own mark
    assert float(other.attrib["cy"]) == pytest.approx(places[1][1], abs=0.1)
