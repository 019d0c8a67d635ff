"""A coordinator that dies while the model is validated, as workers have begun the rounds after it."""

from __future__ import annotations

from potluck.contract import checks
from potluck.coordinator.plan import ValidationConfig
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig


def test_workers_validate_though_nobody_has_asked_yet_for_what_they_did_since() -> None:
    """Work that was begun early is taken once its round is run again, which is after the validation."""
    config = StreamingDiLoCoConfig(num_inner_steps=6, num_fragments=2, overlap_steps=4)

    def seconds(*, dies: bool) -> float:
        async def disturb(world: World) -> None:
            while sum(event.kind == "round" for event in world.events) < 3:
                await world.clock.sleep(0.005)
            if dies:
                await world.crash_coordinator()
                await world.start()

        problem = Problem(num_rounds=5, validating=ValidationConfig(every_rounds=1))
        got = checks.run(problem, lambda: StreamingDiLoCo(config), num_workers=2, disturb=disturb)
        assert sorted(got.losses) == list(range(6))
        assert not any("no progress" in text for _, text in got.trace)
        return got.trace[-1][0] - got.trace[0][0]

    assert seconds(dies=True) < seconds(dies=False) + 3.0
