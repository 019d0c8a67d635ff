from __future__ import annotations

import pytest
from transport.networks import Memory, Sockets


@pytest.fixture(params=[Memory, Sockets], ids=["memory", "grpc"])
def network(request: pytest.FixtureRequest) -> Memory | Sockets:
    return request.param()
