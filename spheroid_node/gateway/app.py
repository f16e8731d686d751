"""The HTTP application: routes, limits, errors as JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from importlib import resources

import structlog
from prometheus_client import CONTENT_TYPE_LATEST
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spheroid_node.gateway.completion import Completion
from spheroid_node.gateway.metrics import Metrics
from spheroid_node.gateway.requests import ApiError, read_completion
from spheroid_node.gateway.swarm import Swarm

log = structlog.get_logger()

MAX_GENERATING = 16
"""Completions at once; a further one is asked to come back."""
SEND_SECONDS = 60
"""How long a reader of a stream may not read."""
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Gateway:
    """Handlers of one swarm's routes."""

    def __init__(self, swarm: Swarm, max_generating: int = MAX_GENERATING) -> None:
        self._swarm = swarm
        self._metrics = Metrics()
        self._max_generating = max_generating
        self._generating = 0
        self._page = resources.files(__package__).joinpath("index.html").read_text(encoding="utf-8")

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": CONTENT_POLICY})

    async def swarm(self, _request: Request) -> Response:
        return JSONResponse((await self._swarm.view()).as_json(), headers={"Cache-Control": "no-store"})

    async def metrics(self, _request: Request) -> Response:
        self._metrics.show(await self._swarm.view())
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _request: Request) -> Response:
        run = self._swarm.run
        model = {
            "id": run.run_id,
            "object": "model",
            "created": int(run.round.genesis),
            "owned_by": "swarm",
            "name": run.name,
            "context_window": run.model.window,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        try:
            asked = await read_completion(request, self._swarm.run)
            self._admit()
        except ApiError:
            self._metrics.finished("refused")
            raise
        try:
            completion = await Completion.open(self._swarm, self._metrics, asked)
        except BaseException as error:
            self._generating -= 1
            refused = isinstance(error, ApiError) and error.status == 400
            self._metrics.finished("refused" if refused else "unavailable")
            raise
        if asked.stream:
            return _Stream(self, completion)
        try:
            text = "".join([part async for part in completion.text()])
            return JSONResponse(completion.body(text, "length") | {"usage": completion.usage()})
        finally:
            await self.release(completion)

    async def release(self, completion: Completion) -> None:
        self._generating -= 1
        await completion.close()

    def _admit(self) -> None:
        if self._generating >= self._max_generating:
            raise ApiError(429, "busy", f"{self._max_generating} completions are being generated; try again")
        self._generating += 1


class _Stream(EventSourceResponse):
    """A completion as server-sent events, released also when its reader is gone before the first one."""

    def __init__(self, gateway: Gateway, completion: Completion) -> None:
        super().__init__(_events(completion), sep="\n", send_timeout=SEND_SECONDS)
        self._gateway, self._completion = gateway, completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._gateway.release(self._completion)


async def _events(completion: Completion) -> AsyncIterator[dict[str, str]]:
    try:
        async for text in completion.text():
            yield {"data": json.dumps(completion.body(text, None))}
    except ApiError as error:  # too late for a status, so that the error is the last event
        yield {"data": json.dumps(error.body)}
        return
    yield {"data": json.dumps(completion.body("", "length") | {"usage": completion.usage()})}
    yield {"data": "[DONE]"}


def create_app(
    swarm: Swarm, *, max_generating: int = MAX_GENERATING, allowed_hosts: Sequence[str] = ("*",)
) -> Starlette:
    """The application. ``allowed_hosts`` are the names it may be called by in a request's Host header.

    A gateway on loopback allows only loopback's names, or any web page could reach it by a name of its own.
    """
    gateway = Gateway(swarm, max_generating)
    return Starlette(
        routes=[
            Route("/", gateway.page),
            Route("/metrics", gateway.metrics),
            Route("/v1/swarm", gateway.swarm),
            Route("/v1/models", gateway.models),
            Route("/v1/completions", gateway.completions, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _failure},
    )


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, "invalid_request_error", str(error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


async def _failure(request: Request, error: Exception) -> Response:
    log.error("gateway.failed", path=request.url.path, exc_info=error)
    return ApiError(500, "internal", "The gateway failed; its log says why").response()
