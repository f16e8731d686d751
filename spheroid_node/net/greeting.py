"""The handshake of a link: of which run both are, who has called, and for what (protocols/link.md)."""

from __future__ import annotations

import secrets
from collections.abc import Container
from typing import Any

from spheroid_node.net.identity import Identity
from spheroid_node.net.link import Link
from spheroid_node.run import RunSpec
from spheroid_node.wire.codes import PROTOCOL, ErrorCode, WireError
from spheroid_node.wire.messages import Greeting, Hello, Welcome
from spheroid_node.wire.signing import sign_bytes, verify_bytes

GREETING = "greeting"
"""Purpose of the signature in a Greeting."""
MEMBERS_ONLY = frozenset({"round"})
"""Services for peers that the run allows; reading and generating are open to everyone."""


async def greet(link: Link, identity: Identity, run_id: str, service: Any) -> None:
    """The client's part, to the server's Welcome. Raises as :meth:`Link.expect`."""
    hello = await link.expect(Hello)
    if hello.peer != link.peer:
        raise WireError(ErrorCode.NOT_AUTHENTIC, f"it calls itself {hello.peer}")
    if hello.run != run_id:
        raise WireError(ErrorCode.WRONG_RUN, f"it belongs to run {hello.run}, we to {run_id}")
    version = min(PROTOCOL[1], hello.newest)
    if version < max(PROTOCOL[0], hello.oldest):
        theirs = f"{hello.oldest} to {hello.newest}"
        raise WireError(ErrorCode.WRONG_PROTOCOL, f"it speaks {theirs}, we {PROTOCOL[0]} to {PROTOCOL[1]}")
    signature = sign_bytes(identity.key, GREETING, greeting_bytes(hello.peer, hello.nonce))
    await link.send(
        Greeting(version=version, run=run_id, service=service, peer=identity.peer, signature=signature)
    )
    await link.expect(Welcome)


async def receive_greeting(
    link: Link, identity: Identity, run: RunSpec, services: Container[str]
) -> Greeting:
    """The server's part, to just before its Welcome. Raises :class:`WireError` for who may not come in."""
    oldest, newest = max(PROTOCOL[0], run.protocol[0]), min(PROTOCOL[1], run.protocol[1])
    run_id, us, nonce = run.run_id, identity.peer, secrets.token_bytes(32)
    await link.send(Hello(oldest=oldest, newest=newest, run=run_id, peer=us, nonce=nonce))
    greeting = await link.expect(Greeting)
    if greeting.run != run_id:
        raise WireError(ErrorCode.WRONG_RUN, f"this node belongs to run {run_id}, not to {greeting.run}")
    if not oldest <= greeting.version <= newest:
        raise WireError(ErrorCode.WRONG_PROTOCOL, f"this node speaks {oldest} to {newest}")
    if link.proven not in (None, greeting.peer):
        raise WireError(ErrorCode.NOT_AUTHENTIC, f"the connection is from {link.proven}")
    if not verify_bytes(greeting.peer, GREETING, greeting_bytes(us, nonce), greeting.signature):
        raise WireError(ErrorCode.NOT_AUTHENTIC, "the greeting's signature does not hold")
    if greeting.service not in services:
        raise WireError(ErrorCode.NOT_FOUND, f"no service {greeting.service} here")
    if greeting.service in MEMBERS_ONLY and not run.allows(greeting.peer):
        raise WireError(ErrorCode.NOT_ALLOWED, f"{greeting.peer} is not on the list of run {run_id}")
    return greeting


def greeting_bytes(server: str, nonce: bytes) -> bytes:
    """What a client signs. The server's name in it keeps one server from passing a greeting on to another."""
    return server.encode() + nonce
