"""Open files: as many as the user may have, and some kept back for the run."""

import sys

import pytest

from potluck.transport.grpc.descriptors import MAX_CONNECTIONS, raise_limit, spare_connections

if sys.platform != "win32":
    import resource

    @pytest.mark.parametrize(
        ("soft", "spare"), [(256, 64), (1024, 512), (4096, 3584), (resource.RLIM_INFINITY, MAX_CONNECTIONS)]
    )
    def test_some_are_kept_for_the_run(monkeypatch: pytest.MonkeyPatch, soft: int, spare: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
        assert spare_connections() == spare

    @pytest.mark.parametrize(
        ("soft", "hard", "most", "raised"),
        [
            (256, resource.RLIM_INFINITY, 10240, [10240]),  # as on macOS
            (1024, 4096, 4096, [4096]),
            (1024, 1 << 20, 1 << 20, [1 << 16]),
            (1 << 17, 1 << 20, 1 << 20, []),
            (4096, 4096, 4096, []),
        ],
    )
    def test_the_limit_is_raised_as_far_as_the_system_takes_it(
        monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, raised: list[int]
    ) -> None:
        done: list[int] = []

        def set_limit(_: int, limits: tuple[int, int]) -> None:
            if limits[0] > most:
                raise ValueError("current limit exceeds maximum limit")
            assert limits[1] == hard
            done.append(limits[0])

        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", set_limit)
        raise_limit()
        assert done == raised

else:

    def test_there_is_no_limit_to_raise() -> None:
        raise_limit()
        assert spare_connections() == MAX_CONNECTIONS
