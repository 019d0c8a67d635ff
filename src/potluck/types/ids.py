"""Names of things, kept apart by type so that one cannot be passed for another."""

from typing import NewType

RunId = NewType("RunId", str)
WorkerId = NewType("WorkerId", str)
TaskKey = NewType("TaskKey", str)
"""Names one piece of work within a round, chosen by the strategy; equal on every replay of the round."""
Digest = NewType("Digest", str)
"""`algorithm:hex` of an object's bytes."""
LeaseId = tuple[int, int, str]
"""(round, attempt on the wire, key): names a lease in messages."""
