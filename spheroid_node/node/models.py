"""The hops that a node serves, built from the versions it holds."""

from __future__ import annotations

from collections import OrderedDict

from spheroid_node.model.composed import Hop
from spheroid_node.model.parameters import unflatten_
from spheroid_node.node.versions import VersionStore
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.serving.engine import for_serving

BUILT = 2
"""The hop of new sessions, and the one that running sessions began with."""


class HopModels:
    """The :class:`~spheroid_node.serving.hop.ModelSource` of one block: the last few hops asked for."""

    def __init__(self, run: RunSpec, block: int, store: VersionStore) -> None:
        self._run = run
        self._block = block
        self._store = store
        self._built: OrderedDict[tuple[bytes, bytes], Hop] = OrderedDict()

    def hop_model(self, block_version: int, interface_version: int) -> Hop | None:
        block = self._store.whole(block_group(self._block), block_version)
        interface = self._store.whole(INTERFACE_GROUP, interface_version)
        if block is None or interface is None:
            return None
        key = (block.digest, interface.digest)
        if key not in self._built:
            hop = Hop(self._run, self._block)
            unflatten_(hop.block, block.vector)
            unflatten_(hop.interface, interface.vector)
            self._built[key] = for_serving(hop)
        self._built.move_to_end(key)
        while len(self._built) > BUILT:
            self._built.popitem(last=False)
        return self._built[key]
