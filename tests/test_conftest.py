"""The watchdog itself: it must see a stall, and must not see one where there is none."""

import asyncio
import time
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def test_watchdog_is_quiet_while_the_loop_is_free(stall_watchdog: object) -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(50)))
        await asyncio.to_thread(time.sleep, 0.1)

    asyncio.run(main())


@pytest.mark.parametrize("stall", ["time.sleep(0.6)", "sum(i * i for i in range(4_000_000))"])
def test_watchdog_sees_a_stall(pytester: pytest.Pytester, stall: str) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(
        f"import asyncio, time\nasync def main():\n    {stall}\ndef test_it(stall_watchdog):\n    asyncio.run(main())\n"
    )
    result = pytester.runpytest_subprocess("-q")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the event loop was blocked by*"])
