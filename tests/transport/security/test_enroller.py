"""The brake on those who fail, and reading of addresses and certificates. On the virtual clock."""

import pytest

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.storage.database import Database
from potluck.storage.members import Members
from potluck.transport.security.admission import Admission
from potluck.transport.security.authority import Authority
from potluck.transport.security.enroller import Brake, Enroller, address_host
from potluck.types.errors import NotAdmitted, VersionMismatch


@pytest.fixture
def members(tmp_path):
    database = Database(tmp_path / "members.sqlite")
    yield Members(database)
    database.close()


def test_wrong_tokens_from_one_address_are_slowed_and_then_not_read(members, enrol_request):
    clock = VirtualClock(1_800_000_000.0)
    authority = Authority.new(clock.epoch)
    token = members.invite(now=clock.epoch, uses=3)

    async def main():
        enroller = Enroller(authority, members, clock, InlineExecutor(), serve_port=7002)
        sentences = []
        for _ in range(12):
            with pytest.raises(NotAdmitted) as caught:
                await enroller.handle(enrol_request("a" * 26), "ipv4:10.0.0.9:4711")
            sentences.append(str(caught.value))
        spent_s = clock.now()
        with pytest.raises(NotAdmitted, match=r"too many refused attempts .* 10\.0\.0\.9 \(limit 10\)"):
            await enroller.handle(enrol_request(token), "ipv4:10.0.0.9:4712")
        await enroller.handle(enrol_request(token), "ipv4:10.0.0.8:4711")  # others are not held up
        await clock.sleep(60)
        await enroller.handle(enrol_request(token), "ipv4:10.0.0.9:4713")
        with pytest.raises(VersionMismatch):
            await enroller.handle(enrol_request(token, major=3), "ipv4:10.0.0.9:4713")
        return sentences, spent_s

    sentences, spent_s = run_virtual(main())
    assert sum("not one of this coordinator" in s for s in sentences) == 10
    assert sum("too many" in s for s in sentences) == 2
    assert spent_s == pytest.approx(5.0)
    assert members.invitations(now=clock.epoch)[0].uses_left == 1


def test_the_brake_remembers_a_bounded_number_of_addresses():
    async def main():
        brake = Brake(VirtualClock(), burst=2, pause_s=0.001, max_addresses=100)
        for number in range(1000):
            await brake.failed(f"host-{number}")
            assert len(brake._clear_at) <= 100
        await brake.failed("host-999")
        with pytest.raises(NotAdmitted, match="try again in"):
            brake.check("host-999")
        brake.check("host-0")

    run_virtual(main())


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("ipv4:1.2.3.4:567", "1.2.3.4"),
        ("ipv6:%5B2001:db8::1%5D:567", "2001:db8::1"),
        ("ipv6:[::1]:567", "::1"),
        ("1.2.3.4", "1.2.3.4"),
        ("2001:db8::1", "2001:db8::1"),
        ("", "an unknown address"),
    ],
)
def test_the_host_of_an_address(address, host):
    assert address_host(address) == host


def test_admission_refuses_what_is_no_member_certificate(members):
    admission = Admission(members, VirtualClock())
    for pem in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"x" * 100_000):
        with pytest.raises(NotAdmitted, match="not one of a member"):
            admission.check_peer(pem)
    with pytest.raises(NotAdmitted, match="exactly one member and one role"):
        admission.check_peer(Authority.new(1_800_000_000.0).certificate_pem)
