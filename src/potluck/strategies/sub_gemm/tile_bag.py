"""The scheduler of one product: from a plan's tiles to pieces for devices, and at the end C, whole and checked.

A state machine: it waits for nothing, owns no thread, and is told what happens. Its rules:

- A device has as many tiles in flight as its memory and the plan allow; one is always allowed if it fits at all, and
  one that does not fit is cut.
- A tile is late after its predicted time plus slack. Then it is dealt anew to others (`deal.py`), and so is what waited
  behind it, but a reply that comes after all counts if it is the first. After `patience` predictions it is given up on.
  Its device is given nothing, in the next products too, until it answers or has had as long again.
- A tile whose device is gone, has failed or has sent a wrong result is dealt anew. One that failed `most_failures`
  times is the head's, and without a head that computes the round fails with the reasons.
- A device with nothing left to do takes what waits longest elsewhere, and near the end a copy of the slowest tile in
  flight, where it would be done clearly sooner. The head takes what is left where that halves the wait.
- The first valid reply of a tile counts. Others are ignored, and so are those of pieces that were given up on.

C exists only when every element is there exactly once (`assembly.py`). Xue et al. 2025, arXiv:2512.22142, section 4,
re-plan orphans alone too; lateness, copies, checks and bytes in flight are ours.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Lock

import torch
from torch import Tensor

from potluck.planner.tiles.device import TileDevice
from potluck.strategies.bag import Piece
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.deal import Candidates, cut
from potluck.strategies.sub_gemm.holdings import Holdings
from potluck.strategies.sub_gemm.lane import Flight, Lane, Tile
from potluck.strategies.sub_gemm.pieces import Pieces, Terms
from potluck.strategies.sub_gemm.product import Product
from potluck.strategies.sub_gemm.tally import Tally
from potluck.strategies.sub_gemm.times import Stages, TileTimes
from potluck.strategies.sub_gemm.tree import Tree
from potluck.types.errors import InvalidUpdate, RoundFailed
from potluck.types.ids import WorkerId

least_slack_s = 0.25
"""Late by less is noise, whatever was predicted."""
most_doublings = 6
"""Of the slack of a device that was late before."""
patience, least_patience_s = 16.0, 30.0
"""Predictions, and seconds, after which a tile is given up on that was to be back after one."""
least_copy_gain, least_head_gain = 0.25, 0.5
"""Of what is left to wait: a copy that saves less is not worth its bytes, nor the head's work."""
most_at_once = 256
"""Tiles that one call places or hands out: a fleet asks on its event loop, and asks again at once."""
most_lane_failures = 3
"""A device that failed so often gets nothing more of this product."""


