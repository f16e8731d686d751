"""Which DHT records count, and what hivemind's DHT needs besides so that one peer cannot hide another's.

A record is a value under (key, subkey): the subkey is its author's peer id, and the value ends with the
author's signature over key, subkey, value and expiration (protocols/dht.md). Every node checks what it stores
and what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.net._hivemind import (
    DHTLocalStorage,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    RecordValidatorBase,
    ValueWithExpiration,
    get_dht_time,
)
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.records import MAX_RECORD_BYTES, MAX_TTL
from spheroid_node.wire.signing import SIGNATURE_BYTES, peer_id_of_key, sign_bytes, verify_bytes

PURPOSE = "record"
CLOCK_SLACK = 60.0
"""Seconds by which an author's clock may be ahead of ours."""


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Signs the records of ``key``'s owner and accepts well-formed records of anyone."""

    def __init__(self, key: Ed25519PrivateKey, clock: Callable[[], float] = get_dht_time) -> None:
        self._key = key
        self._peer = peer_id_of_key(key)
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is its author's own, lives at most MAX_TTL and holds one byte string.

        Never raises: an exception here would leave a reader's get without an answer for ever.
        """
        try:
            return self._is_valid(record)
        except Exception:  # whatever an attacker managed to put in there
            return False

    def sign_value(self, record: DHTRecord) -> bytes:
        """The record's value with our signature; values under other authors' subkeys stay unsigned."""
        if record.subkey != pack(self._peer):
            return bytes(record.value)
        return bytes(record.value) + sign_bytes(self._key, PURPOSE, _signed_part(record))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without its signature."""
        return bytes(record.value[:-SIGNATURE_BYTES])

    def _is_valid(self, record: DHTRecord) -> bool:
        if not SIGNATURE_BYTES < len(record.value) <= MAX_RECORD_BYTES + SIGNATURE_BYTES:
            return False
        if not math.isfinite(record.expiration_time):
            return False
        if record.expiration_time > self._clock() + MAX_TTL + CLOCK_SLACK:
            return False
        author = _author(record.subkey)
        body = replace(record, value=self.strip_value(record))
        return (
            author is not None
            and isinstance(unpack(body.value), bytes)
            and verify_bytes(author, PURPOSE, _signed_part(body), record.value[-SIGNATURE_BYTES:])
        )


def _author(subkey: bytes) -> str | None:
    """The peer id in a packed subkey. hivemind's two reserved subkeys hold no text, so they are none."""
    try:
        author = unpack(subkey)
    except WireError:
        return None
    return author if isinstance(author, str) and pack(author) == subkey else None


def _signed_part(record: DHTRecord) -> bytes:
    return pack([record.key, record.subkey, record.value, float(record.expiration_time)])


class NoCache(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """Stands in for the cache of a DHT node and keeps nothing.

    A node answers a search from its cache alone when the cached value expires later, and anyone may store
    there: a single validly signed record with a long life would hide all others under its key.
    """

    def store(self, *_: Any, **__: Any) -> bool:
        return False

    def store_subkey(self, *_: Any, **__: Any) -> bool:
        return False


def harden(protocol: DHTProtocol) -> None:
    """Make ``protocol`` judge dictionaries record by record, and believe nothing that is not signed.

    As it comes, one bad record voids all that its holder answers; and an answer's own expiration, which
    nobody signs, ends a search early when it is infinite, so that one peer can hide what all others hold.
    """
    protocol.cache = NoCache()
    validate_record, call_find = protocol._validate_record, protocol.call_find

    def keep_valid(key: bytes, dictionary: DictionaryDHTValue) -> bool:
        with dictionary.freeze():
            for subkey, (value, expiration) in list(dictionary.items()):
                if not validate_record(key, protocol.serializer.dumps(subkey), value, expiration):
                    del dictionary[subkey]
            dictionary.maxsize = math.inf
            dictionary.latest_expiration_time = _latest(dictionary)
        return bool(dictionary)

    async def find(peer: Any, keys: Any) -> Any:
        found = await call_find(peer, keys)
        return found and {key: (_believable(value), nearest) for key, (value, nearest) in found.items()}

    protocol._validate_dictionary = keep_valid
    protocol.call_find = find


def _believable(found: ValueWithExpiration | None) -> ValueWithExpiration | None:
    """The found dictionary with the expiration of its longest-lived record; nothing else is believed."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    return ValueWithExpiration(found.value, found.value.latest_expiration_time)


def _latest(dictionary: DictionaryDHTValue) -> float:
    with dictionary.freeze():
        return max((item.expiration_time for _, item in dictionary.items()), default=-math.inf)
