from __future__ import annotations

import json
from pathlib import Path

import pytest

from spheroid_node.net.contacts import MAX_MET, Contacts
from spheroid_node.net.identity import ephemeral_identity

PEERS = [ephemeral_identity().peer for _ in range(4)]
GIVEN = f"/ip4/127.0.0.1/tcp/1/p2p/{PEERS[0]}"


def test_who_was_met_is_known_in_another_life(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    contacts = Contacts([GIVEN], file)
    contacts.meet({PEERS[1]: ["/ip4/127.0.0.1/tcp/2"]})
    contacts.meet({PEERS[2]: ["/ip4/127.0.0.1/tcp/3", "/ip6/::1/tcp/3"]})
    for known in (contacts, Contacts([GIVEN], file)):
        assert known.addresses[0] == GIVEN
        assert known.met[-1] == f"/ip4/127.0.0.1/tcp/2/p2p/{PEERS[1]}", "the last one met comes first"
        assert known.by_peer == {
            PEERS[0]: ["/ip4/127.0.0.1/tcp/1"],
            PEERS[1]: ["/ip4/127.0.0.1/tcp/2"],
            PEERS[2]: ["/ip4/127.0.0.1/tcp/3", "/ip6/::1/tcp/3"],
        }
    assert file.stat().st_mode & 0o077 == 0


def test_where_a_peer_was_before_is_forgotten() -> None:
    contacts = Contacts([])
    contacts.meet({PEERS[1]: ["/ip4/127.0.0.1/tcp/2"]})
    contacts.meet({PEERS[1]: ["/ip4/127.0.0.1/tcp/9"]})
    assert contacts.met == (f"/ip4/127.0.0.1/tcp/9/p2p/{PEERS[1]}",)


def test_of_many_the_last_ones_are_kept() -> None:
    contacts = Contacts([])
    many = [ephemeral_identity().peer for _ in range(MAX_MET + 5)]
    for peer in many:
        contacts.meet({peer: ["/ip4/127.0.0.1/tcp/2"]})
    assert list(contacts.by_peer) == many[:4:-1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"7",
        b"null",
        b"[" * 100_000,
        json.dumps([7, "nonsense", f"/ip4/127.0.0.1/tcp/0/p2p/{PEERS[1]}", GIVEN + "/p2p-circuit"]).encode(),
    ],
)
def test_a_file_that_is_damaged_counts_as_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "peers.json"
    file.write_bytes(content)
    assert Contacts([GIVEN], file).addresses == (GIVEN,)


def test_a_full_disk_costs_only_what_is_met_from_now_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    contacts = Contacts([], tmp_path / "file" / "peers.json")
    contacts.meet({PEERS[1]: ["/ip4/127.0.0.1/tcp/2"]})
    assert contacts.met
