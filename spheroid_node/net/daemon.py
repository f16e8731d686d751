"""The libp2p daemon (p2pd) under a DHT peer: started, its failures in words, and surely ended."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from spheroid_node.errors import DhtFailed, MalformedAddress, PeersUnreachable, PortInUse, SpheroidError
from spheroid_node.net._hivemind import P2P, Multiaddr
from spheroid_node.net.identity import Identity
from spheroid_node.net.ports import is_loopback, multiaddress

STARTUP_TIMEOUT = 60.0
"""Silent bootstrap peers are tried one by one, about five seconds each."""
END_TIMEOUT = 3.0
PROBE_TIMEOUT = 3.0


class Listening(NamedTuple):
    """Where a DHT peer listens and under which address others reach it."""

    host: str
    port: int
    announce: str | None
    client_mode: bool
    option: str
    relay: bool = False
    announce_port: int | None = None
    """None: the one it listens on."""

    @property
    def reachable(self) -> bool:
        """Whether others can dial it, so that it may store records for them."""
        return not self.client_mode and not self.relay

    def daemon_arguments(self) -> dict[str, Any]:
        """Arguments of hivemind's P2P. On loopback nothing may look for a way through a NAT."""
        public = not is_loopback(self.host)
        arguments: dict[str, Any] = {"nat_port_map": public, "auto_nat": public, "use_relay": public}
        if self.client_mode:
            return {
                **arguments,
                "nat_port_map": False,
                "no_listen": True,
                "host_maddrs": None,
                "dht_mode": "client",
            }
        arguments["host_maddrs"] = [multiaddress(self.host, self.port)]
        if self.relay:
            # No announce_maddrs: they would stand in place of the relays' addresses.
            return {
                **arguments,
                "use_relay": True,
                "use_auto_relay": True,
                "force_reachability": "private",
                "dht_mode": "client",
            }
        if self.announce is not None:
            arguments["announce_maddrs"] = [multiaddress(self.announce, self.announce_port or self.port)]
        return arguments


def check_addresses(addresses: Iterable[str]) -> None:
    """Raise :class:`MalformedAddress` unless all are multiaddresses that name a peer."""
    for address in addresses:
        try:
            names_peer = "p2p" in Multiaddr(address)
        except Exception as error:  # the parser raises a dozen types, some not its own
            cause = str(error).removeprefix(f"Invalid MultiAddr {address!r}").strip()
            raise MalformedAddress(address, cause[:1].lower() + cause[1:]) from error
        if not names_peer:
            raise MalformedAddress(address, "it does not end in /p2p/ and a peer id")


async def start(identity: Identity, listening: Listening, peers: Sequence[str]) -> Any:
    """Start a daemon, connected to at least one of ``peers`` if there are any: a hivemind ``P2P``.

    Raises :class:`PortInUse`, :class:`PeersUnreachable`, :class:`DhtFailed`. A start that fails or is
    cancelled leaves no process behind.
    """
    started: list[Any] = []

    class Tracked(P2P):  # type: ignore[misc]  # hivemind is untyped, and its create() loses what it started
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    async with _key_file(identity) as path:
        try:
            return await Tracked.create(
                initial_peers=list(peers),
                identity_path=str(path),
                check_if_identity_free=False,
                startup_timeout=STARTUP_TIMEOUT,
                **listening.daemon_arguments(),
            )
        except BaseException as error:
            for p2p in started:
                await end(p2p)
            if isinstance(error, Exception):
                raise await _explain(error, listening, peers) from error
            raise


async def ended(p2p: Any) -> None:
    """Return once the daemon has exited, or the connection to it is lost; nothing else tells."""
    exited = asyncio.ensure_future(p2p._child.wait())
    try:
        await asyncio.wait({exited, *_connection_tasks(p2p)}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        exited.cancel()


async def end(p2p: Any) -> None:
    """End a daemon within seconds, by force if it must be, and remove its sockets."""
    child = p2p._child
    with suppress(Exception):
        async with asyncio.timeout(END_TIMEOUT):
            await p2p.shutdown()
            # Their exceptions are of no more interest, and would be logged if nobody took them.
            await asyncio.gather(*_connection_tasks(p2p), return_exceptions=True)
    if child is not None and child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    _remove_sockets(p2p)


def _connection_tasks(p2p: Any) -> set[asyncio.Task[None]]:
    if p2p._client is None:
        return set()
    control = p2p._client.control
    return {task for task in (control._read_task, control._write_task) if task is not None}


def _remove_sockets(p2p: Any) -> None:
    for name in ("_daemon_listen_maddr", "_client_listen_maddr"):
        with suppress(OSError, AttributeError):
            Path(getattr(p2p, name)["unix"]).unlink()


@asynccontextmanager
async def _key_file(identity: Identity) -> AsyncIterator[Path]:
    """The identity's own file, or a private one that is gone once the daemon has read it."""
    if identity.path is not None:
        yield identity.path
        return
    with tempfile.TemporaryDirectory(prefix="spheroid-node-") as folder:
        path = Path(folder) / "identity.key"
        path.touch(mode=0o600)
        path.write_bytes(identity.file_content())
        yield path


async def _explain(error: Exception, listening: Listening, peers: Sequence[str]) -> SpheroidError:
    text = str(error) or type(error).__name__
    if "address already in use" in text:
        return PortInUse(listening.port, listening.option)
    if peers and ("bootstrap peers" in text or "failed to start in" in text):
        return PeersUnreachable(peers, "; ".join(await asyncio.gather(*map(_why_unreachable, peers))))
    return DhtFailed(text.removeprefix("Daemon failed to start: "))


async def _why_unreachable(address: str) -> str:
    return await tcp_failure(address) or f"{address}: something listens there, but not the peer named"


async def tcp_failure(address: str) -> str | None:
    """In a few words, why a plain TCP connection to a multiaddress fails.

    None when it succeeds, or when the address is no plain TCP address.
    """
    parsed = Multiaddr(address)
    host = next((parsed[kind] for kind in ("ip4", "ip6", "dns4", "dns6", "dns") if kind in parsed), None)
    if host is None or "tcp" not in parsed:
        return None
    where = f"{host} port {parsed['tcp']}"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(host, int(parsed["tcp"]))
    except TimeoutError:
        return f"{where}: no answer"
    except OSError as error:
        return f"{where}: {os.strerror(error.errno).lower() if error.errno and error.errno > 0 else error}"
    writer.close()
    return None
