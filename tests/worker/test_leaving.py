"""Workers that are asked to go, or to stop for a while, by their owner."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potluck.clock import ThreadExecutor, VirtualClock, run_virtual
from potluck.types.errors import ConnectionLost
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile
from potluck.worker import join, terms
from potluck.worker.agent import Agent, Introduction
from potluck.worker.options import JoinOptions


def test_a_coordinator_that_is_away_is_told_of_once_for_each_cause() -> None:
    """Three refused connections, then two that time out, then a word of the owner: two lines."""
    causes = iter(["refused", "refused", "refused", "no answer", "no answer"])
    said: list[str] = []

    async def main() -> None:
        async def connect() -> Any:
            if (cause := next(causes, "")) == "":
                agent.leave()
            raise ConnectionLost(cause or "no answer")

        agent = Agent(
            Introduction(id=WorkerId("w"), profile=DeviceProfile(device="cpu")), connect=connect, equip=connect,
            clock=VirtualClock(), told=said.append,
        )  # fmt: skip
        await agent.work()

    run_virtual(main())
    assert said == [
        f"the coordinator cannot be reached ({cause}); trying again until it can" for cause in ("refused", "no answer")
    ]


def test_why_a_worker_may_not_work_is_said_again_where_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["it takes a minute to see", "others use 30%", "others use 31%", "this machine runs on its battery"]
    left, said = list(reasons), list[str]()

    def begun(joining: join._Joining) -> None:
        def stop(**_: float) -> terms.Stop:
            if len(left) == 1:
                joining.leave()
            return terms.Stop(left.pop(0), 0.0)

        monkeypatch.setattr(joining._terms, "stop", stop)

    monkeypatch.setattr(join, "look_s", 0.01)
    assert joined(tmp_path, monkeypatch, begun, said.append) == "left"
    assert said == [reasons[0], reasons[1], reasons[3]]


class Unanswered:
    """An agent whose coordinator never says Welcome."""

    ended, runner = "", None

    async def work(self) -> None:
        await asyncio.Event().wait()

    leave = Agent.leave


def joined(
    folder: Path, monkeypatch: pytest.MonkeyPatch, begun: Callable[[join._Joining], object],
    told: Callable[[str], None] = lambda _: None,
) -> str:  # fmt: skip
    """How the work of someone who was let in ended; `begun` hears of it as it begins."""

    class Member:
        role = "worker"

    async def obtained(*_: Any, **__: Any) -> Any:
        return Member()

    async def main() -> str:
        files, compute = ThreadExecutor(1, "files"), ThreadExecutor(1, "compute")
        options = JoinOptions(link=f"potluck://x:1/{'a' * 26}.{'b' * 32}", state_dir=folder)
        joining = join._Joining(options, files, compute, told)
        begun(joining)
        try:
            return await asyncio.wait_for(joining.work(lambda _: None), 20)
        finally:
            await joining.close()
            files.close()
            compute.close()

    monkeypatch.setattr(join, "enter", obtained)
    return asyncio.run(main())


@pytest.mark.parametrize("measuring_s", [0.0, 0.3])
def test_leaving_before_the_first_welcome_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring_s: float
) -> None:
    begun: list[str] = []
    joinings: list[join._Joining] = []

    async def measured(_: join._Joining) -> DeviceProfile:
        asyncio.get_running_loop().call_later(0.1, joinings[0].leave)
        await asyncio.sleep(measuring_s)
        return DeviceProfile(device="cpu")

    def agent(*_: Any) -> Unanswered:
        begun.append("agent")
        return Unanswered()

    monkeypatch.setattr(join._Joining, "_agent", agent)
    monkeypatch.setattr(join._Joining, "_measured", measured)
    assert joined(tmp_path, monkeypatch, joinings.append) == "left"
    assert begun == ([] if measuring_s else ["agent"])


class Held:
    """An agent at work, whose run never ends by itself."""

    ended, runner = "", object()

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.gone = asyncio.Event()
        self.itself = self

    async def work(self) -> None:
        gc.freeze()  # as after getting ready
        await self.gone.wait()

    def hold(self) -> None:
        if self.heard[-1:] != ["hold"]:
            self.heard.append("hold")

    def release(self) -> None:
        self.heard.append("release")

    def leave(self) -> None:
        self.heard.append("leave")
        self.gone.set()


def test_a_pause_holds_the_worker_and_after_a_while_hands_its_work_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused for a moment, then for longer, then resumed: a new agent joins, once the first one's model is gone."""
    agents: list[weakref.ref[Held]] = []
    heard: list[list[str]] = []
    said: list[str] = []
    monkeypatch.setattr(join, "look_s", 0.01)
    monkeypatch.setattr(terms, "patience_s", 0.15)
    (tmp_path / "identity").mkdir()

    def agent(*_: Any) -> Held:
        assert all(one() is None for one in agents)
        new = Held()
        agents.append(weakref.ref(new))
        heard.append(new.heard)
        return new

    async def measured(_: join._Joining) -> DeviceProfile:
        return DeviceProfile(device="cpu")

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    async def owner(joining: join._Joining) -> None:
        await until(lambda: len(agents) == 1)
        terms.pause(tmp_path)
        await until(lambda: heard[0] == ["hold"])
        terms.resume(tmp_path)
        await until(lambda: heard[0] == ["hold", "release"])
        terms.pause(tmp_path)
        await until(lambda: heard[0][2:] == ["hold", "leave"])
        await asyncio.sleep(0.1)
        assert len(agents) == 1
        terms.resume(tmp_path)
        await until(lambda: len(agents) == 2)
        joining.leave()

    monkeypatch.setattr(join._Joining, "_agent", agent)
    monkeypatch.setattr(join._Joining, "_measured", measured)
    owning: list[asyncio.Task[None]] = []
    begun = lambda joining: owning.append(asyncio.ensure_future(owner(joining)))  # noqa: E731
    assert joined(tmp_path, monkeypatch, begun, said.append) == "left"
    owning[0].result()
    paused = "it is paused until `potluck resume`"
    assert said == [
        f"{paused}; stopping after the step under way", "going on",
        f"{paused}; stopping after the step under way", "handing the work back until it may go on", paused,
    ]  # fmt: skip
    assert heard[1] == ["leave"]