class TileBag:
    """C[m, q] of one product, in the boxes that a plan gives to devices. See `strategies/bag.py` for the protocol.

    `issue` raises RoundFailed too: only it knows that nobody is left. ValueError for boxes that are no tiling.
    """

    def __init__(
        self,
        product: Product,
        placed: Iterable[tuple[WorkerId, Box]],
        *,
        terms: Terms,
        times: TileTimes,
        holdings: Holdings | None = None,
        stretch: float = 1.0,
        secret: int | str = 0,
    ) -> None:
        self.product, self.tally = product, Tally()
        self.began_at = self.ended_at = math.nan
        self.predicted_s = 0.0  # when the first tiles were handed out
        self._terms, self._times, self._holdings = terms, times, holdings or Holdings()
        self._pieces = Pieces(product, terms, stretch)
        self._planned = list(placed)
        m, n, q = product.shape
        self._tree = Tree(Box(0, m, 0, q, 0, n), (box for _, box in self._planned), product.a.values.device)
        self._chance = random.Random(secret)
        self._lock = Lock()
        self._lanes: dict[WorkerId, Lane] = {}
        self._here: tuple[WorkerInfo, ...] = ()
        self._orphans: deque[Tile] = deque()
        self._lost: list[tuple[Flight, str]] = []
        self._flights: dict[Piece, Flight] = {}
        self._dropped: list[Piece] = []
        self._awake: dict[Lane, None] = {}  # to be looked at: something about it changed
        self._is_cut_short = False  # `issue` has more than `most_at_once` to do
        self._num_landing = 0
        self._weigh_below = math.inf  # an open volume at which the head is to be weighed against the devices
        self._order = count()
        self._due: list[tuple[float, int, Flight]] = []
        self._alone: list[tuple[float, int, Lane]] = []  # and until when
        self._ends: list[tuple[float, int, Flight]] = []  # the latest first
        self._backlogs: list[tuple[float, int, Lane]] = []  # the longest first

    # What a fleet asks

    @property
    def is_done(self) -> bool:
        """Nothing is missing, or only what the head will compute."""
        return not (self._planned or self._tree.open or self._num_landing)

    @property
    def needs_devices(self) -> bool:
        return math.isinf(self._terms.head.s_per_flop)

    def issue(self, here: Sequence[WorkerInfo], now: float) -> Sequence[tuple[WorkerId, Piece]]:
        with self._lock:
            is_first = self._meet(tuple(here), now)
            self._is_cut_short = bool(self._planned)
            if self._is_cut_short:
                return []
            self._look_for_late(now)
            self._look_at_alone(now)
            self._settle()
            sent = self._hand_out(now)
            if is_first:
                self.predicted_s = max((lane.free_at - now for lane in self._lanes.values()), default=0.0)
            if self._tree.open and not self._flights:
                for lane in self._lanes.values():  # the late ones are better than nobody
                    lane.is_late = False
                sent = self._hand_out(now)
            if self._tree.open and not self._flights:
                self._nobody_left()
            self._weigh_head(now)
            if self.is_done and math.isnan(self.ended_at):
                self.ended_at = now  # the head does it all
            return [(flight.lane.id, flight.piece) for flight in sent if self._is_live(flight)]

    def look_at(self) -> float:
        with self._lock:
            if self._is_cut_short:
                return -math.inf
            while self._due and not self._is_live(self._due[0][2]):
                heapq.heappop(self._due)
            return min(self._due[0][0] if self._due else math.inf, self._alone[0][0] if self._alone else math.inf)

    def dropped(self) -> Sequence[Piece]:
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    # What a fleet tells

    def take(self, worker: WorkerId, piece: Piece, reply: Mapping[str, Tensor], now: float) -> None:
        with self._lock:
            flight = self._flights.get(piece)
            lane = self._lanes.get(worker)
            if lane is not None:
                self._times.answered(worker, in_time=flight is not None and not flight.is_late)
                lane.is_late = self._times.is_silent(worker, now)
                if lane.is_late:
                    self._leave_alone(lane)
                self._awake[lane] = None
            if flight is None or flight.lane is not lane:
                self.tally.num_ignored += 1
                return
            generator = torch.Generator().manual_seed(self._chance.getrandbits(63))
        try:
            values = self._pieces.checked(piece, reply, generator)
        except InvalidUpdate:
            with self._lock:
                self.tally.num_refused += 1
                flight.lane.is_barred = True
                self._take_back(flight.lane)
            raise
        with self._lock:
            if piece not in self._flights:
                self.tally.num_ignored += 1
                return
            self._ground(flight)
            observed_s = flight.lane.replied(flight, now)
            self._push_backlog(flight.lane)
            self._observe(flight, observed_s)
            self.tally.up_bytes[worker] += round(self._terms.sizes.up_bytes(flight.tile.box))
            self._close(flight.tile, now)
            self._num_landing += 1
        try:
            self._land(flight.tile, values, now)
        finally:
            with self._lock:
                self._num_landing -= 1
                self.ended_at = max(now, self.ended_at)

    def lose(self, worker: WorkerId, piece: Piece, reason: str, now: float) -> None:
        with self._lock:
            flight = self._flights.get(piece)
            if flight is not None and flight.lane.id == worker:
                self._ground(flight)
                self._lost.append((flight, reason))

    def result(self) -> Tensor:
        """C, fp32 [m, q], when the bag is done. Computes what was left to the head."""
        assert self.is_done, "a product with missing tiles"
        for tile in self._tree.for_head:
            if not tile.is_closed:
                tile.is_done = True
                self.tally.num_by_head += 1
                self._land(tile, self._pieces.native(tile.box), self.ended_at)
        return self._tree.root.values

    # Devices come and go

    def _meet(self, here: tuple[WorkerInfo, ...], now: float) -> bool:
        """Take note of who is here, and put the plan's tiles where they belong. True once, when all of them are."""
        if here != self._here:
            gone = {worker.id for worker in self._here} - {worker.id for worker in here}
            for id in sorted(gone):
                self._lanes[id].is_here = False
                self._holdings.forget(id)
                self._take_back(self._lanes[id])
            for worker in here:
                lane = self._lanes.get(worker.id)
                if lane is None:
                    lane = self._lanes[worker.id] = Lane(self._device(worker))
                elif lane.is_here:
                    continue
                lane.is_here, lane.is_late = True, self._times.is_silent(worker.id, now)
                if lane.is_late:
                    self._leave_alone(lane)
                self._awake[lane] = None
            self._here = here
        if not self._planned:
            return False
        if math.isnan(self.began_at):
            self.began_at = now
        for id, box in self._planned[:most_at_once]:
            tile, lane = self._tree.add(box), self._lanes.get(id)
            if lane is None or lane.is_late or not self._place(tile, lane, now):
                self._orphans.append(tile)
        del self._planned[:most_at_once]
        return not self._planned

    def _device(self, worker: WorkerInfo) -> TileDevice:
        """With the memory that it has for tiles."""
        device = self._times.device(worker)
        return replace(device, memory_bytes=device.memory_bytes - self._holdings.reserved_bytes(worker.id))

    def _take_back(self, lane: Lane) -> None:
        """What only waits for a device is to go elsewhere."""
        lane.free_at = max((flight.ends_at for flight in lane.flying), default=0.0)
        lane.promised.clear()
        while lane.queue:
            tile, _ = lane.queue.popleft()
            tile.num_queued -= 1
            if tile.is_leaf and not tile.num_places:
                self._orphans.append(tile)

    def _look_for_late(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            flight = heapq.heappop(self._due)[2]
            if not self._is_live(flight):
                continue
            lane, waited_s = flight.lane, now - flight.began_at
            self._weigh_below = math.inf
            if waited_s > max(least_patience_s, patience * (flight.ends_at - flight.began_at)):
                self._observe_late(flight, now)
                self._call_off(flight)
                self._lost.append((flight, f"{lane.id} has not answered in {waited_s:.3g} s"))
                continue
            heapq.heappush(self._due, (now + waited_s, next(self._order), flight))
            if not flight.is_late:
                if not lane.is_late:  # those behind it are late for the same reason
                    self._times.fell_silent(lane.id, waited_s, now)
                flight.is_late = lane.is_late = True
                lane.num_late += 1
                self.tally.num_late += 1
                self._take_back(lane)
            if flight.tile.is_leaf and flight.tile.num_places == 1:
                self._orphans.append(flight.tile)

    def _leave_alone(self, lane: Lane) -> None:
        heapq.heappush(self._alone, (self._times.silent_until(lane.id), next(self._order), lane))

    def _look_at_alone(self, now: float) -> None:
        """Whoever has answered since, and has been left alone for long enough, is of use again."""
        while self._alone and self._alone[0][0] <= now:
            lane = heapq.heappop(self._alone)[2]
            if not lane.is_late or any(flight.is_late for flight in lane.flying):
                continue
            lane.is_late = self._times.is_silent(lane.id, now)
            if lane.is_late:
                self._leave_alone(lane)
            self._awake[lane] = None

    def _settle(self) -> None:
        """What becomes of the tiles that came back without a result."""
        for flight, reason in self._lost:
            tile, lane = flight.tile, flight.lane
            self.tally.num_lost += 1
            if lane.is_here:  # a device that left says nothing about the tile
                lane.num_failures += 1
                lane.is_barred |= lane.num_failures >= most_lane_failures
                tile.num_failures += 1
                tile.failed_on.add(lane)
                tile.reason = reason
            if lane.is_barred:
                self._take_back(lane)
            if tile.is_leaf and not tile.num_places:
                self._orphans.append(tile)
        self._lost.clear()

    def _nobody_left(self) -> None:
        if not math.isinf(self._terms.head.s_per_flop):
            for tile in list(self._tree.open):
                self._leave_to_head(tile)
            return
        tile = next(iter(self._tree.open))
        reason = f"; the last of them failed: {tile.reason}" if tile.reason else ""
        raise RoundFailed(
            f"no device is left that can compute {len(self._tree.open)} tiles of {self._pieces.name}, "
            f"{len(self._here)} are here{reason}; let more join, or the head compute"
        )

    # Tiles find devices

    def _hand_out(self, now: float) -> list[Flight]:
        """What is sent: to every device about which something has changed."""
        self._deal(now)
        sent: list[Flight] = []
        while self._awake and len(sent) < most_at_once:
            lane = next(iter(self._awake))
            del self._awake[lane]
            if lane.is_usable:
                self._fill(lane, now, sent)
                if lane.is_idle and (self._steal(lane, now) or self._copy(lane, now)):
                    self._fill(lane, now, sent)
        self._is_cut_short = bool(self._awake)
        return sent

    def _deal(self, now: float) -> None:
        """Give orphans to whoever would be done with them first, the head included."""
        if not self._orphans:
            return
        candidates = Candidates([lane for lane in self._lanes.values() if lane.is_usable], self._terms.sizes, now)
        orphans, self._orphans = self._orphans, deque()
        for tile in orphans:
            if not tile.is_leaf or tile.num_queued:
                continue
            if tile.num_failures >= self._terms.most_failures and not tile.flights:
                self._hopeless(tile)
            elif not self._deal_one(tile, candidates, now) and not tile.flights:
                self._orphans.append(tile)

    def _deal_one(self, tile: Tile, candidates: Candidates, now: float) -> bool:
        carriers = {flight.lane for flight in tile.flights}
        shares, end = candidates.shares(tile.box, carriers | tile.failed_on)
        if not shares:
            shares, end = candidates.shares(tile.box, carriers)
        if self._head_end(tile, now) <= end and not math.isinf(self._terms.head.s_per_flop):
            self._leave_to_head(tile)
            return True
        if not shares:
            return False
        dealt = cut(tile.box, shares)
        parts = [tile] if len(dealt) == 1 else self._tree.cut(tile, [box for _, box in dealt])
        for part, (lane, _) in zip(parts, dealt, strict=True):
            if self._place(part, lane, now):
                candidates.placed(lane)
            else:  # its memory is too small for any reasonable part
                lane.is_barred = True
                self._take_back(lane)
                self._orphans.append(part)
        return True

    def _place(self, tile: Tile, lane: Lane, now: float) -> bool:
        """Put a tile at the end of a device's queue, in as many parts as its memory asks for; False for none."""
        boxes = self._terms.sizes.fit(tile.box, lane.device.memory_bytes)
        for part in [tile] if len(boxes) == 1 else self._tree.cut(tile, boxes) if boxes else []:
            own = self._stages(lane, part)
            lane.queue.append((part, own))
            lane.promise(own, self._pieces.need(part.box), now)
            part.num_queued += 1
            self._push_backlog(lane)
            self._awake[lane] = None
        return bool(boxes)

    def _fill(self, lane: Lane, now: float, sent: list[Flight]) -> None:
        """Send what waits for a device, as far as it has room."""
        while lane.queue:
            tile, planned = lane.queue[0]
            if tile.is_leaf and not lane.has_room(self._pieces.need(tile.box)):
                return
            lane.queue.popleft()
            tile.num_queued -= 1
            if tile.is_leaf:
                sent.append(self._send(tile, lane, now))
            else:
                lane.give_up(planned)
                self._push_backlog(lane)

    def _send(self, tile: Tile, lane: Lane, now: float) -> Flight:
        piece, need = self._pieces.piece(tile.box), self._pieces.need(tile.box)
        holds = partial(self._holdings.holds, lane.id)
        own = self._pieces.stages(lane.device, tile.box, holds)
        self.tally.down_bytes[lane.id] += round(self._pieces.down_bytes(tile.box, holds))
        as_sent = self._terms.sizes.down / self._terms.sizes.held  # which is how they are kept
        named = {o.name: round(as_sent * need.shards[o.name]) for o in piece.operands.values() if o.name}
        self._holdings.sent(lane.id, named, lane.device.memory_bytes)
        previous = max((flight.ends_at for flight in lane.flying), default=now)
        ends_at = lane.send(own, now)
        slack_s = max(self._times.slack_share(lane.id) * (ends_at - now), least_slack_s) * 2.0 ** min(
            lane.num_late, most_doublings
        )
        flight = Flight(
            tile=tile,
            lane=lane,
            piece=piece,
            need=need,
            stages=own,
            began_at=now,
            ends_at=ends_at,
            predicted_s=ends_at - max(now, previous),
            due_at=ends_at + slack_s,
        )
        self._flights[piece] = flight
        tile.flights[flight] = None
        lane.lift(flight)
        heapq.heappush(self._due, (flight.due_at, next(self._order), flight))
        heapq.heappush(self._ends, (-ends_at, next(self._order), flight))
        self.tally.num_issued += 1
        self.tally.num_reissued += tile.num_issued > 0
        tile.num_issued += 1
        return flight

    def _steal(self, lane: Lane, now: float) -> bool:
        """An idle device takes what waits longest for another, if it is done with it sooner."""
        while self._backlogs:
            free_at, _, victim = self._backlogs[0]
            if -free_at != victim.free_at or not victim.queue:
                heapq.heappop(self._backlogs)
                continue
            tile, planned = victim.queue[-1]
            own = self._stages(lane, tile)
            is_sooner = lane.end_of(own, now) < victim.free_at and lane.has_room(self._pieces.need(tile.box))
            if tile.is_leaf and (not is_sooner or lane in tile.failed_on):
                return False
            victim.queue.pop()
            tile.num_queued -= 1
            victim.give_up(planned)
            self._push_backlog(victim)
            if tile.is_leaf:
                return self._place(tile, lane, now)
        return False

    def _copy(self, lane: Lane, now: float) -> bool:
        """An idle device takes a copy of the slowest tile in flight, if it is done with it clearly sooner."""
        while self._ends:
            flight = self._ends[0][2]
            tile = flight.tile
            if not (self._is_live(flight) and tile.is_leaf and tile.num_places == 1):
                heapq.heappop(self._ends)
                continue
            own, left_s = self._stages(lane, tile), flight.expected_end(now) - now
            is_sooner = lane.end_of(own, now) - now < (1 - least_copy_gain) * left_s
            if not is_sooner or lane in tile.failed_on or not lane.has_room(self._pieces.need(tile.box)):
                return False
            self.tally.num_copies += 1
            return self._place(tile, lane, now)
        return False

    # The head as the last device

    def _head_s(self, volume: int) -> float:
        return 2.0 * volume * self._terms.head.s_per_flop

    def _head_end(self, tile: Tile, now: float) -> float:
        """It begins when everybody else has ended."""
        others = max((-self._ends[0][0] if self._ends else now), now)
        return others + self._head_s(self._tree.head_volume + tile.box.volume)

    def _weigh_head(self, now: float) -> None:
        """The head takes all that is left where it is done in half the time that the devices need."""
        own_s = self._head_s(self._tree.open_volume + self._tree.head_volume)
        if not self._tree.open or math.isinf(own_s):
            return
        if self._tree.open_volume > self._weigh_below:
            return
        self._weigh_below = self._tree.open_volume * 0.9  # a few dozen looks at all tiles in all
        flying = (tile.flights for tile in self._tree.open if tile.flights)
        ends = [min(flight.expected_end(now) for flight in flights) for flights in flying]
        left_s = max([*ends, *(lane.free_at for lane in self._lanes.values() if lane.queue)], default=now) - now
        if own_s < (1 - least_head_gain) * left_s:
            for tile in list(self._tree.open):
                self._leave_to_head(tile)

    def _leave_to_head(self, tile: Tile) -> None:
        self._tree.leave_to_head(tile)
        for flight in list(tile.flights):
            self._call_off(flight)

    def _hopeless(self, tile: Tile) -> None:
        if math.isinf(self._terms.head.s_per_flop):
            raise RoundFailed(
                f"a tile of {self._pieces.name} failed {tile.num_failures} times and {self._terms.most_failures} are "
                f"allowed; the last time: {tile.reason}"
            )
        self._leave_to_head(tile)

    # What is there

    def _close(self, tile: Tile, now: float) -> None:
        """It is there: whoever else has it, or a part of it, need not go on."""
        for each in self._tree.close(tile):
            for flight in list(each.flights):
                self._observe_late(flight, now)
                self._call_off(flight)

    def _call_off(self, flight: Flight) -> None:
        self._ground(flight)
        self._dropped.append(flight.piece)

    def _ground(self, flight: Flight) -> None:
        lane = flight.lane
        del self._flights[flight.piece], flight.tile.flights[flight]
        lane.ground(flight)
        self._awake[lane] = None

    def _observe_late(self, flight: Flight, now: float) -> None:
        """A reply that nobody waits for any more would have taken at least so long; those behind it say nothing."""
        if now > flight.ends_at and flight is next(iter(flight.lane.flying)):
            waited_s = now - max(flight.began_at, flight.lane.replied_at)
            self._observe(flight, waited_s)

    def _observe(self, flight: Flight, observed_s: float) -> None:
        self._times.observe(
            flight.lane.id, flight.stages, predicted_s=flight.predicted_s, observed_s=observed_s, by=flight.lane.device
        )

    def _land(self, tile: Tile, values: Tensor, now: float) -> None:
        """Put a tile where it belongs, and what is complete by it too. Without the lock: it may take long."""
        tile.into.put(tile.box, values)
        while tile.parent is not None and tile.into.is_complete:
            whole = tile.parent
            with self._lock:
                if whole.is_closed:
                    return
                self._close(whole, now)
            whole.into.put(whole.box, tile.into.values)
            tile = whole

    def _stages(self, lane: Lane, tile: Tile) -> Stages:
        """At the end of a device's queue."""
        return self._pieces.stages(
            lane.device,
            tile.box,
            lambda name: name in lane.promised or self._holdings.holds(lane.id, name),
        )

    def _push_backlog(self, lane: Lane) -> None:
        if lane.queue:
            heapq.heappush(self._backlogs, (-lane.free_at, next(self._order), lane))

    def _is_live(self, flight: Flight) -> bool:
        return flight.piece in self._flights
