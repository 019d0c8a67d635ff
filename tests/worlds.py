"""Whole runs on the virtual clock, for tests of any part."""

from __future__ import annotations

from pathlib import Path

from potluck.clock import InlineExecutor, VirtualClock
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.strategy import Strategy


def virtual_world(problem: Problem, strategy: Strategy, folder: Path) -> World:
    """Within `run_virtual`: nobody is in it yet."""
    return World(problem.plan(strategy), problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
