"""Pieces as frames: what is put together again, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from potluck.codecs.bundle import pack_tensors, tensors_in
from potluck.protocol.frames import unpack_data
from potluck.transport.pieces import (
    FRAME_BYTES,
    LEAST_FRAME_BYTES,
    MAX_PARTIAL,
    Joined,
    PieceJoiner,
    PieceReply,
    PieceRequest,
    piece_frames,
    withdraw_frame,
    withdrawn,
)
from potluck.types.errors import CorruptError


def joiner(most_bytes: int = 1 << 24) -> PieceJoiner:
    ticks = itertools.count()
    return PieceJoiner(lambda _: most_bytes, lambda: float(next(ticks)))


def request(num_values: int = 100_000) -> PieceRequest:
    bundle = pack_tensors({"a/values": torch.arange(float(num_values))})
    return PieceRequest(
        id=7, task="t", arguments={"n": 3, "flag": True}, operands={"a": "", "b": "w@1"}, kept=frozenset({"b"}),
        memory_bytes=9, bundle=bundle,
    )  # fmt: skip


def joined(message: PieceRequest | PieceReply, into: PieceJoiner) -> Joined:
    found = [into.add(*unpack_data(frame)) for frame in piece_frames(message)]
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] is not None
    return found[-1]


def test_a_request_comes_as_it_was_sent_and_tells_how_long_it_took() -> None:
    sent = request()
    got = PieceRequest.read(joined(sent, joiner()))
    assert (got.task, got.arguments, got.operands, got.kept, got.memory_bytes) == (
        "t", {"n": 3, "flag": True}, {"a": "", "b": "w@1"}, {"b"}, 9,
    )  # fmt: skip
    assert torch.equal(tensors_in(got.bundle)["a/values"], torch.arange(100_000.0))
    assert got.arrival.num_bytes == len(sent.bundle) - FRAME_BYTES
    assert got.arrival.seconds == 1.0


def test_replies() -> None:
    result = PieceReply(id=7, seconds=0.5, bundle=pack_tensors({"c": torch.ones(3)}))
    assert PieceReply.read(joined(result, joiner())).seconds == 0.5
    assert PieceReply.read(joined(PieceReply(id=7, missing=("b",)), joiner())).missing == ("b",)
    failed = PieceReply.read(joined(PieceReply(id=7, error="no", declined=True), joiner()))
    assert (failed.error, failed.declined) == ("no", True)


def test_withdrawn() -> None:
    head, _ = unpack_data(withdraw_frame([1, 2]))
    assert withdrawn(head) == [1, 2]
    for wrong in (None, "x", ["a"], list(range(5000))):
        with pytest.raises(CorruptError):
            withdrawn({"withdraw": wrong})


@pytest.mark.parametrize(
    "head",
    [
        {}, {"piece": 1}, {"piece": "1", "offset": 0, "total": 4}, {"piece": 1, "offset": -1, "total": 4},
        {"piece": 1, "offset": 5, "total": 4}, {"piece": 1, "offset": 2, "total": 4},
        {"piece": 1, "offset": 0, "total": 1 << 40}, {"piece": 1, "offset": 0, "total": 2},
    ],
)  # fmt: skip
def test_heads_that_make_no_sense_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        joiner().add(head, memoryview(b"1234"))


@pytest.mark.parametrize(
    "change",
    [
        {"task": 3}, {"arguments": {"n": [1]}}, {"operands": {}}, {"operands": {"a": 3}}, {"kept": ["c"]},
        {"operands": {"a": "x" * 1000}}, {"memory": -1}, {"memory": "1"},
    ],
)  # fmt: skip
def test_requests_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    got = joined(request(10), joiner())
    with pytest.raises(CorruptError):
        PieceRequest.read(Joined(got.id, {**got.head, **change}, got.data, got.arrival))


@pytest.mark.parametrize(
    "head", [{}, {"seconds": "1"}, {"seconds": -1.0, "down": [0, 0]}, {"missing": []}, {"error": ""}]
)
def test_replies_that_make_no_sense_are_refused(head: dict[str, Any]) -> None:
    got = joined(PieceReply(id=7, seconds=0.5, bundle=pack_tensors({"c": torch.ones(3)})), joiner())
    with pytest.raises(CorruptError):
        PieceReply.read(Joined(got.id, head, got.data, got.arrival))


def test_only_so_many_are_kept_in_part_and_none_that_nobody_wants() -> None:
    into, total, part = joiner(), 2 * LEAST_FRAME_BYTES, memoryview(bytes(LEAST_FRAME_BYTES))
    for _ in range(2):
        for id in range(MAX_PARTIAL):
            assert into.add({"piece": id, "offset": 0, "total": total}, part) is None
        with pytest.raises(CorruptError, match="in part"):
            into.add({"piece": 99, "offset": 0, "total": total}, part)
        into.drop([*range(MAX_PARTIAL), 99])
    with pytest.raises(CorruptError, match="no more than"):
        into.add({"piece": 5, "offset": 0, "total": total}, part[:-1])
    nobody = joiner(0)
    for id in range(2 * MAX_PARTIAL):
        assert nobody.add({"piece": id, "offset": 0, "total": total}, part) is None
