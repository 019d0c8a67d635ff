"""The frozen base of a run on this machine: fetched once for all workers here, checked each time it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from potluck.clock import Executor
from potluck.models.config import BaseFiles
from potluck.storage.digest import check_digest
from potluck.storage.objects import ObjectStore
from potluck.types.errors import CorruptError
from potluck.worker.link import Link
from potluck.worker.share import MachineShare


async def fetch_base(
    base: BaseFiles, link: Link, store: ObjectStore, share: MachineShare | None, files: Executor,
    note: Callable[[str], None],
) -> list[Path]:  # fmt: skip
    """The files of the base, whole. What is here from before is read again, and fetched anew if it changed.

    Refused if the coordinator names no objects or does not give them; ConnectionLost, to join again and go on.
    """
    found: list[Path] = []
    for each in base.objects:
        digest = check_digest(each.digest)
        if store.has(digest):
            try:
                await files.run(store.verify, digest)
            except CorruptError as error:
                note(str(error))
        if not store.has(digest):
            if share is None:
                await link.fetch_once(digest, store, files)
            else:
                await share.fetch(digest, store, lambda digest=digest: link.fetch_once(digest, store, files))
        found.append(store.path(digest))
    return found
