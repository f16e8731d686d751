"""Listening ports: taken by us, or a clear error that names the port."""

from __future__ import annotations

import errno
import ipaddress
import socket

from spheroid_node.errors import ConfigInvalid, PortInUse

BACKLOG = 128


def listening_socket(host: str, port: int, option: str) -> socket.socket:
    """A non-blocking TCP socket that listens on ``host``:``port`` (0: any free port).

    Raises :class:`PortInUse`, or :class:`ConfigInvalid` where the address cannot be listened on at all.
    """
    listener = _bound(host, port, option)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def free_port(host: str, port: int, option: str) -> int:
    """``port`` if nothing listens on it, or some free port for 0. Raises as :func:`listening_socket`.

    For a program that binds the port itself. libp2p's daemon sets SO_REUSEPORT and would share the port of
    another such daemon without a word; this plain bind does not, so it fails as it should.
    """
    with _bound(host, port, option) as probe:
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def outgoing_address() -> str | None:
    """The address of this machine on its way out, None while there is no such way."""
    # A datagram socket that is only connected sends nothing, but knows the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def multiaddress(host: str, port: int) -> str:
    """``/ip4/…/tcp/…``, ``/ip6/…`` or ``/dns4/…`` of a TCP port."""
    try:
        family = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        family = "dns4"
    return f"/{family}/{host}/tcp/{port}"


def _bound(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a former process in TIME_WAIT must not keep its successor from the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(port, option) from error
        raise ConfigInvalid(option, f"cannot listen on {host} port {port}: {error.strerror}") from error
    except OverflowError as error:
        bound.close()
        raise ConfigInvalid(option, f"{port} is not a port; ports are 0 to 65535") from error
    return bound
