"""TLS 1.3 with a certificate that is nothing but the node's Ed25519 key."""

from __future__ import annotations

import ssl
import tempfile
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from spheroid_node.net.identity import Identity
from spheroid_node.wire.signing import peer_id_of

VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)
VALID_TO = datetime(2120, 1, 1, tzinfo=UTC)
"""Nobody looks at these: a key has no end, and the clocks of volunteers are wrong."""


def server_context(identity: Identity) -> ssl.SSLContext:
    """Context of a server whose certificate holds the identity's key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection proves the key anew
    key = identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with tempfile.TemporaryDirectory(prefix="spheroid-node-") as folder:  # mode 0700; ssl reads files only
        path = Path(folder) / "certificate.pem"
        path.touch(mode=0o600)
        path.write_bytes(key + _certificate(identity).public_bytes(Encoding.PEM))
        context.load_cert_chain(path)
    return context


@lru_cache(maxsize=1)
def client_context() -> ssl.SSLContext:
    """Context of a client. It checks no authority: the caller compares :func:`certified_peer`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def certified_peer(connection: ssl.SSLObject) -> str | None:
    """Peer id of the key in the other side's certificate, whose possession TLS 1.3 has proven.

    None unless it is an Ed25519 key.
    """
    certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        return None
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception:  # a certificate of a stranger; the parser's errors are not one family
        return None
    if not isinstance(key, Ed25519PublicKey):
        return None
    return peer_id_of(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _certificate(identity: Identity) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.key.public_key())
        .serial_number(1)
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_TO)
        .sign(identity.key, None)
    )
