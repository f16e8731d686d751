import socket

import pytest

from spheroid_node.errors import ConfigInvalid, PortInUse
from spheroid_node.net.ports import free_port, is_loopback, listening_socket, multiaddress


def test_a_port_that_is_listened_on_is_in_use() -> None:
    with listening_socket("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(PortInUse, match=f"{port}.*--port"):
                free_port(host, port, "--port")
    assert free_port("127.0.0.1", port, "--port") == port


def test_a_port_shared_by_its_holder_is_in_use_all_the_same() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse):
            free_port("127.0.0.1", taken.getsockname()[1], "--port")


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigInvalid, match=r"203\.0\.113\.7"):
        free_port("203.0.113.7", 0, "--port")


def test_a_port_has_sixteen_bits() -> None:
    with pytest.raises(ConfigInvalid, match="70000"):
        free_port("127.0.0.1", 70000, "--port")


def test_addresses() -> None:
    assert multiaddress("127.0.0.1", 1) == "/ip4/127.0.0.1/tcp/1"
    assert multiaddress("::1", 1) == "/ip6/::1/tcp/1"
    assert multiaddress("example.org", 1) == "/dns4/example.org/tcp/1"
    assert is_loopback("127.1.2.3") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
