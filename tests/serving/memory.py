"""A swarm in memory: hop services, joined by connections that pack and unpack every message."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import torch

from spheroid_node.model.composed import ComposedModel, Hop
from spheroid_node.run import INTERFACE_GROUP, ModelSpec, RunSpec, block_group
from spheroid_node.serving.engine import for_serving
from spheroid_node.serving.finding import ChainFinder
from spheroid_node.serving.hop import HopService
from spheroid_node.serving.remote import Generation, RemoteChain
from spheroid_node.serving.sessions import Limits
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.frames import HEADER, encode_frame, unpack
from spheroid_node.wire.messages import Error, HopAddress, Message, Open, Opened, Via, decode
from spheroid_node.wire.records import HeldVersion, NodeRecord

DEADLINE = 20.0
DIGEST = bytes(32)


class MemoryLink:
    """One end of a connection. ``silence`` keeps what is sent from arriving; ``reads``: see :meth:`send`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.via: Via = "tcp"
        self.other: MemoryLink | None = None
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = False
        self.silence = False
        self.reads = True

    async def send(self, message: Message, timeout: float = 60.0) -> None:
        """Where the other end does not read, every buffer counts as full, and this takes its time."""
        assert self.other is not None
        async with asyncio.timeout(timeout):
            await until(lambda: self.other.reads or self.closed or self.other.closed)  # type: ignore[union-attr]
        self.send_body(encode_frame(unpack(message.pack()))[HEADER.size :])

    def send_body(self, body: bytes) -> None:
        assert self.other is not None
        if self.closed or self.other.closed:
            raise ConnectionResetError("connection closed")
        if not self.silence:
            self.other.inbox.put_nowait(body)

    async def receive(self, timeout: float | None = None) -> Message:
        async with asyncio.timeout(timeout):
            body = await self.inbox.get()
        if body is None or self.closed:
            self.inbox.put_nowait(None)
            raise ConnectionResetError("connection closed")
        return decode(body)

    async def close(self) -> None:
        assert self.other is not None
        self.closed = True
        self.inbox.put_nowait(None)
        self.other.inbox.put_nowait(None)


def link_pair(client: str = "client", server: str = "server") -> tuple[MemoryLink, MemoryLink]:
    """The client's end and the server's."""
    ours, theirs = MemoryLink(server), MemoryLink(client)
    ours.other, theirs.other = theirs, ours
    return ours, theirs


class Models:
    """A model source that holds one version of a model's block."""

    def __init__(self, model: ComposedModel, block: int) -> None:
        self.hop = for_serving(copy.deepcopy(model).hop(block))
        self.held = (3, 7)  # block version, interface version

    def hop_model(self, block_version: int, interface_version: int) -> Hop | None:
        return self.hop if (block_version, interface_version) == self.held else None


class Node:
    """A replica: its hop service and the connections it serves."""

    def __init__(self, network: Network, peer: str, service: HopService, models: Models) -> None:
        self.network, self.peer, self.service, self.models = network, peer, service, models
        self.serving: dict[MemoryLink, asyncio.Task[None]] = {}

    async def serve(self, link: MemoryLink) -> None:
        """As a link server does: errors of the protocol end the connection with a reason."""
        try:
            await self.service.handle(link)
        except WireError as error:
            with suppress(OSError):
                await link.send(Error(code=error.code, detail=error.detail))
        except OSError:
            pass
        finally:
            await link.close()
            self.serving.pop(link, None)

    async def vanish(self) -> None:
        """All connections break and no new one is accepted."""
        self.network.nodes.pop(self.peer, None)
        tasks = list(self.serving.items())
        for link, task in tasks:
            await link.close()
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)


