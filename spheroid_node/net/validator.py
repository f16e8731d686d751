"""Which DHT records count, and what hivemind's DHT needs besides so that one peer cannot hide another's.

A record is a value under (key, subkey): the subkey is its author's peer id, and the value ends with the
author's signature over key, subkey, value and expiration (protocols/dht.md). Every node checks what it stores
and what it reads, by the same rules.
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
from spheroid_node.net.keys import Keys
from spheroid_node.net.store import RecordStore
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.signing import SIGNATURE_BYTES, peer_id_of_key, sign_bytes, verify_bytes

PURPOSE = "record"


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Signs the records of ``key``'s owner and accepts those that have a place under ``keys``."""

    def __init__(self, key: Ed25519PrivateKey, keys: Keys, clock: Callable[[], float] = get_dht_time) -> None:
        self._key = key
        self._keys = keys
        self._peer = peer_id_of_key(key)
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is its author's own, holds one byte string, and is what its key is for.

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
        kind = self._keys.kind(record.key)
        if kind is None or not kind.lives(record.expiration_time, self._clock()):
            return False
        if not SIGNATURE_BYTES < len(record.value) <= kind.record_bytes + SIGNATURE_BYTES:
            return False
        author = _author(record.subkey)
        if author is None or not kind.allows(author):
            return False
        packed = replace(record, value=self.strip_value(record))
        body = unpack(packed.value)
        return (
            isinstance(body, bytes)
            and kind.holds(body)
            and verify_bytes(author, PURPOSE, _signed_part(packed), record.value[-SIGNATURE_BYTES:])
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


def harden(protocol: DHTProtocol, store: RecordStore, keys: Keys) -> None:
    """Make ``protocol`` keep what it stores in ``store``, judge dictionaries record by record, and believe
    nothing that is not signed.

    As it comes, one bad record voids all that its holder answers; and an answer's own expiration, which
    nobody signs, ends a search early when it is infinite, so that one peer can hide what all others hold.
    A peer that refuses a record counts as one that holds it, and the next is not asked.
    """
    store.take(protocol.storage)
    protocol.storage, protocol.cache = store, NoCache()
    validate_record = protocol._validate_record
    call_find, call_store = protocol.call_find, protocol.call_store

    def keep_valid(key: bytes, dictionary: DictionaryDHTValue) -> bool:
        kind = keys.kind(key)
        room = kind.authors if kind is not None else 0
        with dictionary.freeze():
            for subkey, (value, expiration) in list(dictionary.items()):
                subkey_bytes = protocol.serializer.dumps(subkey)
                if room and validate_record(key, subkey_bytes, value, expiration):
                    room -= 1
                else:
                    del dictionary[subkey]
            dictionary.maxsize = math.inf
            dictionary.latest_expiration_time = _latest(dictionary)
        return bool(dictionary)

    async def find(peer: Any, keys: Any) -> Any:
        found = await call_find(peer, keys)
        return found and {key: (_believable(value), nearest) for key, (value, nearest) in found.items()}

    async def store_at(*request: Any, **options: Any) -> Any:
        taken = await call_store(*request, **options)
        return taken if taken and any(taken) else None

    protocol._validate_dictionary = keep_valid
    protocol.call_find, protocol.call_store = find, store_at


def _believable(found: ValueWithExpiration | None) -> ValueWithExpiration | None:
    """The found dictionary with the expiration of its longest-lived record; nothing else is believed."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    return ValueWithExpiration(found.value, found.value.latest_expiration_time)


def _latest(dictionary: DictionaryDHTValue) -> float:
    with dictionary.freeze():
        return max((item.expiration_time for _, item in dictionary.items()), default=-math.inf)
