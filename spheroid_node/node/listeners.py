"""The connections of workers that wait for the version which their updates become part of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from spheroid_node.net.links import Link
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.messages import ManifestMessage

TELL_SECONDS = 5.0
"""A worker that takes no manifest for so long finds it in the DHT."""


class Listeners:
    """Each link once a group, from its receipt to the end of the round or its own."""

    def __init__(self, groups: Iterable[str]) -> None:
        self._links: dict[str, set[Link]] = {group: set() for group in groups}
        self._telling: set[asyncio.Task[None]] = set()

    def add(self, group: str, link: Link) -> None:
        self._links[group].add(link)

    def remove(self, link: Link) -> None:
        """It has ended."""
        for links in self._links.values():
            links.discard(link)

    def forget(self, group: str) -> None:
        """A new round begins."""
        self._links[group].clear()

    def tell(self, group: str, sealed: bytes) -> None:
        """Send a manifest to all at once, without waiting for any of them: one may read nothing more."""
        message = ManifestMessage(manifest=sealed)
        for link in self._links[group]:
            task = asyncio.create_task(_tell(link, message), name=f"tell {group}")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def turn_away(self, group: str, error: WireError) -> None:
        """End their connections: another aggregator takes their updates."""
        await asyncio.gather(*(link.fail(error) for link in self._links[group]))

    async def finish(self) -> None:
        """Until all that were to be told have been, or do not listen."""
        if self._telling:
            await asyncio.wait(set(self._telling))

    async def stop(self) -> None:
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)


async def _tell(link: Link, message: ManifestMessage) -> None:
    """Whoever does not take it is cut off, so that it does not stay in memory."""
    with contextlib.suppress(WireError, OSError):
        try:
            await link.send(message, TELL_SECONDS)
        except TimeoutError:
            link.abort()