class Network:
    """Dialling by peer id, and a directory of who is there."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self.nodes: dict[str, Node] = {}
        self.records: list[dict[str, NodeRecord]] = [{} for _ in range(run.model.blocks)]
        self.dialled: list[MemoryLink] = []
        self.hidden: set[str] = set()
        """Peers that clients reach, but hops do not."""

    async def dial(self, address: HopAddress) -> MemoryLink:
        node = self.nodes.get(address.peer)
        if node is None:
            raise ConnectionRefusedError(f"{address.peer} is not there")
        ours, theirs = link_pair(server=address.peer)
        node.serving[theirs] = asyncio.create_task(node.serve(theirs))
        self.dialled.append(ours)
        return ours

    async def dial_from_hop(self, address: HopAddress) -> MemoryLink:
        if address.peer in self.hidden:
            raise TimeoutError(f"{address.peer} does not answer")
        return await self.dial(address)

    async def nodes_of(self, block: int) -> dict[str, NodeRecord]:
        return self.records[block]


class Directory:
    def __init__(self, network: Network) -> None:
        self._network = network

    async def nodes(self, block: int) -> dict[str, NodeRecord]:
        return await self._network.nodes_of(block)


class Swarm:
    """One replica a block, or more; chains through them."""

    def __init__(self, model: ComposedModel, executor: ThreadPoolExecutor) -> None:
        self.model, self.run = model, model.run
        self.network = Network(model.run)
        self.directory = Directory(self.network)
        self._executor = executor

    def add(self, block: int, peer: str, limits: Limits | None = None, **record: Any) -> Node:
        models = Models(self.model, block)
        service = HopService(self.run, block, models, self.network.dial_from_hop, self._executor, limits)
        node = self.network.nodes[peer] = Node(self.network, peer, service, models)
        self.network.records[block][peer] = node_record(self.run, block, **record)
        return node

    def node(self, peer: str) -> Node:
        return self.network.nodes[peer]

    async def chain(self, seed: int = 0, temperature: float = 0.0, logits: bool = False) -> RemoteChain:
        generation = Generation(seed, temperature, logits)
        return await self.finder(generation).open()

    def finder(self, generation: Generation, **options: Any) -> ChainFinder:
        return ChainFinder(
            self.directory, self.run, self.network.dial, generation, retry_seconds=0.01, **options
        )

    async def session(self, peer: str, name: bytes | None = None, **changes: Any) -> tuple[MemoryLink, bytes]:
        """A session opened by hand at one node: the client's end of the connection, and its name."""
        link = await self.network.dial(HopAddress(peer=peer, host="memory", port=1))
        name = name or secrets.token_bytes(16)
        await link.send(opening(name, **changes))
        answer = await link.receive(DEADLINE)
        assert isinstance(answer, Opened) and answer.session == name
        return link, name


MakeSwarm = Callable[..., Swarm]
"""The fixture ``make_swarm``."""


def opening(session: bytes, **changes: Any) -> Open:
    fields: dict[str, Any] = {
        "session": session, "block": 0, "block_version": 3, "interface_version": 7, "next": None, "seed": 0,
        "temperature": 0.0,
    }  # fmt: skip
    return Open(**fields | changes)


def node_record(run: RunSpec, block: int, **changes: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "run": run.run_id, "block": block, "state": "online", "host": "memory", "port": 1, "device": "cpu",
        "started": 0.0, "round": 0, "held": [held(block_group(block), 3), held(INTERFACE_GROUP, 7)],
        "accepted": 0, "late": 0, "refused": 0, "led": 0, "tokens_per_second": 0.0, "train_loss": None,
        "from_noise_ce": None, "bytes_in": 0, "bytes_out": 0, "sessions": 0, "hop_seconds": 0.0,
    }  # fmt: skip
    fields |= changes
    own = [version.version for version in fields["held"] if version.group == block_group(block)]
    return NodeRecord(**{"serves": max(own, default=0)} | fields)


def held(group: str, version: int, digest: bytes = DIGEST) -> HeldVersion:
    return HeldVersion(group=group, version=version, digest=digest)


def small_model(
    blocks: int = 3, window: int = 24, states: Literal["fp16", "int8"] = "fp16", **learning: Any
) -> ComposedModel:
    """A model with parameters that are far from zero everywhere, so that every input matters."""
    run = RunSpec(
        name="serving",
        model=ModelSpec(blocks=blocks, layers=2, width=16, heads=2, window=window),
        states=states,
        learning=learning,  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(5)
    model = ComposedModel(run).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


async def until(condition: Callable[[], bool], deadline: float = DEADLINE) -> None:
    """Wait for ``condition``; the test fails if it does not come true."""
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
