import numpy as np

from potluck.data.epoch import epoch_order, permutation, shard_order


def test_the_order_is_pinned() -> None:
    """Every machine must read the same order: these numbers never change."""
    assert permutation("a", 8).tolist() == [2, 0, 1, 7, 4, 5, 6, 3]
    assert epoch_order(1, 0, "sha256:ab", 6).tolist() == [2, 0, 3, 5, 1, 4]
    assert shard_order(1, 0, 6).tolist() == [3, 0, 4, 1, 5, 2]


def test_every_item_appears_once() -> None:
    for n in (0, 1, 2, 1000):
        assert sorted(epoch_order(3, 2, "s", n).tolist()) == list(range(n))


def test_seed_epoch_and_name_all_matter() -> None:
    orders = [epoch_order(s, e, n, 50) for s, e, n in ((1, 0, "a"), (2, 0, "a"), (1, 1, "a"), (1, 0, "b"))]
    assert len({tuple(o.tolist()) for o in orders}) == 4
    assert orders[0].dtype == np.int64
