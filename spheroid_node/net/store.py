"""What a node stores for others in the DHT: as much as its run takes, however much strangers send.

hivemind's own storage has no limits, keeps a trace of every store until it expires, and lends the dictionary
itself to a search, which then puts into it whatever others answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spheroid_node.net._hivemind import (
    DHTID,
    DHTLocalStorage,
    DictionaryDHTValue,
    ValueWithExpiration,
    get_dht_time,
)
from spheroid_node.net.keys import Keys, Kind

POOL_BYTES = 256 * 2**20
"""Most of all pooled records together. Of a run with many groups, each key's own room adds up to far more."""
RECORD_BYTES = 300
"""What a record takes in memory beside its value."""
SWEEP_SECONDS = 30.0

Records = dict[str, Any]
"""By author, a value and its expiration each."""


class RecordStore(DHTLocalStorage):  # type: ignore[misc]  # hivemind is untyped
    """Valid records by key and author.

    Who is in may renew its record until it lets it expire. A new author is taken in while there is room: so
    those that a stranger makes up can fill it, but push nobody out. The last place is this node's own.
    """

    def __init__(self, keys: Keys, own: str, clock: Callable[[], float] = get_dht_time) -> None:
        super().__init__()
        self._keys = keys
        self._own = own
        self._clock = clock
        self._records: dict[DHTID, Records] = {}
        self._pooled = 0
        """Bytes; of those that have expired too, until they are swept out."""
        self._swept = clock()

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Whether the record is taken; hivemind has had it validated."""
        self._sweep()
        kind = self._keys.kind(key.to_bytes())
        if kind is None or not kind.lives(expiration_time, self._clock()):
            return False
        records = self._live(key, kind)
        former = records.get(subkey)
        if former is None and len(records) >= kind.authors - (subkey != self._own):
            return False
        if former is not None and former.expiration_time >= expiration_time:
            return False
        growth = _size(value) - (_size(former.value) if former is not None else 0)
        if kind.pooled and growth > 0 and self._pooled + growth > POOL_BYTES:
            return False
        self._pooled += growth if kind.pooled else 0
        self._records[key] = records | {subkey: ValueWithExpiration(value, expiration_time)}
        return True

    def get(self, key: DHTID) -> Any:
        """A copy of all records under ``key``; None if there is none."""
        kind = self._keys.kind(key.to_bytes())
        records = {} if kind is None else self._live(key, kind)
        if not records:
            return None
        dictionary = DictionaryDHTValue()
        for author, (value, expiration) in records.items():
            dictionary.store(author, value, expiration)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> Iterator[tuple[DHTID, Any]]:
        """All keys with what :meth:`get` says of them; what hivemind hands over to a new neighbour."""
        found = ((key, self.get(key)) for key in list(self._records))
        return ((key, item) for key, item in found if item is not None)

    def take(self, other: DHTLocalStorage) -> None:
        """What another storage has taken in so far."""
        for key, item in other.items():
            for author, (value, expiration) in item.value.items():
                self.store_subkey(key, author, value, expiration)

    def _live(self, key: DHTID, kind: Kind) -> Records:
        """Also without those that live too long, as where a clock was set: they would refuse later ones."""
        now = self._clock()
        return {
            author: record
            for author, record in self._records.get(key, {}).items()
            if kind.lives(record.expiration_time, now)
        }

    def _sweep(self) -> None:
        """Forget what has expired under all keys, now and then."""
        now = self._clock()
        if abs(now - self._swept) < SWEEP_SECONDS:
            return
        self._swept, self._pooled = now, 0
        for key in list(self._records):
            kind = self._keys.kind(key.to_bytes())
            if kind is not None and (records := self._live(key, kind)):
                self._records[key] = records
                self._pooled += sum(_size(item.value) for item in records.values()) if kind.pooled else 0
            else:
                del self._records[key]


def _size(value: bytes) -> int:
    return len(value) + RECORD_BYTES
