"""The states that a run can go on from: the last committed one, and earlier ones when that is lost or no good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from potluck.clock import Lanes
from potluck.coordinator.deck import Deck
from potluck.storage.checkpoints import Checkpoints
from potluck.storage.ledger import Ledger
from potluck.storage.params import ParamStore
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import Strategy
from potluck.types.errors import CorruptError
from potluck.types.params import Params

lost_files = "its files are gone"


class Tell(Protocol):
    def __call__(self, kind: str, text: str, **detail: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Past:
    strategy: Strategy
    deck: Deck
    ledger: Ledger
    checkpoints: Checkpoints
    params: ParamStore
    lanes: Lanes
    tell: Tell

    async def last(self, facts: RunFacts) -> State:
        """The last committed state if its files are whole, else that of a checkpoint, to which the ledger goes back.

        The first state where nothing was committed yet; CorruptError where something was and nothing of it is whole.
        """
        stored = await self.lanes.ledger.run(self.ledger.last_state)
        if stored is not None:
            try:
                committed = self.strategy.State.from_json(stored)
                await self.lanes.compute.run(self._verify, committed)
                return committed
            except CorruptError as error:
                return await self._from_checkpoint(str(error))
        if await self.lanes.compute.run(self.checkpoints.names):
            return await self._from_checkpoint("the ledger knows no round")
        return self.strategy.init(facts)

    async def before(self, good_round: int, facts: RunFacts) -> tuple[State, Any]:
        """The newest checkpoint of at most that round, else the oldest, else the first state; and its deal of the data.

        Checkpoints that are no good are removed: a process that dies before the ledger has gone back finds out once
        more.
        """

        def read() -> tuple[dict[str, Any], dict[str, Params]] | None:
            self.checkpoints.remove_where(lambda content: content["state"]["round"] > good_round)
            return self.checkpoints.load_latest()

        found = await self.lanes.compute.run(read)
        return self._state_of(*found) if found else (self.strategy.init(facts), self.deck.fresh())

    def _verify(self, state: State) -> None:
        for handle in state.handles():
            self.params.check(handle)

    async def _from_checkpoint(self, reason: str) -> State:
        found = await self.lanes.compute.run(self.checkpoints.load_latest)
        for skipped in self.checkpoints.skipped:
            self.tell("note", skipped)
        if found is None:  # to start again is for people to decide: there may be a copy
            known = await self.lanes.ledger.run(self.ledger.last_state)
            lost = f"its {known['round']} committed rounds" if known else "the rounds that it had committed"
            skipped = "".join(f"; {text}" for text in self.checkpoints.skipped)
            raise CorruptError(
                f"the run in {self.checkpoints.folder.parent} has lost {lost}: {reason}; no checkpoint is whole"
                f"{skipped}; put a copy of its folders params or checkpoints back, or move the whole run folder away "
                "and start again"
            )
        state, deal = self._state_of(*found)
        await self.lanes.ledger.run(self.ledger.roll_back, state.round, deal, lost_files)
        self.tell("note", f"{reason}; going back to the checkpoint of round {state.round}", round=state.round)
        return state

    def _state_of(self, manifest: dict[str, Any], handles: dict[str, Params]) -> tuple[State, Any]:
        """The state of a checkpoint that was read, and the deal of the data then."""
        state = self.strategy.State.from_json(manifest["state"])
        named = state.named_handles()
        state = state.moved({named[name]: handle for name, handle in handles.items() if name in named})
        return state, self.deck.reclaimed(manifest["deal"])
