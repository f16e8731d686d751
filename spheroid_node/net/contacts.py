"""The peers that a DHT peer knows by address: those that it was given, and those that it has met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from spheroid_node.config import check_address
from spheroid_node.errors import MalformedAddress
from spheroid_node.training.checkpoint import write_atomically

MAX_MET = 64
"""Peers that are remembered; of more, those that answered last."""
MAX_FILE_BYTES = 256 * 1024


class Contacts:
    """Kept in ``file``, if there is one: who has met a swarm finds it again when all bootstraps are gone."""

    def __init__(self, given: Sequence[str], file: Path | None = None) -> None:
        self.given = tuple(given)
        self._file = file
        self._met: dict[str, tuple[str, ...]] = {}
        """By peer id, the one that answered last at the end."""
        for address in _read(file) if file is not None else ():
            where, peer = _parts(address)
            self._met[peer] = (*self._met.get(peer, ()), where)

    @property
    def met(self) -> tuple[str, ...]:
        """Addresses of the peers that were met, the last one first."""
        return tuple(f"{at}/p2p/{peer}" for peer, places in reversed(self._met.items()) for at in places)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of them, /ip4/…/tcp/…/p2p/…, those given first."""
        return tuple(dict.fromkeys((*self.given, *self.met)))

    @property
    def by_peer(self) -> dict[str, list[str]]:
        """Addresses without the peer id, by peer id."""
        found: dict[str, list[str]] = {}
        for address in self.addresses:
            where, peer = _parts(address)
            found.setdefault(peer, []).append(where)
        return found

    def meet(self, answered: dict[str, Sequence[str]]) -> None:
        """Peers that have just answered, with the addresses at which they can be dialled."""
        before = dict(self._met)
        for peer, places in answered.items():
            if usable := tuple(place for place in places if _is_usable(f"{place}/p2p/{peer}")):
                self._met.pop(peer, None)
                self._met[peer] = usable
        self._met = dict(list(self._met.items())[-MAX_MET:])
        if self._met != before and self._file is not None:
            with suppress(OSError):  # a full disk costs what is met from now on
                saved = [f"{at}/p2p/{peer}" for peer, places in self._met.items() for at in places]
                write_atomically(self._file, json.dumps(saved, indent=1).encode(), 0o600)


def _parts(address: str) -> tuple[str, str]:
    where, _, peer = address.partition("/p2p/")
    return where, peer


def _is_usable(address: str) -> bool:
    with suppress(MalformedAddress):
        check_address(address)
        return True
    return False


def _read(file: Path) -> list[str]:
    """The last one met at the end. A file that is damaged counts as none."""
    with suppress(OSError, ValueError, RecursionError):
        with file.open("rb") as saved:
            addresses = json.loads(saved.read(MAX_FILE_BYTES))
        if isinstance(addresses, list):
            return [item for item in addresses if isinstance(item, str) and _is_usable(item)]
    return []
