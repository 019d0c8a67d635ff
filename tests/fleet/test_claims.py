"""Invented progress ends: what is believed is what a lease can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.fleet.claims import Claims, claims_of, max_repeats, max_turns
from potluck.protocol import pb
from potluck.storage.objects import ObjectStore
from potluck.types.params import Layout

mib = 1 << 20


def believed(claims: Claims, says: list[tuple[str, int]]) -> int:
    return sum(claims.is_progress(*each) for each in says)


def test_what_an_honest_worker_says_is_believed_also_when_it_begins_again() -> None:
    claims = Claims(most_steps=10, most_bytes=12 * mib)
    once = [
        *(("downloading", n * mib) for n in range(9)),
        *(("training", n) for n in range(11)),
        *(("uploading", n * mib) for n in range(4)),
    ]
    assert believed(claims, once) == len(once)
    assert believed(claims, once) == len(once)
    assert believed(claims, once[:15]) == 15
    assert believed(claims, once[9:15]) == 5  # started again within its training: only where it was is no news


def test_small_objects_one_after_the_other_are_progress() -> None:
    claims = Claims(most_steps=10, most_bytes=80_000)
    assert believed(claims, [("downloading", n) for _ in range(8) for n in (0, 10_000)]) == 1 + 8


@pytest.mark.parametrize(
    "says",
    [
        [("training", n % 2) for n in range(10_000)],
        [("training", n) for n in range(10_000)],
        [("downloading", n % 2 * mib) for n in range(10_000)],
        [("downloading", n) for n in range(10_000)],
        [("uploading", n << 50) for n in range(10_000)],
        [(("training", "downloading")[n % 2], n) for n in range(10_000)],
        [(f"thinking {n}", 0) for n in range(10_000)],
    ],
)
def test_what_is_invented_is_believed_a_bounded_number_of_times(says: list[tuple[str, int]]) -> None:
    claims = Claims(most_steps=10, most_bytes=12 * mib)
    assert believed(claims, says) <= max_turns + max_repeats * 12
    assert not any(claims.is_progress(activity, mark + 10_000) for activity, mark in says[:5])


def test_a_lease_can_have_the_progress_of_its_sequences_and_objects(tmp_path: Path) -> None:
    objects, layout = ObjectStore(tmp_path), Layout.of([("w", (1000,))])
    lease = pb.Lease(num_sequences=12, objects=[objects.put(bytes(5000)), "blake3:" + "0" * 64])
    claims = claims_of(lease, objects, layout)
    assert claims.most_steps == 12
    assert 5000 + 8000 < claims.most_bytes < 5000 + 8000 + 1000
    assert claims_of(pb.Lease(spans=[pb.Span(start=3, stop=8)]), objects, layout).most_steps == 5
