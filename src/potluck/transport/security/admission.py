"""Whether the holder of a certificate may act, asked on every call.

TLS has proven that the authority signed the certificate and that the peer holds its key, once, at the handshake. What
may have changed since is checked here: the serial is known and not revoked, and the certificate has not expired.
"""

from __future__ import annotations

from collections import OrderedDict

from potluck.clock import Clock
from potluck.storage.members import Members
from potluck.transport.connection import Peer
from potluck.transport.security.keys import Subject, certificate_from_pem, subject_of
from potluck.types.errors import CorruptError, NotAdmitted
from potluck.types.ids import WorkerId

MAX_CACHED = 8192


class Admission:
    """Reads certificates (once each) and asks the member book (each time, in memory)."""

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members, self._clock = members, clock
        self._read: OrderedDict[bytes, Subject] = OrderedDict()

    def check_peer(self, certificate_pem: bytes) -> Peer:
        """Microseconds for a known certificate: fit for the event loop. NotAdmitted."""
        subject = self._subject(certificate_pem)
        if self._clock.time() >= subject.expires:
            raise NotAdmitted(f"the certificate of {subject.id} has expired; join again with a new line")
        member = self._members.holder(subject.serial)
        if member != (subject.id, subject.role):
            raise NotAdmitted(
                f"the certificate of {subject.id} is revoked or unknown to this coordinator; "
                "ask its owner for a new join line"
            )
        return Peer(id=WorkerId(subject.id), role=subject.role, serial=subject.serial)

    def _subject(self, certificate_pem: bytes) -> Subject:
        subject = self._read.get(certificate_pem)
        if subject is None:
            try:
                subject = subject_of(certificate_from_pem(certificate_pem))
            except CorruptError as error:
                raise NotAdmitted(f"a client's certificate is not one of a member: {error}") from error
            self._read[certificate_pem] = subject
            if len(self._read) > MAX_CACHED:
                self._read.popitem(last=False)
        return subject
