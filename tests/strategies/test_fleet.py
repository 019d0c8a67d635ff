"""What a round sees of its replies."""

import pytest

from potluck.strategies.fleet import Replies, Reply, share_of, summed
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId


def replies(*losses: object) -> Replies:
    return Replies(
        replies=tuple(
            Reply(worker=WorkerId(f"w{i}"), key=f"k/w{i}", scalars={} if loss is None else {"loss_sum": loss})
            for i, loss in enumerate(losses)
        )
    )


def test_scalars_are_summed_over_the_replies() -> None:
    assert replies(1, 2.5).sum("loss_sum") == summed(replies(1, 2.5).replies, "loss_sum") == 3.5


@pytest.mark.parametrize(
    ("share", "whole", "number"), [(0.55, 20, 11), (0.07, 100, 7), (0.5, 5, 3), (1.0, 7, 7), (1e-12, 4, 1)]
)
def test_a_share_is_rounded_up_and_no_further(share: float, whole: int, number: int) -> None:
    assert share_of(share, whole) == number


@pytest.mark.parametrize("bad", [None, "much"])
def test_a_scalar_that_is_missing_or_no_number_fails_the_round_only(bad: object) -> None:
    with pytest.raises(RoundFailed, match=r"w1 reported .* as loss_sum"):
        replies(1.0, bad).sum("loss_sum")
