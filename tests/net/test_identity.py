import threading
from pathlib import Path

import pytest

from spheroid_node.errors import IdentityInvalid, StateUnwritable
from spheroid_node.net.identity import ephemeral_identity, load_identity
from spheroid_node.wire.signing import peer_id_of_key


def test_first_start_makes_a_private_key_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.key"
    made = load_identity(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 68
    assert made.peer.startswith("12D3Koo")
    assert list(path.parent.iterdir()) == [path]


def test_second_start_is_the_same_peer(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first, second = load_identity(path), load_identity(path)
    assert first.peer == second.peer == peer_id_of_key(second.key)
    assert second.path == path


def test_simultaneous_first_starts_agree(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    peers: list[str] = []
    threads = [threading.Thread(target=lambda: peers.append(load_identity(path).peer)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(peers) == 8 and len(set(peers)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: b"\x08\x00" + content[2:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content + b"\x00",
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(damage(ephemeral_identity().file_content()))
    with pytest.raises(IdentityInvalid, match=r"identity\.key"):
        load_identity(path)


def test_a_file_open_to_others_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(ephemeral_identity().file_content())
    path.chmod(0o644)
    load_identity(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_room_for_a_key_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnwritable):
        load_identity(tmp_path / "file" / "identity.key")


def test_a_directory_is_no_key_file(tmp_path: Path) -> None:
    with pytest.raises(IdentityInvalid):
        load_identity(tmp_path)
