"""One completion, from the opening of its chain to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from spheroid_node.errors import NetworkError, PromptInvalid, SpheroidError
from spheroid_node.gateway.metrics import Metrics
from spheroid_node.gateway.requests import ApiError, CompletionRequest
from spheroid_node.gateway.swarm import Swarm
from spheroid_node.serving.chain import Chain
from spheroid_node.serving.finding import WithFirst, write_on
from spheroid_node.serving.prompts import prompt_bytes
from spheroid_node.serving.remote import Generation
from spheroid_node.serving.stats import Measure
from spheroid_node.serving.utf8 import Utf8Stream

log = structlog.get_logger()

CLOSE_SECONDS = 5.0


class Completion:
    """Made by :meth:`open`; :meth:`text` once; then :meth:`close`, whatever happened."""

    def __init__(
        self, swarm: Swarm, metrics: Metrics, asked: CompletionRequest, prompt: bytes, seed: int
    ) -> None:
        self._swarm, self._metrics, self._asked = swarm, metrics, asked
        self._prompt, self._seed = prompt, seed
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._outcome = "cancelled"
        self._measure = Measure()
        self._source = swarm.source(Generation(seed, asked.temperature))
        self._first: Chain | None = None

    @classmethod
    async def open(cls, swarm: Swarm, metrics: Metrics, asked: CompletionRequest) -> Completion:
        """A completion with an open chain. Raises :class:`ApiError`."""
        seed = secrets.randbelow(2**32) if asked.seed is None else asked.seed
        try:
            prompt = prompt_bytes(asked.prompt, swarm.run.model.window)
            completion = cls(swarm, metrics, asked, prompt, seed)
            completion._first = await completion._source.open()
        except PromptInvalid as error:
            raise ApiError(400, "invalid_request_error", str(error), param="prompt") from error
        except SpheroidError as error:
            status = 503 if isinstance(error, NetworkError) else 500
            raise ApiError(status, "swarm_unavailable", str(error)) from error
        metrics.generating.inc()
        return completion

    async def text(self) -> AsyncIterator[str]:
        """The text as it is decided. Raises :class:`ApiError` when the chain is lost on the way."""
        assert self._first is not None
        asked, stream, produced = self._asked, Utf8Stream(), 0
        source = WithFirst(self._source, self._first)
        try:
            async for decided in write_on(
                source, asked.decode, self._swarm.run, self._prompt, asked.max_tokens, self._measure.chain
            ):
                produced += len(decided)
                if text := stream.feed(decided):
                    yield text
        except NetworkError as error:
            self._outcome = "ended_early"
            message = f"Generation ended after {produced} bytes: {error.problem}"
            raise ApiError(502, "ended_early", message, produced=produced) from error
        if text := stream.finish():
            yield text
        self._outcome = "completed"

    async def close(self) -> None:
        """Free the chain and count the request. Not undone by a cancellation on the way."""
        assert self._first is not None
        self._metrics.generating.dec()
        self._metrics.finished(self._outcome, self._measure.stats)
        # Later chains are closed where they are used; closing twice does no harm.
        await asyncio.shield(asyncio.wait_for(self._first.close(), CLOSE_SECONDS))

    def body(self, text: str, finish: str | None) -> dict[str, Any]:
        """A response, or one event of a stream, in the form of OpenAI's API."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._swarm.run.run_id,
            "system_fingerprint": str(self._source.versions),
            "seed": self._seed,
            "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}],
        }

    def usage(self) -> dict[str, int]:
        prompt, completion = len(self._prompt), self._measure.stats.bytes
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
