"""What tests of real faults share: processes that start at once, and wires."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from potluck.bench.rig.nursery import Nursery, nursery
from potluck.bench.rig.wire import WireLoop, wire_loop


@pytest.fixture(scope="session")
def processes() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


@pytest.fixture(scope="session")
def wires() -> Iterator[WireLoop]:
    with wire_loop() as loop:
        yield loop
