"""The authority on disk, and what it signs."""

import asyncio

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from potluck.clock import VirtualClock, run_virtual
from potluck.transport.security.authority import Authority, ServerCertificates
from potluck.transport.security.keys import certificate_from_pem, new_key
from potluck.types.errors import CorruptError

NOW = 1_800_000_000.0
DAY_S = 86400.0


def test_opened_again_it_is_the_same(tmp_path):
    first = Authority.open(tmp_path / "new" / "folder", now=NOW)
    again = Authority.open(tmp_path / "new" / "folder", now=NOW + 1e6)
    assert (again.pin, again.certificate) == (first.pin, first.certificate)
    assert len(first.pin) == 32
    assert Authority.new(NOW).pin != first.pin
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == ["authority.pem"]


@pytest.mark.parametrize("cut", [0, 1, 100, 230, 400, -30])
def test_a_file_cut_short_is_a_sentence_and_is_not_replaced(tmp_path, cut):
    Authority.open(tmp_path, now=NOW)
    path = tmp_path / "authority.pem"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(CorruptError, match=r"authority.*authority\.pem") as caught:
        Authority.open(tmp_path, now=NOW)
    assert path.read_bytes() == whole[:cut]
    assert "\n" not in str(caught.value)


def test_a_key_and_a_certificate_of_two_authorities_are_told(tmp_path):
    one, two = (Authority.open(tmp_path / name, now=NOW) for name in "ab")
    path = tmp_path / "a" / "authority.pem"
    path.write_bytes(path.read_bytes().replace(one.certificate_pem, two.certificate_pem))
    with pytest.raises(CorruptError, match="certificate of another key"):
        Authority.open(tmp_path / "a", now=NOW)


def test_each_certificate_has_one_purpose():
    authority = Authority.new(NOW)
    server = certificate_from_pem(authority.issue_server(now=NOW).certificate_pem)
    client_pem = authority.issue_client("anna", role="worker", key=new_key().public_key(), serial=12345, now=NOW)
    client = certificate_from_pem(client_pem)
    for certificate, purpose in (
        (server, ExtendedKeyUsageOID.SERVER_AUTH),
        (client, ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        certificate.verify_directly_issued_by(authority.certificate)
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert client.serial_number == 12345
    assert client.not_valid_after_utc.timestamp() == NOW + 30 * DAY_S
    with pytest.raises(x509.ExtensionNotFound):
        client.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_secrets_stay_out_of_what_is_printed():
    authority = Authority.new(NOW)
    assert "PRIVATE" not in repr(authority) + repr(authority.issue_server(now=NOW))


def test_the_server_certificate_changes_at_two_thirds_of_its_life():
    async def main():
        clock = VirtualClock(NOW)
        certificates = ServerCertificates(Authority.new(NOW), clock)
        first = certificates.current()
        await clock.sleep(59.9 * DAY_S)
        same = certificates.current()
        await asyncio.sleep(0.2 * DAY_S)
        return first, same, certificates.current()

    first, same, second = run_virtual(main())
    assert first is same
    assert second.certificate_pem != first.certificate_pem and second.key_pem != first.key_pem
    assert second.expires == pytest.approx(NOW + 150.1 * DAY_S)
