"""What a member keeps to prove who it is: key, certificate, the authority it trusts, and where it connects.

One file, `identity.json`, replaced whole: a member killed while it renews has either the old identity or the new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from potluck.protocol import pb
from potluck.transport.grpc.options import TlsIdentity
from potluck.transport.security.authority import RENEW_AFTER
from potluck.transport.security.keys import (
    UNREADABLE,
    Subject,
    certificate_from_pem,
    certificate_key,
    key_from_pem,
    key_name,
    key_to_pem,
    new_key,
    new_request,
    subject_of,
)
from potluck.transport.security.link import format_address
from potluck.transport.security.messages import parse_message
from potluck.transport.security.private_files import read_private, write_private
from potluck.types.errors import CorruptError, NotAdmitted, PotluckError
from potluck.types.ids import WorkerId

FILE_NAME = "identity.json"


@dataclass(frozen=True, kw_only=True)
class Identity(TlsIdentity):
    """A member's proof of itself; `host` and `serve_port` are where its coordinator serves, `enrol_port` where it
    joined (0: it did not join over the network)."""

    host: str
    serve_port: int
    enrol_port: int = 0

    @cached_property
    def certificate(self) -> x509.Certificate:
        return certificate_from_pem(self.certificate_pem)

    @cached_property
    def subject(self) -> Subject:
        return subject_of(self.certificate)

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.subject.id)

    @property
    def role(self) -> str:
        return self.subject.role

    @property
    def address(self) -> str:
        return format_address(self.host, self.serve_port)

    @cached_property
    def pin(self) -> str:
        """The authority's key, as join lines name it."""
        return key_name(certificate_key(certificate_from_pem(self.authority_pem)))

    @property
    def expires(self) -> float:
        return self.subject.expires

    def expired(self, now: float) -> bool:
        return now >= self.expires

    def needs_renewal(self, now: float) -> bool:
        """Whether two thirds of the certificate's life are over."""
        begins = self.certificate.not_valid_before_utc.timestamp()
        return now >= begins + RENEW_AFTER * (self.expires - begins)

    def at(self, host: str) -> Identity:
        """The same member, its coordinator reached at another host."""
        return replace(self, host=host)

    def check(self) -> None:
        """CorruptError unless key, certificate and authority belong together."""
        key = key_from_pem(self.key_pem).public_key()
        if key_name(key) != key_name(certificate_key(self.certificate)):
            raise CorruptError("the certificate is for another key")
        try:
            self.certificate.verify_directly_issued_by(certificate_from_pem(self.authority_pem))
        except (*UNREADABLE, InvalidSignature) as error:
            raise CorruptError("the certificate is not signed by the authority it came with") from error
        if not self.subject.id or not 0 < self.serve_port < 65536:
            raise CorruptError(f"it names the member {self.subject.id!r} and the port {self.serve_port}")

    def save(self, folder: Path) -> None:
        """Replace the identity kept in `folder`; readable by this user only."""
        fields = {
            "host": self.host,
            "serve_port": self.serve_port,
            "enrol_port": self.enrol_port,
            "key_pem": self.key_pem.decode(),
            "certificate_pem": self.certificate_pem.decode(),
            "authority_pem": self.authority_pem.decode(),
        }
        write_private(folder / FILE_NAME, json.dumps(fields, indent=1).encode())

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / FILE_NAME).is_file()

    @staticmethod
    def load(folder: Path) -> Identity:
        """PotluckError if there is none, CorruptError if it is damaged."""
        path = folder / FILE_NAME
        if not path.exists():
            raise PotluckError(f"{folder} holds no identity; join with the line that `potluck host` or `invite` prints")
        data = read_private(path, what="the identity")
        try:
            fields = json.loads(data)
            identity = Identity(
                host=str(fields["host"]),
                serve_port=int(fields["serve_port"]),
                enrol_port=int(fields["enrol_port"]),
                key_pem=str(fields["key_pem"]).encode(),
                certificate_pem=str(fields["certificate_pem"]).encode(),
                authority_pem=str(fields["authority_pem"]).encode(),
            )
            identity.check()
        except (ValueError, KeyError, TypeError, CorruptError) as error:
            raise CorruptError(
                f"the identity in {path} is damaged ({_first_line(error)}); remove the file and join with a new line"
            ) from error
        return identity


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """A renewal under way: `request` goes to the call Renew, the new key waits here for its certificate."""

    request: bytes
    key_pem: bytes = field(repr=False)


def renewal_request(identity: Identity) -> Renewal:
    """Begin the next certificate, with a new key. A few ms; a renewal that is dropped costs nothing."""
    key = new_key()
    return Renewal(
        request=pb.RenewRequest(request_pem=new_request(key)).SerializeToString(),
        key_pem=key_to_pem(key),
    )


def apply_renewal(identity: Identity, renewal: Renewal, reply: bytes) -> Identity:
    """The identity after Renew answered `reply`; the caller saves it. CorruptError, NotAdmitted if it is another's."""
    parsed = parse_message(pb.RenewReply, reply)
    renewed = replace(identity, key_pem=renewal.key_pem, certificate_pem=parsed.certificate_pem)
    try:
        renewed.check()
    except CorruptError as error:
        raise CorruptError(
            f"the coordinator's new certificate for {identity.worker_id} is unusable: {error}"
        ) from error
    if (renewed.worker_id, renewed.role) != (identity.worker_id, identity.role):
        raise NotAdmitted(
            f"the coordinator's new certificate is for {renewed.worker_id} ({renewed.role}) and this member is "
            f"{identity.worker_id} ({identity.role}); the old one stays in use"
        )
    return renewed


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
