import asyncio
import errno
import os
from pathlib import Path

import pytest

from potluck.clock import SystemClock, ThreadExecutor
from potluck.storage.digest import digest_bytes, file_name
from potluck.storage.objects import ObjectStore
from potluck.types.errors import ResourceError
from potluck.types.ids import Digest
from potluck.worker.share import MachineShare

data = os.urandom(200_000)
digest = digest_bytes(data)


class Worker:
    """A store and a share, and how often it downloaded."""

    def __init__(self, folder: Path, name: str) -> None:
        self.store = ObjectStore(folder / name)
        self.share = MachineShare(folder / "share", SystemClock(), ThreadExecutor())
        self.num_downloads = 0

    async def fetch(self, wanted: Digest = digest) -> bool:
        async def download() -> None:
            self.num_downloads += 1
            await asyncio.sleep(0.3)
            self.store.put(data)

        return await self.share.fetch(wanted, self.store, download)


def test_workers_that_want_an_object_at_once_download_it_once(tmp_path: Path) -> None:
    async def main() -> None:
        workers = [Worker(tmp_path, f"w{i}") for i in range(4)]
        shared = await asyncio.gather(*(w.fetch() for w in workers))
        assert sorted(shared) == [False, True, True, True]
        assert sum(w.num_downloads for w in workers) == 1
        assert all(w.store.path(digest).read_bytes() == data for w in workers)

    asyncio.run(main())


def test_a_damaged_copy_is_not_believed(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Worker(tmp_path, "a"), Worker(tmp_path, "b")
        await first.fetch()
        shared = tmp_path / "share" / file_name(digest) / "object"
        shared.unlink()
        shared.write_bytes(b"something else")
        assert await second.fetch() is False
        assert second.num_downloads == 1
        assert second.store.path(digest).read_bytes() == data

    asyncio.run(main())


def test_a_copy_that_a_full_disk_cut_off_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_a_part(source: Path, target: Path) -> None:
        if not source.exists():
            raise FileNotFoundError(source)
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "no space left on device")

    async def main() -> None:
        first, second = Worker(tmp_path, "a"), Worker(tmp_path, "b")
        await first.fetch()
        monkeypatch.setattr("potluck.worker.share.link_or_copy", copy_a_part)
        with pytest.raises(ResourceError, match="bytes free and more is needed"):
            await second.fetch()
        assert not list(tmp_path.rglob("*.tmp"))

    asyncio.run(main())


def test_a_failed_download_lets_the_next_worker_try(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Worker(tmp_path, "a"), Worker(tmp_path, "b")

        async def fail() -> None:
            await asyncio.sleep(0.2)
            raise RuntimeError("the link broke for good")

        failing = asyncio.ensure_future(first.share.fetch(digest, first.store, fail))
        await asyncio.sleep(0.05)
        assert await second.fetch() is False
        results = await asyncio.gather(failing, return_exceptions=True)
        assert isinstance(results[0], RuntimeError)

    asyncio.run(main())


def test_what_no_worker_holds_any_more_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Worker(tmp_path, "a"), Worker(tmp_path, "b")
        await first.fetch()
        shared = tmp_path / "share" / file_name(digest) / "object"
        first.store.remove(digest)
        os.utime(shared, (1.0, 1.0))
        other = digest_bytes(b"other")

        async def download() -> None:
            second.store.put(b"other")

        await second.share.fetch(other, second.store, download)
        assert not shared.exists()

    asyncio.run(main())


def test_who_waits_for_anothers_download_sees_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.worker.share.tell_s", 0.01)
    monkeypatch.setattr("potluck.worker.share.wait_s", 0.01)

    async def main() -> None:
        first, second, progress, heard = Worker(tmp_path, "a"), Worker(tmp_path, "b"), [0], list[int]()

        async def download() -> None:
            for progress[0] in range(1, 200):
                await asyncio.sleep(0.01)
                if len(set(heard)) > 2:
                    break
            first.store.put(data)

        downloading = asyncio.create_task(first.share.fetch(digest, first.store, download, arrived=lambda: progress[0]))
        await asyncio.sleep(0.05)
        assert await second.share.fetch(digest, second.store, download, told=heard.append) is True
        assert await downloading is False
        assert len(set(heard)) > 2 and heard == sorted(heard)

    asyncio.run(main())
