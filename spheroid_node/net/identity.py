"""A node's key: one Ed25519 key serves libp2p, the TLS certificate of its links and all its signatures.

The key file is libp2p's: a protobuf PrivateKey message of type Ed25519 whose data is seed + public key.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from spheroid_node.errors import IdentityInvalid, StateUnwritable
from spheroid_node.wire.signing import PUBLIC_KEY_BYTES, peer_id_of_key

log = structlog.get_logger()

KEY_FILE_PREFIX = bytes.fromhex("08011240")
"""Field 1 (type) = 1 (Ed25519); field 2 (data) of 64 bytes."""
SEED_BYTES = 32
OWNER_ONLY = 0o600


@dataclass(frozen=True)
class Identity:
    """A private key, the peer id (base58) that its public half is, and the file it came from."""

    key: Ed25519PrivateKey
    peer: str
    path: Path | None = None

    def file_content(self) -> bytes:
        """The key as a libp2p key file."""
        return KEY_FILE_PREFIX + _seed(self.key) + _public(self.key)


def load_identity(path: Path) -> Identity:
    """Read the key file at ``path``, or make it (mode 0600, complete or not at all).

    Raises :class:`IdentityInvalid` for a file that is no Ed25519 key file or cannot be read, and
    :class:`StateUnwritable` where none can be made.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        content = _create(path)
    except OSError as error:
        raise IdentityInvalid(str(path), error.strerror or str(error)) from error
    _keep_private(path)
    key = _parse(path, content)
    return Identity(key, peer_id_of_key(key), path)


def ephemeral_identity() -> Identity:
    """A fresh identity that no file keeps, for clients."""
    key = Ed25519PrivateKey.generate()
    return Identity(key, peer_id_of_key(key))


def _create(path: Path) -> bytes:
    content = ephemeral_identity().file_content()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # A hard link never replaces: of two starts at once, both end up with the first one's key.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return path.read_bytes()
    except OSError as error:
        raise StateUnwritable(str(path.parent), error.strerror or str(error)) from error


def _keep_private(path: Path) -> None:
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(OWNER_ONLY)
            log.warning("identity.was_readable_by_others", path=str(path))
    except OSError as error:
        raise IdentityInvalid(str(path), error.strerror or str(error)) from error


def _parse(path: Path, content: bytes) -> Ed25519PrivateKey:
    body = content.removeprefix(KEY_FILE_PREFIX)
    if not content.startswith(KEY_FILE_PREFIX) or len(body) != SEED_BYTES + PUBLIC_KEY_BYTES:
        raise IdentityInvalid(str(path), "it is not a libp2p Ed25519 key file")
    key = Ed25519PrivateKey.from_private_bytes(body[:SEED_BYTES])
    if _public(key) != body[SEED_BYTES:]:
        raise IdentityInvalid(str(path), "its public key does not belong to its private key")
    return key


def _seed(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
