"""The trainer process as the daemon sees it: spawned, and asked one thing at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

import structlog

from spheroid_node.errors import TrainerFailed
from spheroid_node.training.trainer_protocol import (
    FRAME_LIMIT,
    MODULE,
    Configure,
    Stop,
    decode,
    encode_request,
    error_of,
)
from spheroid_node.wire.codes import WireError
from spheroid_node.wire.frames import HEADER, frame_length
from spheroid_node.wire.messages import Message

log = structlog.get_logger()

CONFIGURE_SECONDS = 180.0
STOP_SECONDS = 3.0


class TrainerProcess:
    """One child process that trains one block. Requests and replies: training/trainer_protocol.py."""

    def __init__(self, configuration: Configure) -> None:
        self._configuration = configuration
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None
        self.device = ""
        """The device the child resolved, e.g. ``cuda``."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Spawn and configure. Raises the user's error (e.g. DataMissing) or :class:`TrainerFailed`."""
        await self.stop()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ, OMP_NUM_THREADS=str(self._configuration.threads)),
        )
        self._listener = asyncio.create_task(self._relay_log(), name="trainer.log")
        reply = await self.request(self._configuration, CONFIGURE_SECONDS)
        self.device = reply["device"]
        log.info(
            "trainer.started",
            pid=self.pid,
            device=self.device,
            precision=reply["precision"],
            copied_megabytes=reply["copied_bytes"] / 1e6,
            train_bytes=reply["train_bytes"],
            held_out_bytes=reply["held_out_bytes"],
        )

    async def request(self, request: Message, timeout: float) -> dict[str, Any]:
        """The child's reply. Raises :class:`TrainerFailed` when it dies, is silent or reports a failure."""
        what = type(request).__name__.lower()
        async with self._turn:
            try:
                async with asyncio.timeout(timeout):
                    reply = await self._exchange(request)
            except TimeoutError as error:
                self._kill()
                raise TrainerFailed(f"no answer to {what} in {timeout:.0f} s") from error
            except (OSError, asyncio.IncompleteReadError, RuntimeError) as error:
                # uvloop has a RuntimeError of its own for a pipe whose reader has died.
                raise TrainerFailed(f"it died while asked to {what}") from error
            except WireError as error:
                self._kill()
                raise TrainerFailed(f"its answer to {what} makes no sense: {error}") from error
            except asyncio.CancelledError:
                # A reply that nobody reads would be taken for the next one's.
                self._kill()
                raise
        failed = error_of(reply)
        if failed is not None:
            raise failed
        return reply

    async def stop(self) -> None:
        """End the child, kindly if it listens. Never hangs."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None and process.stdin is not None and not self._turn.locked():
            with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                process.stdin.write(encode_request(Stop()))
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        with contextlib.suppress(TimeoutError):  # should anybody else have reaped it
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _exchange(self, request: Message) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise BrokenPipeError("the trainer is not running")
        process.stdin.write(encode_request(request))
        await process.stdin.drain()
        header = await process.stdout.readexactly(HEADER.size)
        return decode(await process.stdout.readexactly(frame_length(header, FRAME_LIMIT)))

    async def _relay_log(self) -> None:
        """The child's log lines, and whatever a library prints in it, become lines of the node's log."""
        assert self._process is not None
        assert self._process.stderr is not None
        stderr = self._process.stderr
        while True:
            try:
                line = await stderr.readline()
            except ValueError:  # longer than a line may be; it has been dropped
                continue
            if not line:
                return
            _log_line(line)


def _log_line(line: bytes) -> None:
    try:
        fields = json.loads(line)
        event, level = fields.pop("event"), fields.pop("level", "info")
        fields.pop("timestamp", None)
        getattr(log, level)(event, **fields)
    except (ValueError, KeyError, AttributeError, TypeError):
        log.warning("trainer.said", line=line.decode(errors="replace").rstrip()[:500])
