"""What may be asked of the API, and how wrong requests are answered."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from spheroid_node.run import RunSpec, describe
from spheroid_node.serving.decoders import DecoderName

MAX_BODY = 1024 * 1024
MAX_TOKENS = 8192


class ApiError(Exception):
    """An answer that is not what was asked for. Its body looks as clients of OpenAI's API expect."""

    def __init__(self, status: int, kind: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"type": kind, "message": message, **details}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status)


class CompletionRequest(BaseModel):
    """POST /v1/completions. A token is a byte. What is not offered is refused instead of ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    model: str | None = None
    """Run id or name; may be left out, since a gateway serves one run."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 128
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.8
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = False
    decode: DecoderName = "speculative"
    user: str | None = None

    # Options of OpenAI's API that may be given, but only as what we do anyway.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    top_p: Annotated[float, Field(ge=1, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    logit_bias: None = None
    stop: None = None
    stream_options: None = None
    suffix: None = None


async def read_completion(request: Request, run: RunSpec) -> CompletionRequest:
    """The request's body, checked. Raises :class:`ApiError`.

    Only ``application/json`` counts: a page of another site cannot send that without being asked first, so it
    cannot have a visitor's own gateway generate.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "invalid_request_error", "Content-Type must be application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ApiError(413, "invalid_request_error", f"The body is longer than {MAX_BODY} bytes")
    try:
        asked = CompletionRequest.model_validate(json.loads(body))
    except ValidationError as error:
        raise ApiError(400, "invalid_request_error", describe(error)) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_request_error", f"The body is not JSON: {error}") from error
    if asked.model not in (None, run.run_id, run.name):
        message = f"This gateway serves run {run.run_id} ({run.name}), not {asked.model!r}"
        raise ApiError(404, "model_not_found", message)
    return asked
