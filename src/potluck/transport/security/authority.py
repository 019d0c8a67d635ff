"""The coordinator's own certificate authority: one EC P-256 key, made at its first start.

Its self-signed certificate is three things at once: what client and server certificates are checked against, the TLS
certificate of the enrol port (so that a worker can fetch it with a plain handshake and compare its key with the pin in
the join line), and the thing that the pin names. Server certificates may not act as clients, nor the reverse.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.clock import Clock
from potluck.transport.grpc.options import TlsIdentity
from potluck.transport.security.keys import (
    certificate_from_pem,
    certificate_key,
    certificate_to_pem,
    key_from_pem,
    key_name,
    key_to_pem,
    moment,
    new_key,
)
from potluck.transport.security.names import SERVER_NAME
from potluck.transport.security.private_files import read_private, write_private
from potluck.types.errors import CorruptError

FILE_NAME = "authority.pem"
DAY_S = 86400.0
AUTHORITY_LIFE_S = 20 * 365 * DAY_S
SERVER_LIFE_S = 90 * DAY_S
CLIENT_LIFE_S = 30 * DAY_S
RENEW_AFTER = 2 / 3
"""The part of a certificate's life after which its holder asks for the next one."""

_SKEW_S = 3600.0
_LONG_AGO_S = 1_577_836_800.0  # 2020-01-01: a board whose clock stands behind still believes the coordinator
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "potluck authority")])


@dataclass(frozen=True, kw_only=True)
class ServerIdentity(TlsIdentity):
    """What a server port presents. `expires` and `renew_at` are seconds since 1970."""

    expires: float
    renew_at: float


@dataclass(frozen=True)
class Authority:
    """Signs. Blocking and a few ms each: call it in an executor."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    @staticmethod
    def open(folder: Path, *, now: float) -> Authority:
        """The authority kept in `folder`, made there if there is none. CorruptError if the file is damaged."""
        path = folder / FILE_NAME
        if not path.exists():
            authority = Authority.new(now)
            write_private(path, key_to_pem(authority.key) + authority.certificate_pem)
            return authority
        data = read_private(path, what="the authority")
        try:
            key, certificate = key_from_pem(data), certificate_from_pem(data)
            matches = key_name(key.public_key()) == key_name(certificate_key(certificate))
        except CorruptError as error:
            raise CorruptError(f"the authority in {path} is damaged ({error}); {_remedy}") from error
        if not matches:
            raise CorruptError(f"the authority in {path} holds a key and a certificate of another key; {_remedy}")
        return Authority(key, certificate)

    @staticmethod
    def new(now: float) -> Authority:
        key = new_key()
        public = key.public_key()
        builder = (
            _builder(_NAME, public, x509.random_serial_number(), _LONG_AGO_S, now + AUTHORITY_LIFE_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )
        return Authority(key, builder.sign(key, hashes.SHA256()))

    @property
    def certificate_pem(self) -> bytes:
        return certificate_to_pem(self.certificate)

    @property
    def pin(self) -> str:
        """Names the authority's public key in a join line: 160 bits of its SHA-256, base32."""
        return key_name(self.key.public_key())

    def enrol_identity(self) -> ServerIdentity:
        """What the enrol port presents: the authority's own certificate."""
        expires = self.certificate.not_valid_after_utc.timestamp()
        return ServerIdentity(
            key_pem=key_to_pem(self.key),
            certificate_pem=self.certificate_pem,
            authority_pem=self.certificate_pem,
            expires=expires,
            renew_at=expires,
        )

    def issue_server(self, *, now: float, life_s: float = SERVER_LIFE_S) -> ServerIdentity:
        """A new key and certificate for the serve port."""
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
        builder = _leaf(
            _builder(name, key.public_key(), x509.random_serial_number(), _LONG_AGO_S, now + life_s),
            self.key.public_key(),
            ExtendedKeyUsageOID.SERVER_AUTH,
        ).add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        return ServerIdentity(
            key_pem=key_to_pem(key),
            certificate_pem=certificate_to_pem(builder.sign(self.key, hashes.SHA256())),
            authority_pem=self.certificate_pem,
            expires=now + life_s,
            renew_at=now + life_s * RENEW_AFTER,
        )

    def issue_client(
        self,
        worker_id: str,
        *,
        role: str,
        key: ec.EllipticCurvePublicKey,
        serial: int,
        now: float,
        life_s: float = CLIENT_LIFE_S,
    ) -> bytes:
        """The PEM certificate that makes the holder of `key` the member `worker_id` with `role`."""
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, worker_id),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            ]
        )
        builder = _leaf(
            _builder(name, key, serial, now - _SKEW_S, now + life_s),
            self.key.public_key(),
            ExtendedKeyUsageOID.CLIENT_AUTH,
        )
        return certificate_to_pem(builder.sign(self.key, hashes.SHA256()))


class ServerCertificates:
    """The serve port's certificate of the moment: a new one is made at two thirds of the life of the last."""

    def __init__(self, authority: Authority, clock: Clock, *, life_s: float = SERVER_LIFE_S) -> None:
        self._authority, self._clock, self._life_s = authority, clock, life_s
        self._lock = threading.Lock()
        self._current: ServerIdentity | None = None

    def current(self) -> ServerIdentity:
        """Thread-safe; the same value until it is time to change. Some ms when it is, so not on the event loop."""
        now = self._clock.time()
        with self._lock:
            if self._current is None or now >= self._current.renew_at:
                self._current = self._authority.issue_server(now=now, life_s=self._life_s)
            return self._current


_remedy = "restore the file from a copy, or remove it: every member must then join again with a new line"


def _builder(
    name: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, begins: float, expires: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(_NAME)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(moment(begins))
        .not_valid_after(moment(expires))
    )


def _leaf(
    builder: x509.CertificateBuilder, issuer: ec.EllipticCurvePublicKey, purpose: x509.ObjectIdentifier
) -> x509.CertificateBuilder:
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
