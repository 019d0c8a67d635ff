"""The member book: invitations are spent once, ids are never used twice, revocation is at once and survives."""

import sqlite3
import threading

import pytest

from potluck.storage.database import Database
from potluck.storage.members import CertificateRow, Members, clean_name
from potluck.types.errors import NotAdmitted, Refused

NOW = 1_800_000_000.0
serials = iter(range(1 << 158, 1 << 159))


def certificate(key=None):
    serial = next(serials)
    return CertificateRow(serial=serial, key=key or f"key-{serial}", expires=NOW + 1000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "members.sqlite"


@pytest.fixture
def members(path):
    database = Database(path)
    yield Members(database)
    database.close()


def admit(members, token, *, wanted="anna", row=None, now=NOW):
    return members.admit(token, wanted=wanted, certificate=row or certificate(), now=now)


def test_a_token_is_kept_as_a_hash_only(members, path):
    token = members.invite(now=NOW)
    assert len(token) == 26
    members._db.close()
    assert token.encode() not in path.read_bytes()


def test_uses_are_counted(members):
    token = members.invite(now=NOW, uses=2)
    assert [admit(members, token).id for _ in range(2)] == ["anna", "anna-2"]
    with pytest.raises(NotAdmitted, match="used up"):
        admit(members, token)
    assert members.invitations(now=NOW) == ()


def test_the_last_use_goes_to_one_of_many_at_once(members):
    token = members.invite(now=NOW, uses=3)
    results = []
    start = threading.Barrier(8)

    def one():
        start.wait()
        try:
            results.append(admit(members, token).id)
        except NotAdmitted:
            results.append(None)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r for r in results if r) == ["anna", "anna-2", "anna-3"]
    assert results.count(None) == 5


def test_a_token_ends_on_time_and_gives_its_role(members):
    token = members.invite(now=NOW, hours=2, role="operator")
    with pytest.raises(NotAdmitted, match=r"expired 0\.0 hours ago"):
        admit(members, token, now=NOW + 7200)
    assert admit(members, token, now=NOW + 7199).role == "operator"


def test_a_refused_attempt_changes_nothing(members):
    admit(members, members.invite(now=NOW))
    taken = certificate()
    admit(members, members.invite(now=NOW), row=taken)
    token = members.invite(now=NOW)
    again = CertificateRow(serial=taken.serial, key="other", expires=NOW)
    with pytest.raises(sqlite3.IntegrityError):  # the serial is taken: fails after the use was counted
        admit(members, token, row=again)
    assert members.invitations(now=NOW)[0].uses_left == 1
    assert [m.id for m in members.members()] == ["anna", "anna-2"]


def test_a_members_key_is_the_member_again_and_costs_no_use(members):
    token = members.invite(now=NOW, uses=1)
    first, again = certificate("key"), certificate("key")
    assert admit(members, token, row=first).id == admit(members, token, wanted="x", row=again).id == "anna"
    assert members.holder(first.serial) == members.holder(again.serial) == ("anna", "worker")
    with pytest.raises(NotAdmitted, match="used up"):
        admit(members, token, row=certificate("another key"))
    operator = members.invite(now=NOW, role="operator")  # another role is another member
    assert admit(members, operator, row=certificate("key")).id == "anna-2"


def test_a_named_invitation_brings_a_member_back_with_another_key(members):
    old, new = certificate(), certificate()
    first = admit(members, members.invite(now=NOW, name="lab-7"), row=old)
    second = admit(members, members.invite(now=NOW, name="lab-7"), row=new)
    assert (first.id, first.replaced) == ("lab-7", False)
    assert (second.id, second.replaced) == ("lab-7", True)
    assert members.holder(old.serial) is None
    assert members.holder(new.serial) == ("lab-7", "worker")


def test_nobody_takes_a_name_that_is_promised(members):
    token = members.invite(now=NOW, name="lab-7")
    assert admit(members, members.invite(now=NOW), wanted="Lab-7").id == "lab-7-2"
    assert admit(members, token).id == "lab-7"


def test_removal_is_at_once_and_survives_a_restart(members, path):
    kept, gone = certificate(), certificate()
    renewed = certificate()
    token = members.invite(now=NOW, uses=5)
    admit(members, token, wanted="kept", row=kept)
    admit(members, token, wanted="gone", row=gone)
    assert members.renew("gone", certificate=renewed, now=NOW) == "worker"
    removal = members.remove("gone")
    assert set(removal.serials) == {gone.serial, renewed.serial}
    assert removal.line_withdrawn
    members._db.close()
    database = Database(path)
    after = Members(database)
    assert [after.holder(c.serial) for c in (kept, gone, renewed)] == [("kept", "worker"), None, None]
    with pytest.raises(NotAdmitted, match="withdrawn"):  # it could come back by the same line otherwise
        admit(after, token)
    with pytest.raises(NotAdmitted, match="no member any more"):
        after.renew("gone", certificate=certificate(), now=NOW)
    assert admit(after, after.invite(now=NOW), wanted="gone").id == "gone-2"
    with pytest.raises(Refused, match=r"no member 'gone'; the members are gone-2, kept"):
        after.remove("gone")
    database.close()


def test_removal_withdraws_the_invitations_in_its_name(members):
    admit(members, members.invite(now=NOW, name="lab-7"))
    open_token = members.invite(now=NOW, name="lab-7")
    assert not members.remove("lab-7").line_withdrawn
    with pytest.raises(NotAdmitted, match="withdrawn"):
        admit(members, open_token)
    assert admit(members, members.invite(now=NOW, name="lab-7")).id == "lab-7"  # asked for by name: welcome again


def test_last_seen_is_kept(members):
    admit(members, members.invite(now=NOW))
    assert members.members()[0].last_seen == 0
    members.seen("anna", now=NOW + 5)
    row = members.members()[0]
    assert (row.last_seen, row.added, row.state) == (NOW + 5, NOW, "active")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"uses": 0}, "0 uses"),
        ({"uses": 10**9}, "1 to 100000 uses"),
        ({"hours": 0}, "0 hours"),
        ({"hours": float("nan")}, "nan hours"),
        ({"hours": 1e9}, "up to 8784 hours"),
        ({"role": "king"}, "worker or operator"),
        ({"name": "../etc"}, "cannot name a member"),
        ({"name": "Anna"}, "cannot name a member"),
        ({"name": "x" * 41}, "cannot name a member"),
        ({"name": "anna", "uses": 2}, "one use"),
    ],
)
def test_invitations_that_make_no_sense(members, options, sentence):
    with pytest.raises(Refused, match=sentence):
        members.invite(now=NOW, **options)


def test_a_member_does_not_change_its_role_by_an_invitation(members):
    admit(members, members.invite(now=NOW, name="anna"))
    with pytest.raises(Refused, match="role worker, not operator"):
        members.invite(now=NOW, name="anna", role="operator")


@pytest.mark.parametrize(
    ("wanted", "id"),
    [
        ("DESKTOP-AB12", "desktop-ab12"),
        ("Anna's Laptop", "anna-s-laptop"),
        ("../../etc/passwd", "etc-passwd"),
        ("名前", ""),
        ("x" * 500, "x" * 32),
        ("...", ""),
        ("a.local", "a.local"),
    ],
)
def test_what_a_machine_calls_itself_becomes_readable(members, wanted, id):
    assert clean_name(wanted) == id
    assert admit(members, members.invite(now=NOW), wanted=wanted).id == (id or "worker")
