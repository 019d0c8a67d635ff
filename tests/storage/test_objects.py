import os
import threading
from pathlib import Path

import pytest

from potluck.storage.digest import digest_bytes
from potluck.storage.objects import ObjectStore
from potluck.types.errors import CorruptError, Refused, ResourceError
from potluck.types.ids import Digest

data = bytes(range(256)) * 40
digest = digest_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def names(store: ObjectStore) -> list[str]:
    """Without what belongs to them: how far partial ones are, and the start of the machine."""
    return sorted(p.name for p in store.root.rglob("*") if p.is_file() and p.suffix != ".offset" and p.name != "boot")


def test_bytes_and_files_are_kept_by_digest(store: ObjectStore, tmp_path: Path) -> None:
    assert store.put(data) == digest
    assert store.put(data) == digest
    file = tmp_path / "file"
    file.write_bytes(b"other")
    other = store.adopt(file)
    assert other == digest_bytes(b"other") and not file.exists()
    file.write_bytes(b"other")
    assert store.adopt(file) == other and not file.exists()
    assert store.path(digest).read_bytes() == data
    assert store.size(digest) == len(data)
    assert store.digests() == {digest, other}
    assert store.used_bytes() == len(data) + 5
    assert ObjectStore(store.root).has(digest)


def test_a_name_that_is_no_digest_never_becomes_a_path(store: ObjectStore) -> None:
    for use in (store.path, store.has, store.size, store.remove, lambda d: store.begin(d, 3)):
        with pytest.raises(Refused):
            use(Digest("sha256:../../../etc/passwd"))


def test_an_object_that_is_not_here_has_no_size(store: ObjectStore) -> None:
    with pytest.raises(CorruptError, match="is not in"):
        store.size(digest)


def test_an_upload_in_pieces(store: ObjectStore) -> None:
    partial = store.begin(digest, len(data))
    assert (partial.offset, partial.size) == (0, len(data))
    for start in range(0, len(data), 1000):
        assert not store.has(digest)
        partial.write(start, memoryview(data)[start : start + 1000])
    assert partial.offset == len(data)
    partial.finish()
    partial.finish()
    assert store.path(digest).read_bytes() == data
    assert names(store) == [digest.replace(":", "-")]


def test_an_upload_goes_on_after_the_process_died(store: ObjectStore) -> None:
    store.begin(digest, len(data)).write(0, data[:3333])
    again = ObjectStore(store.root)
    assert not again.has(digest)
    partial = again.begin(digest, len(data))
    assert partial.offset == 3333
    partial.write(3000, data[3000:])  # a piece that begins before what is missing
    partial.finish()
    assert again.path(digest).read_bytes() == data


def test_damage_to_what_arrived_before_a_restart_is_found(store: ObjectStore) -> None:
    store.begin(digest, len(data)).write(0, b"\xff" * 100)
    again = ObjectStore(store.root)
    partial = again.begin(digest, len(data))
    partial.write(100, data[100:])
    with pytest.raises(CorruptError, match="was dropped; it has to be sent again"):
        partial.finish()
    assert names(again) == []
    assert again.begin(digest, len(data)).offset == 0


def test_wrong_bytes_never_become_an_object(store: ObjectStore) -> None:
    partial = store.begin(digest, len(data))
    partial.write(0, bytes(len(data)))
    with pytest.raises(CorruptError, match="arrived as blake3:"):
        partial.finish()
    assert not store.has(digest) and names(store) == []
    with pytest.raises(CorruptError, match="was dropped"):
        partial.finish()
    fresh = store.begin(digest, len(data))
    assert fresh.offset == 0
    fresh.write(0, data)
    fresh.finish()
    assert store.has(digest)


def test_gaps_and_excess_are_refused_and_change_nothing(store: ObjectStore) -> None:
    partial = store.begin(digest, len(data))
    partial.write(0, data[:100])
    for offset, piece in [(101, data[101:200]), (100, data[100:] + b"x"), (-1, data[:5]), (len(data) + 1, b"")]:
        with pytest.raises(CorruptError, match="do not continue"):
            partial.write(offset, piece)
    with pytest.raises(CorruptError, match=f"{len(data) - 100} of {len(data)} bytes"):
        partial.finish()
    assert partial.offset == 100
    partial.write(0, data)
    partial.finish()
    assert store.path(digest).read_bytes() == data


def test_two_senders_of_one_object_share_what_arrived(store: ObjectStore) -> None:
    first, second = store.begin(digest, len(data)), store.begin(digest, len(data))
    first.write(0, data[:500])
    assert second.offset == 500
    second.write(500, data[500:900])
    first.write(500, data[500:1000])  # sent by both
    assert first.offset == second.offset == 1000
    second.write(1000, data[1000:])
    second.finish()
    first.write(1000, data[1000:2000])  # too late and harmless
    first.finish()
    assert store.path(digest).read_bytes() == data


