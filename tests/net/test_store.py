"""What a node stores for others: strangers can neither push anybody out nor fill its memory."""

from __future__ import annotations

import pytest

from spheroid_node.net import store as store_module
from spheroid_node.net._hivemind import DHTID, DHTLocalStorage, DHTProtocol
from spheroid_node.net.keys import Keys
from spheroid_node.net.store import RecordStore
from spheroid_node.wire.records import NODE_TTL, RUN_TTL, manifest_ttl, manifests_key, nodes_key, run_key
from spheroid_node.wire.signing import SIGNATURE_BYTES

OWN = "own peer"


class Time:
    now = 4_000_000_000.0
    """Nothing that is kept until then has expired by hivemind's own clock."""

    def __call__(self) -> float:
        return self.now


class Shelf:
    """A store of a run's records under one key."""

    def __init__(self, keys: Keys, name: str, ttl: float, clock: Time) -> None:
        kind = keys.kind_of(name)
        assert kind is not None
        self.kind = kind
        self.key = DHTID.generate(source=name)
        self.ttl = ttl
        self.clock = clock
        self.store = RecordStore(keys, OWN, clock)

    def put(self, author: str, value: bytes = b"value", later: float = 0.0) -> bool:
        return self.store.store_subkey(self.key, author, value, self.clock.now + self.ttl + later)

    def fill(self) -> None:
        count = 0
        while self.put(f"made up {count}"):
            count += 1
            assert count <= self.kind.authors

    def authors(self) -> set[str]:
        found = self.store.get(self.key)
        return set() if found is None else {author for author, _ in found.value.items()}


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def keys(run) -> Keys:
    known = Keys()
    known.know(run)
    return known


@pytest.fixture
def nodes(keys, run, clock) -> Shelf:
    return Shelf(keys, nodes_key(run.run_id, 0), NODE_TTL, clock)


@pytest.fixture
def manifests(keys, run, clock) -> Shelf:
    return Shelf(keys, manifests_key(run.run_id, "interface"), manifest_ttl(run.round.period), clock)


def test_a_record_replaces_its_author_s_former_one_only_if_it_expires_later(nodes) -> None:
    assert nodes.put("alice", b"one") and nodes.put("bob", b"two")
    assert not nodes.put("alice", b"same") and not nodes.put("alice", b"earlier", -1)
    assert nodes.put("alice", b"later", 1)
    found = nodes.store.get(nodes.key)
    assert {author: value for author, (value, _) in found.value.items()} == {"alice": b"later", "bob": b"two"}
    assert found.expiration_time == nodes.clock.now + NODE_TTL + 1


def test_keys_that_are_not_known(nodes) -> None:
    unknown = DHTID.generate(source="spheroid/1/x")
    assert not nodes.store.store_subkey(unknown, "alice", b"value", nodes.clock.now + 10)
    assert nodes.store.get(unknown) is None and list(nodes.store.items()) == []


def test_who_is_in_cannot_be_pushed_out(nodes) -> None:
    """Not even by its own record's growth; and who comes later waits until somebody leaves."""
    assert nodes.put("alice")
    nodes.fill()
    assert not nodes.put("bob") and not nodes.put("bob", later=30.0)
    for step in range(1, 20):
        nodes.clock.now += 15
        assert nodes.put("alice", bytes(nodes.kind.record_bytes + SIGNATURE_BYTES))
        assert "alice" in nodes.authors(), step
    assert nodes.put("bob"), "the made-up ones have expired"
    assert nodes.authors() == {"alice", "bob"}


def test_the_last_place_is_a_node_s_own(nodes) -> None:
    nodes.fill()
    assert len(nodes.authors()) == nodes.kind.authors - 1
    assert nodes.put(OWN)
    assert not nodes.put("bob")


@pytest.mark.parametrize("shelf", ["nodes", "manifests"])
def test_an_answer_stays_below_what_libp2p_sends(shelf, request) -> None:
    full: Shelf = request.getfixturevalue(shelf)
    full.fill()
    for count, author in enumerate(sorted(full.authors())):
        assert full.put(author, bytes(full.kind.record_bytes + SIGNATURE_BYTES), 1), count
    answer = DHTProtocol.serializer.dumps(full.store.get(full.key).value)
    assert 2 * 2**20 < len(answer) < 3.5 * 2**20


def test_a_search_gets_a_copy(nodes) -> None:
    """hivemind puts into it whatever others answer."""
    nodes.put("alice")
    nodes.store.get(nodes.key).value.store("mallory", b"value", nodes.clock.now + 1e6)
    for _, item in nodes.store.items():
        item.value.store("mallory", b"value", nodes.clock.now + 1e6)
    assert nodes.authors() == {"alice"}


def test_what_lives_too_long_since_a_clock_was_set_back_is_replaced(nodes) -> None:
    nodes.put("alice", b"before")
    nodes.clock.now -= 7200
    assert nodes.authors() == set()
    assert nodes.put("alice", b"after")
    assert nodes.authors() == {"alice"}


def test_all_manifests_together_take_no_more_than_their_pool(manifests, keys, run, monkeypatch) -> None:
    """Node records and the run, for which there is always room, are not of it."""
    monkeypatch.setattr(store_module, "POOL_BYTES", 10_000)
    manifests.put("alice", bytes(4_000))
    assert manifests.put("bob", bytes(4_000))
    assert not manifests.put("carol", bytes(4_000))
    assert not manifests.put("bob", bytes(8_000), 1)
    assert manifests.put("bob", bytes(4_000), 2)
    now = manifests.clock.now
    for name, ttl in ((nodes_key(run.run_id, 0), NODE_TTL), (run_key(run.run_id), RUN_TTL)):
        key = DHTID.generate(source=name)
        assert manifests.store.store_subkey(key, "carol", bytes(4_000), now + ttl)
    manifests.clock.now += manifests.ttl + 10
    assert manifests.put("carol", bytes(4_000)) and manifests.put("dave", bytes(4_000))


def test_what_has_expired_is_forgotten_under_all_keys(nodes, run) -> None:
    nodes.put("alice")
    nodes.clock.now += NODE_TTL + store_module.SWEEP_SECONDS
    other = DHTID.generate(source=nodes_key(run.run_id, 1))
    assert nodes.store.store_subkey(other, "alice", b"value", nodes.clock.now + 10)
    assert list(nodes.store._records) == [other]


def test_what_came_before_the_store_was_there_is_taken_over(nodes) -> None:
    before = DHTLocalStorage()
    soon = nodes.clock.now + 10
    before.store_subkey(nodes.key, "alice", b"value", soon)
    before.store_subkey(DHTID.generate(source="spheroid/1/x"), "alice", b"value", soon)
    nodes.store.take(before)
    assert [key for key, _ in nodes.store.items()] == [nodes.key] and nodes.authors() == {"alice"}
