"""Keys (EC P-256 only), certificate requests and what may be believed of a certificate."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from potluck.types.errors import CorruptError, NotAdmitted

MAX_CERTIFICATE_BYTES = 8192
MAX_REQUEST_BYTES = 4096
PIN_CHARACTERS = 32  # base32, 160 bits

# What `cryptography` raises for bytes that are not what they claim.
UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(data: bytes) -> ec.EllipticCurvePrivateKey:
    """CorruptError unless `data` is an unencrypted EC private key."""
    try:
        key = load_pem_private_key(data, password=None)
    except UNREADABLE as error:
        raise CorruptError("a private key is not readable PEM; restore it, or remove it to begin anew") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CorruptError(f"a private key is of the kind {type(key).__name__} and should be an elliptic-curve key")
    return key


def public_digest(key: ec.EllipticCurvePublicKey) -> bytes:
    """SHA-256 of the SubjectPublicKeyInfo, 32 bytes."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def key_name(key: ec.EllipticCurvePublicKey) -> str:
    """The public key's digest as 32 letters and digits: the pin of an authority, the name of a member's key."""
    return base64.b32encode(public_digest(key)[:20]).decode().lower()


def certificate_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """The public key in a certificate; CorruptError if it is not an elliptic-curve key."""
    try:
        key = certificate.public_key()
    except UNREADABLE as error:
        raise CorruptError("a certificate holds a key that cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CorruptError(f"a certificate holds a {type(key).__name__} and should hold an elliptic-curve key")
    return key


def certificate_from_pem(data: bytes) -> x509.Certificate:
    """The first certificate in `data`; CorruptError if there is none or it is too large to be ours."""
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise CorruptError(f"a certificate has {len(data)} bytes and the limit is {MAX_CERTIFICATE_BYTES}")
    try:
        return x509.load_pem_x509_certificate(data)
    except UNREADABLE as error:
        raise CorruptError("a certificate is not readable PEM") from error


def certificate_to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def new_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate request that proves possession of `key`; its subject is empty, since nobody believes it."""
    return x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a certificate request from the network, its possession proven. NotAdmitted."""
    if len(request_pem) > MAX_REQUEST_BYTES:
        raise NotAdmitted(f"a certificate request has {len(request_pem)} bytes and the limit is {MAX_REQUEST_BYTES}")
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        # Checked before the signature: verifying one of a large RSA key would cost far more.
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise NotAdmitted("a certificate request holds another kind of key than EC P-256; update potluck there")
        if not request.is_signature_valid:
            raise NotAdmitted("a certificate request is not signed by its own key")
    except (*UNREADABLE, InvalidSignature) as error:
        raise NotAdmitted("a certificate request cannot be read") from error
    return key


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a client certificate says of its holder."""

    id: str
    role: str
    serial: int
    expires: float  # seconds since 1970


def subject_of(certificate: x509.Certificate) -> Subject:
    """CorruptError if the certificate does not name one holder and one role."""
    try:
        ids = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        roles = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    except UNREADABLE as error:
        raise CorruptError("a certificate has a subject that cannot be read") from error
    if len(ids) != 1 or len(roles) != 1:
        raise CorruptError("a certificate does not name exactly one member and one role")
    return Subject(
        id=str(ids[0].value),
        role=str(roles[0].value),
        serial=certificate.serial_number,
        expires=certificate.not_valid_after_utc.timestamp(),
    )


def moment(seconds: float) -> datetime:
    """Seconds since 1970 as certificates want them."""
    return datetime.fromtimestamp(int(seconds), UTC)