def test_many_threads_sending_one_object(store: ObjectStore) -> None:
    store.begin(digest, len(data)).write(0, data[:99])
    store = ObjectStore(store.root)  # so that all of it is read again at the end, by whoever ends
    errors: list[Exception] = []

    def send(size: int) -> None:
        try:
            partial = store.begin(digest, len(data))
            while (offset := partial.offset) < len(data):
                partial.write(offset, data[offset : offset + size])
            partial.finish()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=send, args=(size,)) for size in (7, 13, 101, 997)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.path(digest).read_bytes() == data and names(store) == [digest.replace(":", "-")]


def test_a_second_claim_of_another_size_starts_anew(store: ObjectStore) -> None:
    liar = store.begin(digest, 100)
    liar.write(0, b"x" * 50)
    honest = store.begin(digest, len(data))
    assert honest.offset == 0
    with pytest.raises(CorruptError, match="was dropped"):
        liar.write(50, b"x" * 50)
    with pytest.raises(CorruptError, match="50 of 100 bytes"):
        liar.finish()
    honest.write(honest.offset, data[honest.offset :])
    honest.finish()
    assert store.path(digest).read_bytes() == data


def test_beginning_what_is_here_already_is_finished_at_once(store: ObjectStore) -> None:
    store.put(data)
    partial = store.begin(digest, len(data))
    assert partial.offset == partial.size == len(data)
    partial.write(0, data)
    partial.finish()
    assert names(store) == [digest.replace(":", "-")]


def test_an_empty_object(store: ObjectStore) -> None:
    empty = digest_bytes(b"")
    store.begin(empty, 0).finish()
    assert store.path(empty).read_bytes() == b""


def test_the_quota_counts_whole_and_promised_bytes(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path / "objects", quota_bytes=1000)
    store.put(bytes(300))
    partial = store.begin(digest_bytes(b"a" * 600), 600)
    assert store.used_bytes() == 900
    with pytest.raises(ResourceError, match=r"holds 900 bytes of objects, 101 more are needed and 1,000 are allowed"):
        store.put(bytes(101))
    with pytest.raises(ResourceError):
        store.begin(digest_bytes(b"b" * 101), 101)
    partial.write(0, b"a" * 600)
    partial.finish()
    assert store.used_bytes() == 900
    store.put(bytes(100))
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(ResourceError):
        store.adopt(file)
    assert file.exists()
    store.put(bytes(300))  # is here already, so it needs nothing
    store.remove(digest_bytes(b"a" * 600))
    store.adopt(file)


def test_a_full_disk_is_said_before_an_upload(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.types.disk.free_bytes", lambda _: 10)
    with pytest.raises(ResourceError, match="10 bytes free and 10,240 bytes are needed"):
        store.begin(digest, len(data))
    assert names(store) == []


def test_collecting_keeps_what_is_named_and_young_partials(store: ObjectStore) -> None:
    kept, dropped = store.put(b"kept"), store.put(b"dropped")
    young, old, wanted = (digest_bytes(x) for x in (b"young one", b"old one.", b"wanted"))
    for each in (young, old, wanted):
        store.begin(each, 8).write(0, b"half")
    for each in (old, wanted):
        os.utime(store.root / "partial" / each.replace(":", "-"), (0, 0))
    stale = store.begin(old, 8)
    assert store.collect({kept, wanted}.__contains__, partial_age_s=60) == len(b"dropped") + 4
    assert store.digests() == {kept}
    assert not store.has(dropped)
    assert sorted(names(ObjectStore(store.root))) == sorted(d.replace(":", "-") for d in (kept, young, wanted))
    with pytest.raises(CorruptError, match="was dropped"):
        stale.write(4, b"half")
    assert store.begin(old, 8).offset == 0
    assert store.begin(young, 8).offset == 4


def test_a_changed_object_is_found_and_removed(store: ObjectStore) -> None:
    store.put(data)
    store.verify(digest)
    store.path(digest).write_bytes(data[:-1])
    with pytest.raises(CorruptError, match="fetch it again"):
        store.verify(digest)
    assert not store.has(digest)


def test_adopting_from_another_disk(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if path == file:
            raise OSError(18, "Invalid cross-device link")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert store.adopt(file) == digest
    assert store.path(digest).read_bytes() == data and not file.exists()
    assert names(store) == [digest.replace(":", "-")]


def test_leftovers_of_a_killed_writer_go_at_the_next_start(store: ObjectStore) -> None:
    (store.root / "sha256-aa.0123.tmp").write_bytes(b"x")
    ObjectStore(store.root, durable=True).put(data)
    assert names(store) == [digest.replace(":", "-")]
