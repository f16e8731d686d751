"""Records that count, and those that attackers make."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spheroid_node.net._hivemind import DHTID, DHTProtocol, DHTRecord, DictionaryDHTValue
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.validator import CLOCK_SLACK, RecordValidator
from spheroid_node.wire.frames import pack
from spheroid_node.wire.records import MAX_RECORD_BYTES, MAX_TTL

NOW = 1_000_000.0
KEY = DHTID.generate(source="spheroid/1/x").to_bytes()


@pytest.fixture
def validator(alice: Identity) -> RecordValidator:
    """Of a node that is not the author."""
    return RecordValidator(ephemeral_identity().key, clock=lambda: NOW)


def signed(author: Identity, content: bytes = b"hello", **changes: object) -> DHTRecord:
    record = DHTRecord(KEY, pack(author.peer), pack(content), NOW + 60)
    record = replace(record, **changes)
    return replace(record, value=RecordValidator(author.key).sign_value(record))


def test_an_authors_own_record_holds(validator, alice) -> None:
    record = signed(alice)
    assert validator.validate(record)
    assert validator.strip_value(record) == pack(b"hello")


@pytest.mark.parametrize("field", ["key", "subkey", "value", "expiration_time"])
def test_every_field_is_signed(validator, alice, bob, field) -> None:
    other = {
        "key": DHTID.generate(source="other").to_bytes(),
        "subkey": pack(bob.peer),
        "value": pack(b"jello") + signed(alice).value[-64:],
        "expiration_time": NOW + 61,
    }
    assert not validator.validate(replace(signed(alice), **{field: other[field]}))


def test_a_record_under_anothers_name_is_refused(validator, alice, bob) -> None:
    forged = DHTRecord(KEY, pack(alice.peer), pack(b"hello"), NOW + 60)
    unsigned = RecordValidator(bob.key).sign_value(forged)
    assert unsigned == forged.value
    mine = signed(bob)
    assert not validator.validate(replace(forged, value=pack(b"hello") + mine.value[-64:]))


def test_the_longest_life(validator, alice) -> None:
    assert validator.validate(signed(alice, expiration_time=NOW + MAX_TTL))
    assert not validator.validate(signed(alice, expiration_time=NOW + MAX_TTL + CLOCK_SLACK + 1))


@pytest.mark.parametrize("expiration", [math.inf, math.nan, 1e300])
def test_no_life_without_end(validator, alice, expiration) -> None:
    assert not validator.validate(signed(alice, expiration_time=expiration))


def test_the_largest_value(validator, alice) -> None:
    room = MAX_RECORD_BYTES - len(pack(bytes(MAX_RECORD_BYTES))) + MAX_RECORD_BYTES
    assert validator.validate(signed(alice, bytes(room)))
    assert not validator.validate(signed(alice, bytes(room + 1)))


@pytest.mark.parametrize(
    "subkey", [*DHTProtocol.RESERVED_SUBKEYS, b"\xc1", pack(7), pack(b"raw"), pack("nobody")]
)
def test_a_subkey_is_a_peer_id(validator, alice, subkey) -> None:
    """A whole-key value, or a dictionary in one piece, would wipe what others stored."""
    assert not validator.validate(replace(signed(alice), subkey=subkey))


@pytest.mark.parametrize(
    "value",
    [pack({1: 2}), pack("text"), pack([1]), b"\xc1", b"\xc4\xff", pack(b"x") + b"x", b"\xc7\x00\x50", b""],
    ids=["int-keys", "text", "list", "reserved", "cut-short", "trailing", "extension", "empty"],
)
def test_a_value_is_one_byte_string(validator, alice, value) -> None:
    """Others make a reader's get raise out of sight, and hang."""
    assert not validator.validate(signed(alice, value=value))


@pytest.mark.parametrize("field", ["key", "subkey", "value", "expiration_time"])
@pytest.mark.parametrize("nonsense", [None, 7, "text", object()])
def test_validate_never_raises(validator, alice, field, nonsense) -> None:
    assert validator.validate(replace(signed(alice), **{field: nonsense})) is False


def test_hivemind_packs_subkeys_as_we_do(alice) -> None:
    assert DHTProtocol.serializer.dumps(alice.peer) == pack(alice.peer)
    assert DHTProtocol.serializer.dumps(b"value") == pack(b"value")
    assert isinstance(DictionaryDHTValue(), dict) is False
