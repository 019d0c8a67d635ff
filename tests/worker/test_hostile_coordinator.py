"""A coordinator that lies to a worker: it costs tasks or the membership, never the machine or the process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import potluck.strategies.evaluation
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.protocol import pb, version
from potluck.protocol.frames import pack_chunk
from potluck.simulator.exact.networks import Modelled
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Channel, Connection, Peer
from potluck.transport.memory import Link as NetworkLink
from potluck.types.errors import PotluckError, Refused
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction
from potluck.worker.equip import equip
from potluck.worker.link import Link
from potluck.worker.runner import Runner

digest = "sha256:" + "0" * 64
spec: dict[str, Any] = Problem().plan(DiLoCo(DiLoCoConfig(num_inner_steps=1))).spec.model_dump(mode="json")


class Liar:
    """A coordinator by the protocol alone. It says what it is given, then lets the worker go after 5 s."""

    def __init__(
        self, run_json: str, desired: Sequence[bytes], data: Sequence[bytes], object_messages: Sequence[bytes]
    ) -> None:
        self.run_json, self.desired, self.data, self.object_messages = run_json, desired, data, object_messages
        self.errors: set[str] = set()

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes:
        return pb.WelcomeReply(version=version(), run_id="x", run_json=self.run_json).SerializeToString()

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        match method:
            case "Control":
                for message in self.desired:
                    await channel.send(message)
                dismissing = asyncio.create_task(self._dismiss(channel))
                while (message := await channel.receive()) is not None:
                    self.errors |= {result.error for result in pb.Report.FromString(message).results}
                await dismissing
            case "Data":
                for message in self.data:
                    await channel.send(message)
                while await channel.receive() is not None:
                    pass
            case _:
                if not self.object_messages:
                    raise Refused("there is no such object")
                await channel.receive()
                for message in self.object_messages:
                    await channel.send(message)

    async def _dismiss(self, channel: Channel) -> None:
        await asyncio.sleep(5.0)
        await channel.send(pb.Desired(stopping=True, stop_reason="that is \x1b[31mall").SerializeToString())


def worked(
    folder: Path,
    *,
    run_json: str | None = None,
    desired: Sequence[bytes] = (),
    data: Sequence[bytes] = (),
    object_messages: Sequence[bytes] = (),
) -> tuple[str, Liar, list[str]]:
    """Why the work ended, the coordinator, and what was said to the worker's owner."""
    home, told = folder / "a" / "b" / "c", list[str]()
    liar = Liar(run_json or json.dumps(spec), desired, data, object_messages)

    async def main() -> str:
        clock, network = VirtualClock(), Modelled(VirtualClock())
        await network.open(liar)

        async def connect() -> Connection:
            return await network.connect(Peer(id=WorkerId("w")), NetworkLink())

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            return await equip(
                spec, link, folder=home, device="cpu", clock=clock, compute=InlineExecutor(), files=InlineExecutor(),
                note=agent.note, told=told.append, max_memory_bytes=1 << 30,
            )  # fmt: skip

        introduction = Introduction(id=WorkerId("w"), profile=DeviceProfile(device="cpu"))
        agent = Agent(introduction, connect=connect, equip=equipped, clock=clock, told=told.append)
        try:
            await asyncio.wait_for(agent.work(), 60.0)
        except PotluckError as error:
            return f"{type(error).__name__}: {error}"
        return agent.ended

    try:
        return run_virtual(main()), liar, told
    finally:
        assert sorted(p.name for p in folder.rglob("*") if home not in p.parents) in ([], ["a"], ["a", "b", "c"])


def with_spec(**values: Any) -> str:
    return json.dumps({**spec, **values})


def lease(**values: Any) -> bytes:
    """What is wanted: one task, off in the given ways."""
    arguments = {"theta": {"$params": digest}, "num_steps": 1, "progress": [0, 1]}
    given: dict[str, Any] = {
        "key": "inner/w", "task": "diloco.inner", "kind": "pinned", "arguments_json": json.dumps(arguments),
        "num_sequences": 4, "spans": [pb.Span(shard=digest, start=0, stop=4)], **values,
    }  # fmt: skip
    return pb.Desired(leases=[pb.Lease(**given)]).SerializeToString()


