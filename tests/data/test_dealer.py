import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.data.dealer import Dealer, DealState
from potluck.data.shards import Shard, Span, held_out_parts


def dealer_of(*sizes: int, seed: int = 1) -> Dealer:
    return Dealer([Shard(name=f"s{i}", num_sequences=n) for i, n in enumerate(sizes)], seed=seed)


def sequences(spans: tuple[Span, ...] | list[Span]) -> list[tuple[int, str, int]]:
    return [(s.epoch, s.shard, i) for s in spans for i in range(s.start, s.stop)]


def test_a_worker_reads_on_in_its_shard_and_then_takes_the_next() -> None:
    dealer, state = dealer_of(4, 4, 4), DealState()
    state, first = dealer.deal(state, "a", 3)
    state, other = dealer.deal(state, "b", 2)
    state, second = dealer.deal(state, "a", 3)
    assert [(s.start, s.stop) for s in first] == [(0, 3)]
    assert [(s.start, s.stop) for s in second] == [(3, 4), (0, 2)]
    assert second[0].shard == first[0].shard
    assert len({first[0].shard, other[0].shard, second[1].shard}) == 3


def test_returned_spans_are_dealt_first_and_to_anyone() -> None:
    dealer, state = dealer_of(8, 8), DealState()
    state, lost = dealer.deal(state, "a", 5)
    state = dealer.settle(state, lost, consumed=False)
    state, again = dealer.deal(state, "b", 5)
    assert again == lost


def test_what_nobody_has_any_more_is_dealt_again() -> None:
    dealer, state = dealer_of(8, 8), DealState()
    state, first = dealer.deal(state, "a", 5)
    state, second = dealer.deal(state, "b", 3)
    state = dealer.settle(state, second, consumed=True).reclaimed()
    (count,) = dealer.account(state)
    assert (count.consumed, count.outstanding, count.left) == (3, 0, 13)
    _, again = dealer.deal(state, "c", 5)
    assert again == first


def test_a_part_of_a_span_can_be_settled() -> None:
    dealer, state = dealer_of(8), DealState()
    state, (span,) = dealer.deal(state, "a", 6)
    done = Span(shard=span.shard, start=1, stop=4, epoch=span.epoch)
    state = dealer.settle(state, [done], consumed=True)
    (count,) = dealer.account(state)
    assert (count.consumed, count.outstanding, count.left) == (3, 3, 2)
    with pytest.raises(AssertionError, match="are not outstanding"):
        dealer.settle(state, [span], consumed=True)


def test_a_worker_that_leaves_gives_back_the_rest_of_its_shard() -> None:
    dealer, state = dealer_of(8), DealState()
    state, _ = dealer.deal(state, "a", 2)
    state = dealer.release(state, "a")
    state, others = dealer.deal(state, "b", 6)
    assert [(s.start, s.stop, s.epoch) for s in others] == [(2, 8, 0)]
    assert dealer.release(state, "nobody") == state


def test_the_last_shards_rest_is_shared() -> None:
    dealer, state = dealer_of(16), DealState()
    state, _ = dealer.deal(state, "a", 4)
    state, taken = dealer.deal(state, "b", 6)
    assert [(s.start, s.stop) for s in taken] == [(10, 16)]
    state, rest = dealer.deal(state, "a", 6)
    assert [(s.start, s.stop, s.epoch) for s in rest] == [(4, 10, 0)]


def test_a_new_epoch_opens_when_nothing_is_left_and_the_old_one_is_still_finished() -> None:
    dealer, state = dealer_of(4), DealState()
    state, old = dealer.deal(state, "a", 4)
    state, new = dealer.deal(state, "b", 2)
    assert {s.epoch for s in new} == {1}
    state = dealer.settle(state, old, consumed=False)
    state, again = dealer.deal(state, "b", 4)
    assert again == old
    state = dealer.settle(state, (*again, *new), consumed=True)
    assert state.num_done == 1
    assert [(c.epoch, c.consumed, c.left) for c in dealer.account(state)] == [(1, 2, 2)]


def test_every_epoch_has_an_order_of_its_own() -> None:
    dealer, state = dealer_of(*[2] * 20), DealState()
    orders: list[list[str]] = []
    for _ in range(2):
        state, spans = dealer.deal(state, "a", 40)
        orders.append([s.shard for s in spans])
        state = dealer.settle(state, spans, consumed=True)
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert state == DealState((), 2)


