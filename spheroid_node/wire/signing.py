"""Ed25519 signatures, and the peer ids that carry their public keys.

A peer id is libp2p's: base58 of ``00 24`` (identity multihash, 36 bytes) and the protobuf message
``08 01 12 20`` + 32 bytes of public key. So whoever knows a peer id can check its signatures.
"""

from __future__ import annotations

from functools import lru_cache

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import pack, unpack

PEER_PREFIX = bytes.fromhex("002408011220")
SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32
DOMAIN = b"spheroid-node/1/"
KEYS_KNOWN = 2**14
"""Base58 takes as long as a signature, and the same few peers sign again and again."""


@lru_cache(maxsize=KEYS_KNOWN)
def peer_id_of(public_key: bytes) -> str:
    """Peer id (base58, ``12D3Koo…``) of a raw 32-byte Ed25519 public key."""
    return base58.b58encode(PEER_PREFIX + public_key).decode()


@lru_cache(maxsize=KEYS_KNOWN)
def public_key_of(peer: str) -> bytes:
    """Raw public key in a peer id. Raises :class:`WireError` (malformed) for any other string.

    Only the canonical spelling counts: base58 decoders skip white space, and two spellings of one key would
    be two peers.
    """
    try:
        raw = base58.b58decode(peer) if len(peer) <= 64 else b""
    except ValueError as error:
        raise WireError(ErrorCode.MALFORMED, "peer id is not base58") from error
    if not raw.startswith(PEER_PREFIX) or len(raw) != len(PEER_PREFIX) + PUBLIC_KEY_BYTES:
        raise WireError(ErrorCode.MALFORMED, "peer id does not hold an Ed25519 key")
    public_key = raw[len(PEER_PREFIX) :]
    if peer_id_of(public_key) != peer:
        raise WireError(ErrorCode.MALFORMED, "peer id is not in its canonical spelling")
    return public_key


def peer_id_of_key(key: Ed25519PrivateKey) -> str:
    """Peer id of the owner of ``key``."""
    return peer_id_of(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


def sign_bytes(key: Ed25519PrivateKey, purpose: str, message: bytes) -> bytes:
    """64-byte signature; ``purpose`` keeps a signature for one thing from counting for another."""
    return key.sign(DOMAIN + purpose.encode() + b"\x00" + message)


def verify_bytes(peer: str, purpose: str, message: bytes, signature: bytes) -> bool:
    """Whether ``peer`` signed ``message`` for ``purpose``. Never raises."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify(
            signature, DOMAIN + purpose.encode() + b"\x00" + message
        )
    except (InvalidSignature, WireError, ValueError):
        return False
    return True


def seal(key: Ed25519PrivateKey, purpose: str, body: bytes) -> bytes:
    """A signed envelope: msgpack [peer id, body, signature]."""
    return pack([peer_id_of_key(key), body, sign_bytes(key, purpose, body)])


def unseal(envelope: bytes, purpose: str) -> tuple[str, bytes]:
    """Author and body of an envelope. Raises :class:`WireError` (malformed, not-authentic)."""
    fields = unpack(envelope)
    if not (isinstance(fields, list) and len(fields) == 3):
        raise WireError(ErrorCode.MALFORMED, "an envelope is [peer, body, signature]")
    peer, body, signature = fields
    if not (isinstance(peer, str) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise WireError(ErrorCode.MALFORMED, "an envelope is [peer, body, signature]")
    if not verify_bytes(peer, purpose, body, signature):
        raise WireError(ErrorCode.NOT_AUTHENTIC, f"signature of {peer} for {purpose}")
    return peer, body
