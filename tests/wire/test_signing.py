"""Peer ids, signatures and envelopes."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.wire.codes import ErrorCode, WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.signing import (
    PEER_PREFIX,
    peer_id_of,
    peer_id_of_key,
    public_key_of,
    seal,
    sign_bytes,
    unseal,
    verify_bytes,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEER = peer_id_of_key(KEY)
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_public_key(public_key: bytes) -> None:
    peer = peer_id_of(public_key)
    assert peer.startswith("12D3Koo")
    assert public_key_of(peer) == public_key


@pytest.mark.parametrize(
    "peer",
    [
        "",
        "12D3Koo",
        PEER[:-1],
        PEER + "1",
        PEER + " ",
        "\n" + PEER,
        "1" + PEER,
        PEER.replace("K", "0"),
        "ключ",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # a hashed (RSA) peer id: no key in it
        PEER * 100,
    ],
)
def test_no_other_spelling_is_a_peer_id(peer: str) -> None:
    with pytest.raises(WireError) as caught:
        public_key_of(peer)
    assert caught.value.code is ErrorCode.MALFORMED
    assert not verify_bytes(peer, "update", b"message", sign_bytes(KEY, "update", b"message"))


def test_the_prefix_is_that_of_libp2p() -> None:
    # identity multihash, 36 bytes; protobuf: field 1 = 1 (Ed25519), field 2 = 32 bytes
    assert bytes([0x00, 36, 0x08, 1, 0x12, 32]) == PEER_PREFIX


@given(st.binary(max_size=100))
def test_a_signature_holds_for_its_author_message_and_purpose_alone(message: bytes) -> None:
    signature = sign_bytes(KEY, "update", message)
    assert verify_bytes(PEER, "update", message, signature)
    assert not verify_bytes(PEER, "receipt", message, signature)
    assert not verify_bytes(PEER, "update", message + b"\x00", signature)
    assert not verify_bytes(peer_id_of_key(OTHER), "update", message, signature)
    assert not verify_bytes(PEER, "update", message, signature[:-1])
    assert not verify_bytes(PEER, "update", message, b"")


def test_a_purpose_cannot_reach_into_the_message() -> None:
    signature = sign_bytes(KEY, "up", b"date\x00x")
    assert not verify_bytes(PEER, "update", b"x", signature)


def test_the_signed_bytes_are_domain_purpose_and_message() -> None:
    KEY.public_key().verify(sign_bytes(KEY, "update", b"body"), b"spheroid-node/1/update\x00body")


@given(st.binary(max_size=200))
def test_envelopes_come_back(body: bytes) -> None:
    assert unseal(seal(KEY, "manifest", body), "manifest") == (PEER, body)


def test_an_envelope_for_one_purpose_does_not_count_for_another() -> None:
    with pytest.raises(WireError) as caught:
        unseal(seal(KEY, "receipt", b"body"), "update")
    assert caught.value.code is ErrorCode.NOT_AUTHENTIC


def test_an_envelope_in_another_name_is_not_authentic() -> None:
    _, body, signature = unpack(seal(KEY, "update", b"body"))
    with pytest.raises(WireError) as caught:
        unseal(pack([peer_id_of_key(OTHER), body, signature]), "update")
    assert caught.value.code is ErrorCode.NOT_AUTHENTIC


@given(st.integers(min_value=0), st.integers(0, 7))
def test_a_changed_bit_anywhere_breaks_an_envelope(where: int, bit: int) -> None:
    envelope = bytearray(seal(KEY, "update", b"some body"))
    envelope[where % len(envelope)] ^= 1 << bit
    with pytest.raises(WireError):
        unseal(bytes(envelope), "update")


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        [],
        [PEER, b"body"],
        [PEER, b"body", b"s", b"t"],
        [PEER, "body", b"s"],
        [1, b"b", b"s"],
        "abc",
    ],
)
def test_other_shapes_are_malformed(fields: Any) -> None:
    with pytest.raises(WireError) as caught:
        unseal(pack(fields), "update")
    assert caught.value.code is ErrorCode.MALFORMED


@given(st.binary(max_size=200))
def test_random_bytes_are_no_envelope(data: bytes) -> None:
    with pytest.raises(WireError):
        unseal(data, "update")