@pytest.mark.parametrize(
    "run_json",
    [
        "[" * 50_000, with_spec(run_id="../../evil"), with_spec(run_id=""), with_spec(name="\x1b[2J" * 100),
        with_spec(layout=[["a", [1 << 40]]]), with_spec(layout=[1, None]), with_spec(seq_len=-1),
        with_spec(seq_len=1 << 40), with_spec(heartbeat_s=0), with_spec(heartbeat_s=math.nan),
        with_spec(heartbeat_s=1e300), with_spec(tokenizer_object="../../x"), with_spec(model_config_json={}),
        with_spec(model_config_json={**spec["model_config_json"], "n_embd": 1 << 30, "n_layer": 4000}),
        with_spec(model_config_json={**spec["model_config_json"], "n_embd": -5}),
        with_spec(inner={**spec["inner"], "batch_size": 1 << 40}),
        with_spec(data_access="private", data_options={"text_field": 5}),
        with_spec(strategy="evil.py:Evil", strategy_digest=digest),
        with_spec(adapter={"rank": 1 << 40, "target_modules": ["c_attn"]}),
        with_spec(adapter={"rank": 2, "target_modules": ["c_attn"]}),
        with_spec(base={"precision": "int8", "objects": [{"digest": "../../x", "num_bytes": 1}]}),
        with_spec(base={"precision": "int2", "objects": []}),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_is_left_with_one_sentence(tmp_path: Path, run_json: str) -> None:
    ended, _, told = worked(tmp_path, run_json=run_json)
    kind, _, sentence = ended.partition(": ")
    assert kind in ("Refused", "ModelError", "ResourceError", "DataError") and len(sentence) < 1000
    assert all(line.isprintable() for line in told)


@pytest.mark.parametrize(
    "desired",
    [
        lease(task="os.system"), lease(objects=["../../etc/passwd"]), lease(objects=[digest]),
        lease(arguments_json="[" * 50_000), lease(arguments_json='{"theta": {"$params": "../../x"}}'),
        lease(arguments_json="[]"), lease(spans=[pb.Span(shard="../../x", start=0, stop=4)]), lease(num_sequences=9),
        lease(spans=[pb.Span(shard=digest, start=0, stop=1 << 60)], num_sequences=1 << 60),
        lease(spans=[pb.Span(shard=digest, start=9, stop=2), pb.Span(shard=digest, start=0, stop=11)]),
        lease(base_version="../../x", next_version="../../y"), lease(key="../\x00\x1b[2J" * 1000),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_done_costs_itself(tmp_path: Path, desired: bytes) -> None:
    ended, liar, told = worked(tmp_path, desired=[desired])
    assert ended == "that is  [31mall"
    assert len(liar.errors - {""}) == 1
    assert all(line.isprintable() for text in told for line in text.splitlines())


def info(size: int) -> bytes:
    return pb.ObjectInfo(digest=digest, size=size).SerializeToString()


@pytest.mark.parametrize(
    "object_messages",
    [
        [info(1 << 62)], [info(3), pack_chunk(0, b"x" * 100)], [info(3), pack_chunk(0, b"abc")], [b"\xff\xff"],
        [info(300), pack_chunk(200, b"abc")], [info(300), b"hello" * 10], [info(0)], [info(300), b""],
        [info(300), *[pack_chunk(0, b"")] * 50],
    ],
)  # fmt: skip
def test_an_object_that_is_not_what_was_promised_costs_the_task(
    tmp_path: Path, object_messages: Sequence[bytes]
) -> None:
    ended, liar, _ = worked(tmp_path, desired=[lease(objects=[digest])], object_messages=object_messages)
    assert ended == "that is  [31mall"
    assert len(liar.errors - {""}) == 1
    assert not [path for path in tmp_path.rglob("*-" + "?" * 64) if path.parent.name != "partial"]


def test_messages_that_are_none_end_the_work_or_the_stream(tmp_path: Path) -> None:
    ended, _, _ = worked(tmp_path / "control", desired=[b"\xff\xff\xff"])
    assert ended == "Refused: a Desired cannot be read"
    for number, frame in enumerate([b"junk", b"\x00\x70\x00\x00" + b"[" * 0x7000, b"\xff" * 100]):
        with pytest.raises(TimeoutError):  # it tries again, on a new connection
            worked(tmp_path / f"data-{number}", desired=[lease(num_inline=2)], data=[frame])


_: Callable[..., Any] = potluck.strategies.evaluation.of_model  # its task is installed, as on any worker
