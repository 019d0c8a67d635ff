"""A worker that is asked to go before it has any work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from potluck.clock import ThreadExecutor
from potluck.types.profile import DeviceProfile
from potluck.worker import join
from potluck.worker.agent import Agent
from potluck.worker.options import JoinOptions


class Unanswered:
    """An agent whose coordinator never says Welcome."""

    ended, runner = "", None

    async def work(self) -> None:
        await asyncio.Event().wait()

    leave = Agent.leave


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

    async def obtained(*_: Any, **__: Any) -> Any:
        class Member:
            role = "worker"

        return Member()

    async def main() -> str:
        files, compute = ThreadExecutor(1, "files"), ThreadExecutor(1, "compute")
        options = JoinOptions(link=f"potluck://x:1/{'a' * 26}.{'b' * 32}", state_dir=tmp_path)
        joining = join._Joining(options, files, compute, lambda _: None)
        joinings.append(joining)
        try:
            return await asyncio.wait_for(joining.work(lambda _: None), 20)
        finally:
            files.close()
            compute.close()

    monkeypatch.setattr(join, "obtain", obtained)
    monkeypatch.setattr(join._Joining, "_agent", agent)
    monkeypatch.setattr(join._Joining, "_measured", measured)
    assert asyncio.run(main()) == "left"
    assert begun == ([] if measuring_s else ["agent"])
