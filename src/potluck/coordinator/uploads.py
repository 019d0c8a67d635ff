"""What came or comes in for open leases."""

from __future__ import annotations

from collections.abc import Container

from potluck.types.ids import Digest, LeaseId


class Uploads:
    """Objects and the lease whose result each is, the last one that named it."""

    def __init__(self) -> None:
        self._lease: dict[Digest, LeaseId] = {}
        self._objects: dict[LeaseId, set[Digest]] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._lease

    def lease_of(self, digest: Digest) -> LeaseId:
        """Of an object that is here; KeyError for another one."""
        return self._lease[digest]

    def add(self, digest: Digest, lease: LeaseId) -> None:
        self._forget(digest)
        self._lease[digest] = lease
        self._objects.setdefault(lease, set()).add(digest)

    def others(self, digest: Digest, lease: LeaseId) -> int:
        """How many further objects came for that lease."""
        found = self._objects.get(lease, set())
        return len(found) - (digest in found)

    def keep(self, leases: Container[LeaseId]) -> None:
        """Forget what belongs to other leases."""
        for digest in [digest for digest, lease in self._lease.items() if lease not in leases]:
            self._forget(digest)

    def _forget(self, digest: Digest) -> None:
        lease = self._lease.pop(digest, None)
        if lease is not None:
            self._objects[lease].discard(digest)
            if not self._objects[lease]:
                del self._objects[lease]
