"""A member's identity on disk, and renewals that are not what they should be."""

import json

import pytest

from potluck.protocol import pb
from potluck.transport.security.authority import Authority
from potluck.transport.security.identity import Identity, apply_renewal, renewal_request
from potluck.transport.security.keys import key_from_pem, key_to_pem, new_key, requested_key
from potluck.types.errors import CorruptError, NotAdmitted, PotluckError

NOW = 1_800_000_000.0


def make(authority, *, name="anna", role="worker", key=None):
    key = key or new_key()
    return Identity(
        host="fe80::1",
        serve_port=7002,
        enrol_port=7001,
        key_pem=key_to_pem(key),
        certificate_pem=authority.issue_client(name, role=role, key=key.public_key(), serial=5, now=NOW),
        authority_pem=authority.certificate_pem,
    )


def test_saved_and_loaded_it_is_the_same(tmp_path):
    identity = make(Authority.new(NOW))
    assert not Identity.exists(tmp_path)
    identity.save(tmp_path)
    assert Identity.exists(tmp_path)
    assert Identity.load(tmp_path) == identity
    assert identity.address == "[fe80::1]:7002" and identity.at("h").address == "h:7002"
    assert "PRIVATE" not in repr(identity)


def test_there_is_none(tmp_path):
    with pytest.raises(PotluckError, match="holds no identity"):
        Identity.load(tmp_path)


@pytest.mark.parametrize("cut", [0, 10, 200, 1000])
def test_a_file_cut_short(tmp_path, cut):
    make(Authority.new(NOW)).save(tmp_path)
    path = tmp_path / "identity.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptError, match=r"identity\.json"):
        Identity.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key_pem", lambda: key_to_pem(new_key()).decode()),
        ("authority_pem", lambda: Authority.new(NOW).certificate_pem.decode()),
        ("serve_port", lambda: 0),
        ("serve_port", lambda: "x"),
        ("certificate_pem", lambda: "no certificate"),
    ],
)
def test_a_file_whose_parts_do_not_belong_together(tmp_path, field, value):
    make(Authority.new(NOW)).save(tmp_path)
    path = tmp_path / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value()}))
    with pytest.raises(CorruptError, match="is damaged"):
        Identity.load(tmp_path)


def test_renewal_is_due_at_two_thirds():
    identity = make(Authority.new(NOW))
    day = 86400.0
    assert not identity.needs_renewal(NOW + 19.9 * day)
    assert identity.needs_renewal(NOW + 20.1 * day)
    assert not identity.expired(NOW + 29.9 * day) and identity.expired(NOW + 30 * day)


def test_a_renewal_must_be_for_this_member_and_the_new_key():
    authority = Authority.new(NOW)
    old = make(authority)
    renewal = renewal_request(old)
    key = requested_key(pb.RenewRequest.FromString(renewal.request).request_pem)

    def reply(name, role, public, signer=authority):
        pem = signer.issue_client(name, role=role, key=public, serial=6, now=NOW)
        return pb.RenewReply(certificate_pem=pem).SerializeToString()

    new = apply_renewal(old, renewal, reply("anna", "worker", key))
    assert new.subject.serial == 6 and new.key_pem == renewal.key_pem
    with pytest.raises(NotAdmitted, match=r"is for berta \(worker\) and this member is anna"):
        apply_renewal(old, renewal, reply("berta", "worker", key))
    with pytest.raises(NotAdmitted, match="operator"):
        apply_renewal(old, renewal, reply("anna", "operator", key))
    with pytest.raises(CorruptError, match="another key"):
        apply_renewal(old, renewal, reply("anna", "worker", key_from_pem(old.key_pem).public_key()))
    with pytest.raises(CorruptError, match="not signed by the authority"):
        apply_renewal(old, renewal, reply("anna", "worker", key, Authority.new(NOW)))
    with pytest.raises(CorruptError, match="not readable"):
        apply_renewal(old, renewal, b"")
