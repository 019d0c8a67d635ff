"""In which order a worker does what it holds."""

from __future__ import annotations

from collections.abc import Container, Mapping

from potluck.protocol import pb
from potluck.types.ids import LeaseId


def to_begin(
    wanted: Mapping[LeaseId, pb.Lease], results: Mapping[LeaseId, pb.TaskResult], sending: Container[LeaseId]
) -> list[pb.Lease]:
    """What may be begun, in the order in which it was handed out.

    A task that failed here leads to no state, so what goes on from that is not begun: the coordinator takes it back.
    """
    found: list[pb.Lease] = []
    unmade: set[str] = set()
    for id, lease in wanted.items():
        result = results.get(id)
        if lease.base_version in unmade or (result is not None and result.error):
            unmade |= {lease.next_version} - {""}
        elif result is None and id not in sending:
            found.append(lease)
    return found
