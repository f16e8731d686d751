"""The DHT of a swarm: hivemind's DHTNode on its own libp2p daemon, in our event loop.

What hivemind does not do by itself is added here: time-outs everywhere, errors in words, records that always
replace their author's former ones, and a watch that rebuilds everything when the daemon process dies.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from spheroid_node.errors import ClockWrong, DhtFailed, NotReachable, PeersUnreachable, SpheroidError
from spheroid_node.net import daemon
from spheroid_node.net._hivemind import (
    DHTID,
    DHTNode,
    DHTProtocol,
    Multiaddr,
    PeerID,
    PingRequest,
    ServicerBase,
    ValidationError,
    get_dht_time,
)
from spheroid_node.net.clock import dht_clock, steady
from spheroid_node.net.contacts import Contacts
from spheroid_node.net.daemon import Listening
from spheroid_node.net.daemon_streams import DaemonStreams
from spheroid_node.net.identity import Identity
from spheroid_node.net.keys import Keys
from spheroid_node.net.ports import free_port, multiaddress, outgoing_address
from spheroid_node.net.store import RecordStore
from spheroid_node.net.validator import RecordValidator, harden
from spheroid_node.run import RunSpec

log = structlog.get_logger()

REQUEST_TIMEOUT = 15.0
CREATE_TIMEOUT = 30.0
GREET_INTERVAL = 30.0
FIRST_GREETING = 5.0
"""Seconds after a start: who is connected by then is remembered."""
ISOLATED_INTERVAL = 5.0
"""In place of GREET_INTERVAL, while nobody answers."""
SILENCES = 2
"""Greetings without an answer after which somebody counts as gone."""
LOOK_INTERVAL = 1.0
"""Seconds between looks at this machine's own clock and address."""
GREET_TIMEOUT = 10.0
PING_TIMEOUT = 5.0
LONGEST_ROUND_TRIP = 2.0
"""Seconds; what comes back later tells the time to no better than clock.NOTABLE."""
ENTRANCES = 8
"""Peers among those known that a start tries to enter by."""
REPUBLISH_INTERVAL = 300.0
LONGEST_BACK_OFF = 30.0
TICK = 1e-3
"""Least growth of the expiration of a record that replaces another."""


class _Published(NamedTuple):
    value: bytes
    expiration: float


