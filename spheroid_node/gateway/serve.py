"""Runs the gateway until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import structlog
import uvicorn

from spheroid_node.config import NodeConfig
from spheroid_node.gateway.app import create_app
from spheroid_node.gateway.swarm import ClientSwarm
from spheroid_node.net.ports import is_loopback, listening_socket
from spheroid_node.node.client import swarm_client
from spheroid_node.node.signals import Stopping

log = structlog.get_logger()

LEAVE_SECONDS = 5
LOOPBACK_NAMES = ("127.0.0.1", "localhost")


class _Server(uvicorn.Server):
    """Leaves signals to us: the swarm is to be left in order, and a second Ctrl-C leaves at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: NodeConfig, host: str, port: int) -> None:
    """Serve the swarm that ``config`` finds at ``host``:``port``.

    Raises :class:`PortInUse` before anything is looked for, then the errors of entering a swarm.
    """
    listener = listening_socket(host, port, "--port")
    with contextlib.closing(listener):
        async with Stopping() as stopping, swarm_client(config) as client:
            loopback = is_loopback(host)
            app = create_app(ClientSwarm(client), allowed_hosts=LOOPBACK_NAMES if loopback else ("*",))
            server = _Server(
                uvicorn.Config(
                    app,
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=LEAVE_SECONDS,
                )
            )
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{listener.getsockname()[1]}"
            log.info("gateway.started", url=url, run=client.run.run_id)
            stopping.started()
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(client.dht.watch(), name="dht")
                serving = tasks.create_task(server.serve(sockets=[listener]), name="http")
                await stopping.wait()
                server.should_exit = True
                await serving
                watch.cancel()
    log.info("gateway.stopped")
