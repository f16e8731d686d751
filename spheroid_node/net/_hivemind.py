"""The parts of hivemind that this package uses. Importing this costs seconds and some 280 MB.

hivemind and its p2pd log to the terminal by themselves; here they are told to keep to errors, and their lines
go through the root logger. ``HIVEMIND_LOGLEVEL`` in the environment turns them up.
"""

from __future__ import annotations

import logging
import math
import os
import sys

os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")

from hivemind.dht import protocol as _protocol
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto.dht_pb2 import PingRequest
from hivemind.proto.p2pd_pb2 import Request, Response, StreamOpenRequest
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from spheroid_node.net.clock import dht_clock

use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(os.environ["HIVEMIND_LOGLEVEL"])
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

get_dht_time = dht_clock.time
for _module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "hivemind"]:
    if hasattr(_module, "get_dht_time"):
        setattr(_module, "get_dht_time", get_dht_time)  # noqa: B010  untyped
# Whose clock differs is not turned away: it follows the others (net/clock.py).
_protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf

__all__ = [
    "DHTID",
    "P2P",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DictionaryDHTValue",
    "Multiaddr",
    "PeerID",
    "PingRequest",
    "RecordValidatorBase",
    "Request",
    "Response",
    "ServicerBase",
    "StreamOpenRequest",
    "ValidationError",
    "ValueWithExpiration",
    "get_dht_time",
    "read_pbmsg_safe",
    "write_pbmsg",
]
