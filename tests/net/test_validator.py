"""Records that count, and those that attackers make."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from spheroid_node.net import keys as keys_module
from spheroid_node.net._hivemind import DHTID, DHTLocalStorage, DHTProtocol, DHTRecord, DictionaryDHTValue
from spheroid_node.net.identity import Identity, ephemeral_identity
from spheroid_node.net.keys import CLOCK_SLACK, Keys
from spheroid_node.net.store import RecordStore
from spheroid_node.net.validator import RecordValidator, harden
from spheroid_node.run import ModelSpec, RunSpec
from spheroid_node.wire.frames import pack
from spheroid_node.wire.records import (
    MAX_RECORD_BYTES,
    NODE_TTL,
    manifest_ttl,
    manifests_key,
    nodes_key,
    run_key,
)

NOW = 4_000_000_000.0
"""Nothing that is kept until then has expired by hivemind's own clock."""
RUN = RunSpec(name="tiny", model=ModelSpec(blocks=3, layers=1, width=8, heads=2, window=16))
KEYS = Keys()
KEYS.know(RUN)
TTL = manifest_ttl(RUN.round.period)


def key_id(name: str) -> bytes:
    return DHTID.generate(source=name).to_bytes()


KEY = key_id(manifests_key(RUN.run_id, "block-0"))


@pytest.fixture
def validator(alice: Identity) -> RecordValidator:
    """Of a node that is not the author."""
    return RecordValidator(ephemeral_identity().key, KEYS, clock=lambda: NOW)


def signed(author: Identity, content: bytes = b"hello", **changes: object) -> DHTRecord:
    record = DHTRecord(KEY, pack(author.peer), pack(content), NOW + 60)
    record = replace(record, **changes)
    return replace(record, value=RecordValidator(author.key, Keys()).sign_value(record))


def test_an_authors_own_record_holds(validator, alice) -> None:
    record = signed(alice)
    assert validator.validate(record)
    assert validator.strip_value(record) == pack(b"hello")


@pytest.mark.parametrize("field", ["key", "subkey", "value", "expiration_time"])
def test_every_field_is_signed(validator, alice, bob, field) -> None:
    other = {
        "key": key_id(manifests_key(RUN.run_id, "block-1")),
        "subkey": pack(bob.peer),
        "value": pack(b"jello") + signed(alice).value[-64:],
        "expiration_time": NOW + 61,
    }
    assert not validator.validate(replace(signed(alice), **{field: other[field]}))


def test_a_record_under_anothers_name_is_refused(validator, alice, bob) -> None:
    forged = DHTRecord(KEY, pack(alice.peer), pack(b"hello"), NOW + 60)
    unsigned = RecordValidator(bob.key, Keys()).sign_value(forged)
    assert unsigned == forged.value
    mine = signed(bob)
    assert not validator.validate(replace(forged, value=pack(b"hello") + mine.value[-64:]))


def test_the_longest_life(validator, alice) -> None:
    """It is the key's: a node record that outlives its node would be one that nobody answers."""
    node = key_id(nodes_key(RUN.run_id, 1))
    for key, ttl in ((KEY, TTL), (node, NODE_TTL)):
        assert validator.validate(signed(alice, key=key, expiration_time=NOW + ttl))
        assert not validator.validate(signed(alice, key=key, expiration_time=NOW + ttl + CLOCK_SLACK + 1))


def test_what_has_expired(validator, alice) -> None:
    assert not validator.validate(signed(alice, expiration_time=NOW - 1))


@pytest.mark.parametrize(
    "name", ["spheroid/1/x", nodes_key(RUN.run_id, 3), nodes_key("0" * 16, 0), run_key("0" * 16)]
)
def test_a_key_that_no_run_of_ours_has(validator, alice, name) -> None:
    assert not validator.validate(signed(alice, key=key_id(name)))


def test_a_run_s_key_is_for_the_run_alone(validator, alice) -> None:
    other = RUN.model_copy(update={"seed": 1})
    assert validator.validate(signed(alice, RUN.pack(), key=key_id(run_key(RUN.run_id))))
    assert not validator.validate(signed(alice, other.pack(), key=key_id(run_key(RUN.run_id))))


def test_records_of_those_that_a_run_does_not_allow(alice, bob) -> None:
    closed = RunSpec.model_validate(RUN.model_dump() | {"access": [alice.peer]})
    keys = Keys()
    keys.know(closed)
    judge = RecordValidator(ephemeral_identity().key, keys, clock=lambda: NOW)
    for name in (nodes_key(closed.run_id, 0), manifests_key(closed.run_id, "interface")):
        assert judge.validate(signed(alice, key=key_id(name)))
        assert not judge.validate(signed(bob, key=key_id(name)))


@pytest.mark.parametrize("expiration", [math.inf, math.nan, 1e300])
def test_no_life_without_end(validator, alice, expiration) -> None:
    assert not validator.validate(signed(alice, expiration_time=expiration))


def test_the_largest_value(validator, alice) -> None:
    room = MAX_RECORD_BYTES - len(pack(bytes(MAX_RECORD_BYTES))) + MAX_RECORD_BYTES
    assert validator.validate(signed(alice, bytes(room)))
    assert not validator.validate(signed(alice, bytes(room + 1)))
    node = key_id(nodes_key(RUN.run_id, 1))
    assert validator.validate(signed(alice, bytes(4_000), key=node))
    assert not validator.validate(signed(alice, bytes(5_000), key=node))


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


# --- what a hardened protocol makes of others' answers ---------------------------------------------


@pytest.fixture
def protocol(alice: Identity) -> Any:
    """hivemind's, without a network."""
    made: Any = DHTProtocol.__new__(DHTProtocol)
    made.answers = []

    async def call_store(*_: Any, **__: Any) -> list[bool] | None:
        return made.answers.pop()

    made.record_validator = RecordValidator(alice.key, KEYS, clock=lambda: NOW)
    made.storage, made.call_store = DHTLocalStorage(), call_store
    harden(made, RecordStore(KEYS, alice.peer, clock=lambda: NOW), KEYS)
    return made


def test_an_answer_with_more_authors_than_a_key_has_is_cut(protocol, monkeypatch) -> None:
    """Nobody stores so many: its holder has made them up, or lets others make them up."""
    monkeypatch.setattr(keys_module, "ANSWER_BYTES", 50_000)
    answer = DictionaryDHTValue()
    for _ in range(5):
        record = signed(author := ephemeral_identity())
        answer.store(author.peer, record.value, record.expiration_time)
    answer.store("nobody", b"x", NOW + 60)
    assert protocol._validate_dictionary(KEY, answer)
    assert len(answer.data) == 2 and "nobody" not in answer.data
    assert not protocol._validate_dictionary(key_id("spheroid/1/x"), answer) and not answer.data


async def test_a_peer_that_refuses_is_none_that_holds(protocol) -> None:
    protocol.answers = [None, [False], [True], [False, True]]
    assert await protocol.call_store("peer") == [False, True]
    assert await protocol.call_store("peer") == [True]
    assert await protocol.call_store("peer") is None
    assert await protocol.call_store("peer") is None
