"""The gateway's routes on a chain in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from spheroid_node.errors import BlockWithoutReplica, ChainFailed
from spheroid_node.gateway.app import create_app
from spheroid_node.gateway.swarm import View
from spheroid_node.node.snapshot import snapshot_of
from spheroid_node.serving.chain import ChainLost, Sweep
from spheroid_node.serving.decoders import DecoderName, decode
from spheroid_node.serving.local import LocalChain
from spheroid_node.serving.remote import Generation
from spheroid_node.wire.codes import ErrorCode
from tests.serving.memory import DEADLINE, node_record, small_model, until

MODEL = small_model(window=32)
RUN = MODEL.run


class Chain(LocalChain):
    """A local chain that counts its closing, may be lost, and may be held up."""

    def __init__(self, swarm: FakeSwarm, generation: Generation) -> None:
        super().__init__(MODEL, generation.seed, generation.temperature)
        self._swarm, self._closed = swarm, False

    async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
        await self._before(position)
        return await super().sweep(position, tokens, masked, decide)

    async def write(self, position: int, tokens: bytes, count: int, drafts: int = 0) -> AsyncIterator[Sweep]:
        await self._before(position)
        async for sweep in super().write(position, tokens, count, drafts):
            yield sweep
            await self._before(sweep.position + len(sweep.tokens))

    async def close(self) -> None:
        self._swarm.open -= not self._closed
        self._closed = True

    async def _before(self, position: int) -> None:
        if position >= self._swarm.lost_at:
            raise ChainLost(1, ErrorCode.NEXT_HOP_LOST)
        self._swarm.sweeps += 1
        await self._swarm.gate.wait()


class Source:
    versions = "interface 7, blocks 3 3 3"

    def __init__(self, swarm: FakeSwarm, generation: Generation) -> None:
        self._swarm, self._generation = swarm, generation

    async def open(self) -> Chain:
        if self._swarm.problem is not None:
            raise self._swarm.problem
        self._swarm.open += 1
        return Chain(self._swarm, self._generation)

    def lost(self, chain: Chain, error: ChainLost) -> None:
        raise ChainFailed(str(error))


class FakeSwarm:
    run = RUN

    def __init__(self) -> None:
        self.open, self.sweeps, self.lost_at = 0, 0, 10**9
        self.problem: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def source(self, generation: Generation) -> Source:
        return Source(self, generation)

    async def view(self) -> View:
        note = "<script>alert(1)</script>"
        records = {
            "peer-a": node_record(RUN, 0, tokens_per_second=100.0),
            "peer-b": node_record(RUN, 2, tokens_per_second=50.0, from_noise_ce=2.5, note=note),
        }
        return View(snapshot_of(RUN, 2_000_000_000.0, records, {}), {4: 2.75, 5: 2.5})


@pytest.fixture
def swarm() -> FakeSwarm:
    return FakeSwarm()


@pytest.fixture
async def client(swarm: FakeSwarm) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(swarm, max_generating=2, allowed_hosts=("127.0.0.1",))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
        yield client
    assert swarm.open == 0, "every chain must be closed"


async def expected(prompt: str, count: int, seed: int, temperature: float, decoder: DecoderName) -> str:
    chain = LocalChain(MODEL, seed, temperature)
    parts = [part async for part in decode(decoder, RUN, chain, prompt.encode(), count)]
    return b"".join(parts).decode(errors="replace")


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).rpartition(" ")[2])


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


ASKED = {"prompt": "The ä", "max_tokens": 40, "seed": 5, "temperature": 0.9}


@pytest.mark.parametrize("decoder", ["autoregressive", "one-sweep"])
async def test_completion(client: httpx.AsyncClient, decoder: DecoderName) -> None:
    answer = await client.post("/v1/completions", json=ASKED | {"decode": decoder, "model": RUN.run_id})
    body = answer.json()
    assert answer.status_code == 200, body
    text = await expected("The ä", 40, 5, 0.9, decoder)
    assert body["choices"] == [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 40, "total_tokens": 46}
    assert (body["seed"], body["model"], body["object"]) == (5, RUN.run_id, "text_completion")
    assert await metric(client, 'spheroid_gateway_requests_total{outcome="completed"}') == 1
    assert await metric(client, "spheroid_gateway_bytes_total") == 40
    assert await metric(client, "spheroid_gateway_generating") == 0


async def test_stream(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=ASKED | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last, done = events(answer.text)
    assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 40
    texts = [part["choices"][0]["text"] for part in parts]
    assert len(texts) > 10 and all(texts)
    assert "".join(texts) == await expected("The ä", 40, 5, 0.9, "autoregressive")


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_asked_for(client: httpx.AsyncClient, stream: bool) -> None:
    answer = await client.post("/v1/completions", json=ASKED | {"max_tokens": 0, "stream": stream})
    assert answer.status_code == 200
    body = events(answer.text)[-2] if stream else answer.json()
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 0


WRONG = {
    "no prompt": ({}, 400, "prompt: Field required"),
    "empty": ({"prompt": ""}, 400, "is empty"),
    "too long": ({"prompt": "x" * 33}, 400, "has 33 bytes; the window of this run has 32"),
    "not UTF-8": ({"prompt": "\ud800"}, 400, "is not UTF-8"),
    "too hot": ({"prompt": "x", "temperature": 101}, 400, "temperature"),
    "not a number": ({"prompt": "x", "temperature": float("nan")}, 400, "temperature"),
    "too much": ({"prompt": "x", "max_tokens": 10**9}, 400, "max_tokens"),
    "two answers": ({"prompt": "x", "n": 2}, 400, "n: Input should be 1"),
    "nucleus": ({"prompt": "x", "top_p": 0.5}, 400, "top_p"),
    "unknown": ({"prompt": "x", "color": 1}, 400, "color: Extra inputs are not permitted"),
    "not an object": ([1], 400, ""),
    "another model": ({"prompt": "x", "model": "gpt"}, 404, "not 'gpt'"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_requests(client: httpx.AsyncClient, swarm: FakeSwarm, name: str) -> None:
    asked, status, complaint = WRONG[name]
    answer = await client.post(
        "/v1/completions", content=json.dumps(asked), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status
    assert complaint in answer.json()["error"]["message"]
    assert swarm.sweeps == 0
    assert await metric(client, 'spheroid_gateway_requests_total{outcome="refused"}') == 1


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b" " * 1_100_000, "application/json", 413),
        (b'{"prompt": "x"}', "text/plain", 415),
    ],
)
async def test_bodies_that_are_no_request(
    client: httpx.AsyncClient, content: bytes, kind: str, status: int
) -> None:
    answer = await client.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert answer.status_code == status and answer.json()["error"]["message"]


async def test_null_stands_for_the_default(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=ASKED | {"stop": None, "n": None, "model": None})
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_swarm_that_cannot_answer(client: httpx.AsyncClient, swarm: FakeSwarm, stream: bool) -> None:
    swarm.problem = BlockWithoutReplica([1])
    for _ in range(3):  # more than may be generated at once
        answer = await client.post("/v1/completions", json=ASKED | {"stream": stream})
        assert answer.status_code == 503
        assert "No live replica of block 1" in answer.json()["error"]["message"]
    assert await metric(client, 'spheroid_gateway_requests_total{outcome="unavailable"}') == 3
    swarm.problem = None
    assert (await client.post("/v1/completions", json=ASKED)).status_code == 200


async def test_a_chain_that_is_lost(client: httpx.AsyncClient, swarm: FakeSwarm) -> None:
    swarm.lost_at = 10
    answer = await client.post("/v1/completions", json=ASKED)
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "ended_early" and answer.json()["error"]["produced"] == 5
    answer = await client.post("/v1/completions", json=ASKED | {"stream": True})
    assert answer.status_code == 200
    assert events(answer.text)[-1]["error"]["type"] == "ended_early"
    assert await metric(client, 'spheroid_gateway_requests_total{outcome="ended_early"}') == 2


async def test_an_error_of_the_gateway_is_json_too(client: httpx.AsyncClient, swarm: FakeSwarm) -> None:
    swarm.problem = RuntimeError("secret detail")
    answer = await client.post("/v1/completions", json=ASKED)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "internal"
    assert "secret" not in answer.text


async def test_limit_of_completions_at_once(client: httpx.AsyncClient, swarm: FakeSwarm) -> None:
    swarm.gate.clear()
    running = [asyncio.create_task(client.post("/v1/completions", json=ASKED)) for _ in range(2)]
    await until(lambda: swarm.sweeps == 2)
    refused = await client.post("/v1/completions", json=ASKED)
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "busy"
    swarm.gate.set()
    answers = await asyncio.gather(*running)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (await client.post("/v1/completions", json=ASKED)).status_code == 200


async def test_a_reader_who_leaves_frees_the_chain(swarm: FakeSwarm) -> None:
    app = create_app(swarm)
    gone = asyncio.Event()
    body = json.dumps(ASKED | {"stream": True}).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None: ...

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
    }  # fmt: skip
    swarm.gate.clear()  # so that the text cannot end by itself
    serving = asyncio.create_task(app(scope, receive, send))
    await until(lambda: swarm.sweeps == 1)
    gone.set()
    async with asyncio.timeout(DEADLINE):
        await serving
    assert swarm.open == 0


async def test_models(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["name"], model["object"]) == (RUN.run_id, RUN.name, "model")


async def test_swarm_and_its_gauges(client: httpx.AsyncClient) -> None:
    shown = (await client.get("/v1/swarm")).json()
    assert shown["run"] == RUN.run_id and shown["blocks_without_replica"] == [1]
    assert shown["ce_by_round"] == [[4, 2.75], [5, 2.5]]
    assert await metric(client, 'spheroid_swarm_replicas{block="1"}') == 0
    assert await metric(client, 'spheroid_swarm_replicas{block="2"}') == 1
    assert await metric(client, "spheroid_swarm_from_noise_ce") == 2.5
    assert await metric(client, "spheroid_swarm_tokens_per_second") == 150


async def test_page_is_one_file_that_loads_nothing_else(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "src=" not in answer.text and "innerHTML" not in answer.text
    assert "prefers-color-scheme: dark" in answer.text and 'fetch("/v1/swarm")' in answer.text


async def test_other_paths_methods_and_names(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v2")).json()["error"]["message"] == "Not Found"
    wrong = await client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"] and "POST" in wrong.headers["allow"]
    rebound = await client.get("/v1/swarm", headers={"Host": "evil.example"})
    assert rebound.status_code == 400
