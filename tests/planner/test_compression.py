"""Who compresses how much: cases by hand, and what must hold whatever the fleet."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from potluck.codecs.base import codec_names
from potluck.planner.compression import Candidate, Choice, CompressionConfig, Sender, choose
from potluck.types.errors import RecipeError
from potluck.types.ids import WorkerId

fp32 = Candidate(name="fp32", ratio=1.0, distortion=0.0)
bf16 = Candidate(name="bf16", ratio=0.5, distortion=1e-6)
int8 = Candidate(name="int8", ratio=0.25, distortion=1e-4)
int4 = Candidate(name="int4", ratio=0.125, distortion=2e-2)
usual = (fp32, bf16, int8)
num_params = 1_000_000  # 4 MB in fp32


def sender(name: str, rate: float, compute_s: float = 0.0, *, current: str = "", **encode: float) -> Sender:
    return Sender(
        id=WorkerId(name), up_bytes_per_s=rate, compute_s=compute_s, current=current, encode_bytes_per_s=encode
    )


def chosen(senders: Sequence[Sender], candidates: Sequence[Candidate] = usual, bound: float = 1e-3) -> list[str]:
    found = choose(senders, candidates, num_params=num_params, max_distortion=bound)
    return [found[s.id].codec for s in senders]


def test_the_slow_link_compresses_and_the_fast_one_does_not() -> None:
    # slow: 40, 20 or 10 s, so the round is 10 s; fast: 4 s in fp32.
    senders = [sender("slow", 1e5), sender("fast", 1e6)]
    assert chosen(senders) == ["int8", "fp32"]
    found = choose(senders, usual, num_params=num_params, max_distortion=1e-3)
    assert found[WorkerId("slow")] == Choice(
        codec="int8", round_s=10.0, reason="slow: int8, which at 0.8 Mbit/s up saves 30 s of 40 s with fp32"
    )
    assert found[WorkerId("fast")] == Choice(
        codec="fp32", round_s=4.0, reason="fast: fp32, since the round of 10 s does not wait for its 8 Mbit/s up"
    )


def test_only_as_much_as_the_round_asks_for() -> None:
    # middle: 16, 8 or 4 s against a round of 10 s.
    assert chosen([sender("slow", 1e5), sender("middle", 2.5e5)]) == ["int8", "bf16"]


def test_a_slow_machine_on_a_fast_link_sets_the_round() -> None:
    # The best of `computes` is 100 s and a bit; fp32 over the slow link takes 40 s.
    assert chosen([sender("computes", 1e9, 100.0), sender("slow", 1e5)]) == ["fp32", "fp32"]


def test_a_codec_that_encodes_too_slowly_is_not_worth_it() -> None:
    # int8: 1 s over the link and 8 s to encode; bf16: 2 s and 0.
    assert chosen([sender("board", 1e6, int8=5e5)]) == ["bf16"]


def test_less_than_a_tenth_is_not_worth_a_change() -> None:
    # 100 s of compute and 4 s in fp32: int8 would save 3 s of 104.
    found = choose([sender("w", 1e6, 100.0)], usual, num_params=num_params, max_distortion=1e-3)[WorkerId("w")]
    assert found.codec == "fp32"
    assert found.reason == "w: fp32, since int8 would save only 3 s of 104 s"


def test_a_change_back_needs_a_tenth_to_spare() -> None:
    # The round is 10 s. At 420 kB/s fp32 takes 9.52 s: too close to change to, close enough to stay with.
    slow = sender("slow", 1e5, current="int8")
    assert chosen([slow, sender("w", 4.2e5, current="bf16")]) == ["int8", "bf16"]
    assert chosen([slow, sender("w", 4.2e5, current="fp32")]) == ["int8", "fp32"]
    assert chosen([slow, sender("w", 5.0e5, current="bf16")]) == ["int8", "fp32"]


def test_the_bound_is_kept() -> None:
    assert chosen([sender("slow", 1e4)], (*usual, int4)) == ["int8"]
    assert chosen([sender("slow", 1e4)], (*usual, int4), bound=0.1) == ["int4"]
    assert chosen([sender("slow", 1e4, current="int4")], (*usual, int4)) == ["int8"]  # the bound was lowered
    with pytest.raises(RecipeError, match=r"max_distortion = 1e-05; the best, int8, has 0.0001; raise the bound"):
        chosen([sender("slow", 1e4)], (int8, int4), bound=1e-5)


def test_an_unknown_link_begins_small_and_keeps_what_it_has() -> None:
    assert chosen([sender("new", 0.0), sender("back", 0.0, current="bf16"), sender("w", 1e6)]) == [
        "int8", "bf16", "int8",
    ]  # fmt: skip
    blind = choose([sender("new", 0.0)], usual, num_params=num_params, max_distortion=1e-3)[WorkerId("new")]
    assert blind.round_s == math.inf
    assert blind.reason == "new: int8, since its uplink is not measured yet"


def test_all_share_the_coordinator_s_way_in() -> None:
    # 4 workers at 10 MB/s into 1 MB/s: 250 kB/s each, 16 s in fp32.
    senders = [sender(str(i), 1e7) for i in range(4)]
    found = choose(senders, usual, num_params=num_params, max_distortion=1e-3, ingress_bytes_per_s=1e6)
    assert {c.codec for c in found.values()} == {"int8"}
    assert {c.round_s for c in found.values()} == {4.0}


def fleet(chance: random.Random) -> list[Sender]:
    rate = [10 ** chance.uniform(3, 9) for _ in range(chance.randint(1, 8))]
    return [sender(f"w{i}", r, 10 ** chance.uniform(-2, 3)) for i, r in enumerate(rate)]


@pytest.mark.parametrize("seed", range(60))
def test_what_always_holds(seed: int) -> None:
    chance = random.Random(seed)
    candidates = chance.sample((*usual, int4), k=4)
    ratios = {c.name: c.ratio for c in candidates}
    bound = chance.choice((0.0, 1e-5, 1e-3, 0.1))
    senders = fleet(chance)

    def of(given: Sequence[Sender]) -> dict[WorkerId, Choice]:
        return choose(given, candidates, num_params=num_params, max_distortion=bound)

    found = of(senders)
    assert found == of(senders[::-1])  # deterministic, whatever the order
    distortions = {c.name: c.distortion for c in candidates}
    assert all(distortions[c.codec] <= bound for c in found.values())
    # Two alike but for the link: the slower one never gets the larger codec.
    base, current = senders[0], chance.choice(["", *(n for n, d in distortions.items() if d <= bound)])
    pair = [
        Sender(id=WorkerId(name), up_bytes_per_s=base.up_bytes_per_s * f, compute_s=base.compute_s, current=current)
        for name, f in (("slower", 1.0), ("faster", 10 ** chance.uniform(0, 3)))
    ]
    both = of([*senders, *pair])
    assert ratios[both[WorkerId("slower")].codec] <= ratios[both[WorkerId("faster")].codec]
    # Nothing is gained by asking again: what was chosen stays.
    again = of([Sender(**{**vars(s), "current": found[s.id].codec}) for s in senders])
    assert {i: c.codec for i, c in again.items()} == {i: c.codec for i, c in found.items()}


def test_the_section_of_a_recipe() -> None:
    assert CompressionConfig().mode == "fixed"
    assert set(CompressionConfig().candidates) <= set(codec_names())
    with pytest.raises(ValueError, match="'int9' is not a codec; did you mean 'int8'"):
        CompressionConfig(candidates=("fp32", "int9"))
    with pytest.raises(ValueError, match="at least 1 item"):
        CompressionConfig(candidates=())


def test_an_absurd_claim_lengthens_nobody_s_round() -> None:
    """Who says that its link or its codecs are slow beyond measure, and answered in 3 s."""
    honest = sender("honest", 1e5, current="int8")  # 10 s in int8, 40 s in fp32
    for lie in (sender("liar", 1e-18), sender("liar", 1e9, fp32=1e-18, bf16=1e-18, int8=1e-18)):
        assert chosen([honest, lie])[0] == "fp32"  # nothing is known of it yet
        assert chosen([honest, replace(lie, longest_s=3.0)])[0] == "int8"
    assert chosen([replace(honest, longest_s=3.0), replace(lie, longest_s=3.0)])[0] == "int8"
