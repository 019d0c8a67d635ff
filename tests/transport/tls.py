"""A certificate authority for tests, independent of the one Potluck ships."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.transport.grpc.options import TlsIdentity
from potluck.transport.security.names import SERVER_NAME


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common: str, unit: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    return x509.Name([*parts, x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit)])


@dataclass
class TestAuthority:
    __test__ = False
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.name = _name("test authority", "authority")
        self.certificate_pem = self._sign(self.name, self.key, authority=True)

    def server(self) -> TlsIdentity:
        return self._identity(_name(SERVER_NAME, "coordinator"), ExtendedKeyUsageOID.SERVER_AUTH)

    def client(self, id: str, role: str = "worker", *, days: float = 10) -> TlsIdentity:
        return self._identity(_name(id, role), ExtendedKeyUsageOID.CLIENT_AUTH, days=days)

    def _identity(self, subject: x509.Name, usage: x509.ObjectIdentifier, days: float = 10) -> TlsIdentity:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(subject, key, usage=usage, days=days)
        return TlsIdentity(key_pem=_pem(key), certificate_pem=certificate, authority_pem=self.certificate_pem)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        authority: bool = False,
        usage: x509.ObjectIdentifier | None = None,
        days: float = 10,
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=30))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if usage == ExtendedKeyUsageOID.SERVER_AUTH:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