@dataclass
class Dht:
    """One peer of the DHT. Make it with :meth:`start`; run :meth:`watch` beside it; :meth:`stop` it."""

    identity: Identity
    listening: Listening
    contacts: Contacts
    addresses: list[str] = field(default_factory=list)
    """Addresses to hand out, /ip4/…/tcp/…/p2p/…; none of a peer that cannot be dialled."""
    keys: Keys = field(default_factory=Keys)
    """Those that it stores and reads records under; whoever finds the run makes them known."""
    streams: DaemonStreams = field(default_factory=DaemonStreams)
    """Streams to peers and from them, where these cannot be dialled otherwise."""
    _p2p: Any = None
    _node: Any = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _published: dict[str, _Published] = field(default_factory=dict)
    _writing: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """One writer of a key at a time: a store that arrives after its successor would be refused."""
    isolated: bool = False
    """Whether nobody answers of all that it knows."""
    orphaned: bool = False
    """Whether none of the peers that it was given answers."""
    _unanswered: Counter[str] = field(default_factory=Counter)
    """Greetings in a row that nobody answered, and that no peer given answered."""
    _place: str | None = None
    """This machine's address when last looked."""

    @classmethod
    async def start(
        cls,
        identity: Identity,
        peers: Sequence[str] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        announce: str | None = None,
        announce_port: int | None = None,
        client_mode: bool = False,
        relay: bool = False,
        option: str = "--port",
        contacts: Path | None = None,
        run: RunSpec | None = None,
    ) -> Dht:
        """Join the DHT at ``peers``, or begin one without any.

        ``announce`` is the IP address or name under which others reach ``host``, at ``announce_port`` where
        that is not ``port``; ``client_mode`` is for peers that nobody needs to reach: they listen nowhere and
        store nothing for others; ``relay`` for those that cannot be dialled, and are reached through others.
        ``option`` names the port in errors. ``contacts`` is a file of the peers met in an earlier life: where
        ``peers`` do not answer, it enters by one of them. ``run`` is the run of a peer that knows it: until a
        peer does, it stores nothing of it for others.
        Raises :class:`MalformedAddress`, :class:`PortInUse`, :class:`ConfigInvalid`,
        :class:`PeersUnreachable`, :class:`ClockWrong`, :class:`NotReachable`, :class:`DhtFailed`.
        """
        daemon.check_addresses(peers)
        if not client_mode:
            port = free_port(host, port, option)
        listening = Listening(host, port, announce, client_mode, option, relay, announce_port)
        dht = cls(identity, listening, Contacts(peers, contacts), _place=outgoing_address())
        if run is not None:
            dht.keys.know(run)
        try:
            await dht._build(dht.contacts.given)
        except PeersUnreachable as error:
            if not (others := await dht._answering(dht.contacts.met)):
                raise
            log.warning("dht.entered_by_others", cause=error.problem, peers=len(others))
            await dht._build(others)
        return dht

    @property
    def peer(self) -> str:
        return self.identity.peer

    @property
    def local_address(self) -> str:
        """The address for other programs on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.listening.host, self.listening.host)
        return f"{multiaddress(host, self.listening.port)}/p2p/{self.peer}"

    def time(self) -> float:
        """DHT time: seconds since 1970."""
        return float(get_dht_time())

    async def put(self, key: str, value: bytes, ttl: float) -> bool:
        """Publish ``value`` under (key, own peer id) for ``ttl`` seconds, in place of our value before.

        False says that nobody took it, or that none answered in time.
        """
        async with self._writing[key]:
            return await self._store(key, value, self.time() + ttl)

    async def get(self, key: str) -> dict[str, bytes]:
        """The newest valid value of every author under ``key``; nothing when no answer came in time."""
        try:
            async with self._request() as node:
                found = await node.get(key, latest=True)
        except TimeoutError:
            log.warning("dht.get_timed_out", key=key)
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        now = self.time()
        return {peer: item.value for peer, item in found.value.items() if item.expiration_time > now}

    async def watch(self) -> None:
        """Run until cancelled: rebuild when the daemon process dies, keep in touch, keep records alive.

        Nothing else notices a dead daemon, and a peer that lost all others never looks for them by itself.
        """
        while True:
            died = asyncio.ensure_future(daemon.ended(self._p2p))
            try:
                await self._keep_in_touch(died)
            finally:
                died.cancel()
            await self._rebuild()

    async def _keep_in_touch(self, died: asyncio.Future[None]) -> None:
        """Until the daemon has to be replaced. Waits are short: a machine may sleep in the middle of one."""
        greet_at, republish_at = steady() + FIRST_GREETING, steady() + REPUBLISH_INTERVAL
        while True:
            look = min(LOOK_INTERVAL, max(0.0, greet_at - steady()))
            await asyncio.wait({died}, timeout=look)
            if died.done():
                log.warning("dht.daemon_died", peer=self.peer)
                return
            if self._has_moved():
                return
            if dht_clock.has_jumped() or steady() >= greet_at:
                await self._greet()
                alone = self._unanswered["anybody"] > 0
                greet_at = steady() + (ISOLATED_INTERVAL if alone else GREET_INTERVAL)
            if steady() >= republish_at:
                await self._republish()
                republish_at = steady() + REPUBLISH_INTERVAL

    def _has_moved(self) -> bool:
        """Whether this machine has another address: connections over the one before are dead, and only time
        would tell. Without any network it stays where it was."""
        now = outgoing_address()
        if now is None or now == self._place:
            return False
        before, self._place = self._place, now
        log.warning("dht.address_changed", before=before, now=now)
        return self.listening.host in ("0.0.0.0", "::")

    async def stop(self) -> None:
        """Leave. Returns within seconds, with the daemon process gone, whatever state it was in."""
        self._ready.clear()
        self.streams.detach()
        node, p2p, self._node, self._p2p = self._node, self._p2p, None, None
        if node is not None:
            with suppress(Exception):  # a dying daemon raises all kinds; it is ended below in any case
                async with asyncio.timeout(2.0):
                    await node.shutdown()
        if p2p is not None:
            await daemon.end(p2p)

    # --- building and rebuilding ------------------------------------------------------------------

    async def _build(self, peers: tuple[str, ...], *, first: bool = True) -> None:
        """Daemon, then DHT node. At a rebuild, peers that do not answer are no reason to give up."""
        p2p = await daemon.start(self.identity, self.listening, peers)
        try:
            await self._set_clock(p2p, peers, first)
            async with asyncio.timeout(CREATE_TIMEOUT):
                node = await DHTNode.create(
                    p2p=p2p,
                    node_id=DHTID.generate(source=p2p.peer_id.to_bytes()),
                    initial_peers=list(peers),
                    client_mode=not self.listening.reachable,
                    record_validator=RecordValidator(self.identity.key, self.keys),
                    ensure_bootstrap_success=first,
                    strict=first,
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                    reuse_get_requests=False,
                )
                harden(node.protocol, RecordStore(self.keys, self.peer), self.keys)
                addresses = await self._visible_addresses(p2p)
                await self.streams.attach(p2p)
        except BaseException as error:
            self.streams.detach()
            await daemon.end(p2p)
            if isinstance(error, Exception) and not isinstance(error, SpheroidError):
                raise self._explain(error, peers) from error
            raise
        self._p2p, self._node, self.addresses = p2p, node, addresses
        self._ready.set()

    def _explain(self, error: Exception, peers: tuple[str, ...]) -> SpheroidError:
        if isinstance(error, ValidationError):
            return NotReachable(self.listening.port)
        if "bootstrap failed" in str(error):
            return PeersUnreachable(peers, "connected, but no DHT peer answered there")
        return DhtFailed(str(error) or type(error).__name__)

    async def _visible_addresses(self, p2p: Any) -> list[str]:
        if not self.listening.reachable:
            return []
        visible = [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
        return sorted(visible, key=lambda address: address.startswith("/ip4/127."))

    async def _rebuild(self) -> None:
        self._ready.clear()
        self.streams.detach()
        self._node.is_alive = False
        await daemon.end(self._p2p)
        wait = 0.5
        while not self._ready.is_set():
            for peers in (await self._answering(self.contacts.addresses), ()):
                try:
                    await self._build(peers, first=False)
                    break
                except SpheroidError as error:
                    log.warning("dht.rebuild_failed", peers=len(peers), cause=str(error))
            else:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_BACK_OFF)
        log.info("dht.rebuilt", peer=self.peer)
        await self._greet()
        await self._republish()

    # --- keeping in touch -------------------------------------------------------------------------

    async def _answering(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Those where something listens, as far as TCP can tell; libp2p would wait seconds for each other."""
        failures = await asyncio.gather(*map(daemon.tcp_failure, addresses))
        there = (a for a, failure in zip(addresses, failures, strict=True) if not failure)
        return tuple(a for a in there if not a.endswith(f"/{self.peer}"))[:ENTRANCES]

    async def _greet(self) -> None:
        """Connect to every peer we know of, tell its DHT node that we are here, and ask it for the time."""
        known = self.contacts.by_peer
        answered: dict[str, float | None] = {}
        connected: dict[str, list[str]] = {}
        with suppress(Exception):  # the daemon may be dying: then the next round of the watch rebuilds it
            async with asyncio.timeout(GREET_TIMEOUT):
                for info in await self._p2p.list_peers():
                    connected[info.peer_id.to_base58()] = [str(address) for address in info.addrs]
                targets = {peer: places for peer, places in (known | connected).items() if peer != self.peer}
                await asyncio.gather(
                    *(self._greet_one(*target, connected, answered) for target in targets.items())
                )
        self.contacts.meet({peer: connected.get(peer) or known[peer] for peer in answered})
        dht_clock.hear([ahead for ahead in answered.values() if ahead is not None])
        given = {address.rpartition("/p2p/")[2] for address in self.contacts.given} - {self.peer}
        if self._in_vain("anybody", not answered and known):
            await self._note_isolation(True, len(known))
        elif answered:
            await self._note_isolation(False, len(answered))
        self._note_bootstraps(gone=self._in_vain("given", given and not given & answered.keys()))

    def _in_vain(self, whom: str, unanswered: object) -> bool:
        """Whether greetings go unanswered: a single one says little on a busy machine."""
        self._unanswered[whom] = self._unanswered[whom] + 1 if unanswered else 0
        return self._unanswered[whom] >= SILENCES

    def _note_bootstraps(self, gone: bool) -> None:
        if gone and not self.orphaned:
            remedy = "start a bootstrap again, with its state directory; without one nobody new can enter"
            log.warning("dht.bootstraps_gone", addresses=list(self.contacts.given), remedy=remedy)
        elif self.orphaned and not gone:
            log.info("dht.bootstrap_back")
        self.orphaned = gone

    async def _greet_one(
        self, peer: str, places: list[str], connected: Container[str], answered: dict[str, float | None]
    ) -> None:
        peer_id = PeerID.from_base58(peer)
        with suppress(Exception):  # a peer that is away today may be back tomorrow
            if peer not in connected:
                # libp2p waits longer after every failed dial, in the end minutes: so dial only who is there.
                failures = await asyncio.gather(*map(daemon.tcp_failure, places))
                there = [Multiaddr(a) for a, failure in zip(places, failures, strict=True) if not failure]
                if not there:
                    return
                await self._p2p._client.connect(peer_id, there)
            if await self._node.protocol.call_ping(peer_id) is not None:
                answered[peer] = None
                answered[peer] = await _seconds_ahead(self._p2p, peer_id)

    @property
    def note(self) -> str:
        """For the owner; empty while all is well."""
        return "no bootstrap answers" if self.orphaned else ""

    async def _note_isolation(self, isolated: bool, peers: int) -> None:
        if isolated == self.isolated:
            return
        self.isolated = isolated
        if isolated:
            remedy = "look at this machine's network; the node goes on trying, and needs no restart"
            log.warning("dht.isolated", known=peers, remedy=remedy)
        else:
            log.info("dht.reconnected", peers=peers)
            await self._republish()

    async def _set_clock(self, p2p: Any, peers: Sequence[str], first: bool) -> None:
        """By the clocks of the peers that it enters by. Raises :class:`ClockWrong` for one far off."""
        if not peers:
            if first:
                dht_clock.trust()
            return
        ids = {address.rpartition("/p2p/")[2] for address in peers}
        answers = await asyncio.gather(*(_seconds_ahead(p2p, PeerID.from_base58(peer)) for peer in ids))
        ahead = [seconds for seconds in answers if seconds is not None]
        if ahead and not dht_clock.hear(ahead) and first:
            raise ClockWrong(f"by {max(map(abs, ahead)) / 86_400:.0f} days")

    async def _republish(self) -> None:
        """Publish our records again: peers that stored them for us may have left since."""
        for key in list(self._published):
            async with self._writing[key]:  # so that it cannot overtake a newer value
                value, expiration = self._published[key]
                if expiration > self.time():
                    await self._store(key, value, expiration)

    async def _store(self, key: str, value: bytes, expiration: float) -> bool:
        """Store under our peer id, expiring later than before: of two, the DHT keeps what expires last.

        But no later than it is kept at all: where a clock was set back, what we said before counts no more.
        """
        now, kind, former = self.time(), self.keys.kind_of(key), self._published.get(key)
        if kind is not None:
            expiration = min(expiration, now + kind.ttl)
        if former is not None and (kind is None or kind.lives(former.expiration, now)):
            expiration = max(expiration, former.expiration + TICK)
        self._published[key] = _Published(value, expiration)
        try:
            async with self._request() as node:
                return bool(await node.store(key, value, expiration, subkey=self.peer))
        except TimeoutError:
            log.warning("dht.put_timed_out", key=key)
            return False

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[Any]:
        async with asyncio.timeout(REQUEST_TIMEOUT):
            await self._ready.wait()
            yield self._node


async def _seconds_ahead(p2p: Any, peer: Any) -> float | None:
    """By how much a peer's DHT time is ahead of this machine's own clock; None where it does not say."""
    stub = ServicerBase.get_stub.__func__(DHTProtocol, p2p, peer)
    sent = dht_clock.wall()
    with suppress(Exception):  # all kinds, of a peer that leaves
        answer = await stub.rpc_ping(PingRequest(), timeout=PING_TIMEOUT)
        received = dht_clock.wall()
        if math.isfinite(answer.dht_time) and 0 <= received - sent <= LONGEST_ROUND_TRIP:
            return float(answer.dht_time) - (sent + received) / 2
    return None
