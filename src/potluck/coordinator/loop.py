"""The coordinator's main loop. A round commits whole or leaves the state as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.strategies.state import State
from potluck.types.errors import RoundFailed

if TYPE_CHECKING:
    from potluck.coordinator.core import Coordinator


async def train(run: Coordinator) -> State:
    """Rounds until the budget is spent or someone stops the run; the last committed state."""
    state = await run.recover()  # the last commit, or the strategy's first state
    await run.validate(state)
    while not run.finished(state):
        await run.fleet.ready(run.num_needed)  # enough workers, never a particular one
        await run.begin(state)
        try:
            proposed = await run.strategy.run_round(state, run.fleet)
            await run.settle(proposed)
            state = await run.commit(state, proposed)  # ledger first, then visible
        except RoundFailed as reason:
            state = await run.discard(state, reason)  # raises after too many in a row, with the last reason
            continue
        await run.save(state)
        await run.validate(state)
    return state