def test_listed_spans_carry_the_files_digest() -> None:
    dealer = Dealer([Shard(name="a.npy", num_sequences=3, digest="sha256:00")], seed=1)
    _, (span,) = dealer.deal(DealState(), "w", 2)
    assert (span.shard, span.digest) == ("a.npy", "sha256:00")


def test_shards_must_have_names_of_their_own() -> None:
    with pytest.raises(AssertionError, match="one name"):
        Dealer([Shard(name="a", num_sequences=1), Shard(name="a", num_sequences=1)], seed=1)


actions = st.lists(
    st.tuples(
        st.sampled_from(["deal", "deal", "deal", "consume", "return", "part", "release"]),
        st.sampled_from("abcd"),
        st.integers(1, 13),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), actions, st.integers(0, 3))
def test_each_sequence_is_consumed_exactly_once_per_epoch(
    sizes: list[int], steps: list[tuple[str, str, int]], seed: int
) -> None:
    dealer, state = dealer_of(*sizes, seed=seed), DealState()
    everything = {(f"s{i}", n) for i, size in enumerate(sizes) for n in range(size)}
    out: list[Span] = []
    consumed: Counter[tuple[int, str, int]] = Counter()

    def check() -> None:
        held = Counter(sequences(out))
        assert all(n == 1 for n in held.values()), "dealt twice at a time"
        assert all(n == 1 for n in consumed.values()) and not held.keys() & consumed.keys(), "consumed twice"
        assert DealState.from_json(json.loads(json.dumps(state.to_json()))) == state
        for count in dealer.account(state):
            assert count.consumed == sum(1 for e, _, _ in consumed if e == count.epoch)
            assert count.outstanding == sum(1 for e, _, _ in held if e == count.epoch)
            assert count.left == len(everything) - count.consumed - count.outstanding >= 0
        for epoch in range(state.num_done):
            assert {(s, i) for e, s, i in consumed if e == epoch} == everything, "an epoch ended early"

    for action, worker, n in steps:
        if action == "deal":
            again = dealer.deal(state, worker, n)
            state, spans = dealer.deal(state, worker, n)
            assert again == (state, spans), "not deterministic"
            assert sum(s.num_sequences for s in spans) == n
            out += spans
        elif action == "release":
            state = dealer.release(state, worker)
        elif out:
            span = out.pop(n % len(out))
            if action == "part" and span.num_sequences > 1:
                middle = span.start + 1 + n % (span.num_sequences - 1)
                first, rest = (
                    Span(shard=span.shard, start=a, stop=b, epoch=span.epoch)
                    for a, b in ((span.start, middle), (middle, span.stop))
                )
                out.append(rest)
                span = first
            state = dealer.settle(state, [span], consumed=action != "return")
            if action != "return":
                consumed.update(sequences([span]))
        check()
    # Whatever happened: consume what is out, and the open epochs come to their end.
    state = dealer.settle(state, out, consumed=True)
    consumed.update(sequences(out))
    out = []
    last = state.num_done + len(state.epochs)
    while state.num_done < last:
        state, spans = dealer.deal(state, "a", 1)
        state = dealer.settle(state, spans, consumed=True)
        consumed.update(sequences(spans))
    check()


def test_the_state_stays_small() -> None:
    """40 workers at work in 2,000 shards: the state names ranges, not sequences."""
    dealer, state = dealer_of(*[64] * 2000), DealState()
    for round in range(20):
        spans: list[Span] = []
        for worker in range(40):
            state, dealt = dealer.deal(state, f"worker-{worker:03d}", 37)
            spans += dealt
        state = dealer.settle(state, spans[: len(spans) // 2], consumed=False)
        state = dealer.settle(state, spans[len(spans) // 2 :], consumed=True)
        assert len(json.dumps(state.to_json())) < 8000, round


def test_held_out_parts_cover_everything_once() -> None:
    shards = (Shard(name="a", num_sequences=130), Shard(name="b", num_sequences=3, digest="d"))
    parts = held_out_parts(shards, max_sequences=64)
    assert [(p.shard, p.start, p.stop, p.digest) for p in parts] == [
        ("a", 0, 64, ""), ("a", 64, 128, ""), ("a", 128, 130, ""), ("b", 0, 3, "d"),
    ]  # fmt: skip
