"""Writes the golden vectors of protocols/vectors/: of every message, record, envelope, frame and compression.

    python protocols/make_vectors.py

Everything in them is fixed, keys included, so a second run writes the same bytes. JSON has no bytes: in
``fields`` they stand as {"hex": "…"}. Run it only when the protocol changes on purpose, and then raise the
protocol's version.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.run import RunSpec
from spheroid_node.wire import messages as m
from spheroid_node.wire import records as r
from spheroid_node.wire.codes import ErrorCode, Reason, Verdict
from spheroid_node.wire.frames import encode_frame, pack, unpack
from spheroid_node.wire.signing import peer_id_of_key, seal, sign_bytes
from spheroid_node.wire.tensors import (
    chunk_hash,
    chunk_hashes,
    decode_vector,
    encode_vector,
    pack_tensor,
    payload_digest,
    vector_digest,
)

FOLDER = Path(__file__).parent / "vectors"

WORKER_SEED, AGGREGATOR_SEED = bytes(range(32)), bytes(range(32, 64))
WORKER = Ed25519PrivateKey.from_private_bytes(WORKER_SEED)
AGGREGATOR = Ed25519PrivateKey.from_private_bytes(AGGREGATOR_SEED)
WORKER_PEER, AGGREGATOR_PEER = peer_id_of_key(WORKER), peer_id_of_key(AGGREGATOR)

RUN = RunSpec.model_validate(
    {"name": "vectors", "seed": 7, "model": {"blocks": 3, "layers": 1, "width": 4, "heads": 2, "window": 8}}
)
RUN_ID = RUN.run_id
SESSION = bytes(range(16))
UPDATE_BYTES = np.array([0.5, -0.25, 0.0, 1.0], dtype="<f2").tobytes()
PARENT = np.array([1, 2, 3, 4], dtype=np.float32)
VERSION = np.array([1.5, 1.75, 3, 5], dtype=np.float32)
LEARNT = np.array([0.5, -63.5, 0.0, 0.3, -1.4], dtype=np.float32)

HEADER = m.UpdateHeader(
    run=RUN_ID, group="block-1", round=12, base=3, base_digest=vector_digest(PARENT), nonce=bytes(16),
    steps=40, tokens=5120, norm=1.125, dtype="fp16", elements=4, digest=payload_digest(UPDATE_BYTES),
)  # fmt: skip
RECEIPT = m.Receipt(
    run=RUN_ID, group="block-1", round=12, update=payload_digest(UPDATE_BYTES), verdict=Verdict.LATE,
    reason=Reason.AFTER_DEADLINE,
)  # fmt: skip
OUTCOME = m.UpdateOutcome(
    peer=WORKER_PEER, digest=payload_digest(UPDATE_BYTES), tokens=5120, norm=1.125, verdict=Verdict.ACCEPTED
)
MANIFEST = m.Manifest(
    run=RUN_ID, group="block-1", round=12, version=4, parent=vector_digest(PARENT),
    digest=vector_digest(VERSION), elements=4, rank=0, steps=160, total=9, updates=[OUTCOME],
)  # fmt: skip
CROWDED = MANIFEST.model_copy(update={"also": bytes(range(16))})
STATE = m.State(
    session=SESSION, position=5, tokens=b"ca", masked=0, decide=1,
    hidden=pack_tensor(np.arange(8, dtype=np.float32).reshape(2, 4), "fp16"),
    noisy=pack_tensor(np.full((2, 4), -0.5, dtype=np.float32), "fp16"), log_probs=None, seconds=[0.25],
)  # fmt: skip
NODE = r.NodeRecord(
    run=RUN_ID, block=1, state="online", host="203.0.113.7", port=31338, device="cpu", started=1767225600.5,
    round=12, held=[r.HeldVersion(group="block-1", version=4, digest=vector_digest(VERSION))],
    serves=2, accepted=10, late=1, refused=0, led=5, tokens_per_second=20480.0, train_loss=1.75,
    from_noise_ce=None, bytes_in=4096, bytes_out=8192, sessions=0, hop_seconds=0.002,
    neighbours=[r.Neighbour(peer=AGGREGATOR_PEER, seconds=0.0125)],
)  # fmt: skip

MESSAGES: dict[str, list[m.Message]] = {
    "link": [
        m.Hello(oldest=1, newest=1, run=RUN_ID, peer=AGGREGATOR_PEER, nonce=bytes(range(32))),
        m.Greeting(
            version=1, run=RUN_ID, service="round", peer=WORKER_PEER,
            signature=sign_bytes(WORKER, "greeting", AGGREGATOR_PEER.encode() + bytes(range(32))),
        ),
        m.Welcome(),
        m.Error(code=ErrorCode.BUSY, detail="32 connections of this peer"),
        m.Error(code=ErrorCode.VERSION_GONE, session=SESSION),
    ],
    "round": [
        m.Update(header=HEADER.seal(WORKER), hashes=chunk_hashes(UPDATE_BYTES)),
        m.Proceed(),
        m.Proceed(first=7),
        m.Chunk(index=0, data=UPDATE_BYTES),
        m.ReceiptMessage(receipt=RECEIPT.seal(AGGREGATOR)),
        m.Ping(),
        m.Pong(),
        m.ManifestMessage(manifest=MANIFEST.seal(AGGREGATOR)),
    ],
    "transfer": [
        m.Want(group="block-1", version=-1),
        m.Listing(
            group="block-1", version=4, size=16, hashes=chunk_hash(VERSION.tobytes()),
            manifest=MANIFEST.seal(AGGREGATOR),
        ),
        m.Listing(group="interface", version=0, size=16, hashes=chunk_hash(PARENT.tobytes()), manifest=b""),
        m.Read(group="block-1", version=4, index=0),
        m.Chunk(index=0, data=VERSION.tobytes()),
    ],
    "hop": [
        m.Open(
            session=SESSION, block=1, block_version=4, interface_version=3,
            next=m.HopAddress(peer=AGGREGATOR_PEER, host="203.0.113.8", port=31338), seed=7, temperature=0.7,
        ),
        m.Open(
            session=SESSION, block=2, block_version=4, interface_version=3, next=None, seed=7,
            temperature=0.0, logits=True,
        ),
        m.Open(
            session=SESSION, block=0, block_version=4, interface_version=3,
            next=m.HopAddress(peer=WORKER_PEER, host="203.0.113.7", port=31338),
            last=m.HopAddress(peer=AGGREGATOR_PEER, host="203.0.113.8", port=31338), seed=7, temperature=0.7,
        ),
        m.Opened(session=SESSION, via="libp2p"),
        m.Attach(session=SESSION),
        m.Attach(session=SESSION, role="results"),
        m.Attached(session=SESSION),
        m.Step(session=SESSION, position=5, tokens=b"ca"),
        m.Step(session=SESSION, position=0, tokens=b"The ca", masked=3, decide=4),
        m.Write(session=SESSION, position=0, tokens=b"The ca", count=128, drafts=8),
        m.Write(session=SESSION, position=0, tokens=b"The ca", count=128, branches=2),
        STATE,
        STATE.model_copy(update={"decide": 2, "line": 3}),
        STATE.model_copy(update={"decide": 2, "line": 3, "branch": 2, "after": 1}),
        m.Result(session=SESSION, position=7, tokens=b"s", logits=None, seconds=[0.25, 0.5, 0.125]),
        m.Result(session=SESSION, position=6, tokens=b"st", line=3, logits=None, seconds=[0.25, 0.5, 0.125]),
        m.Close(session=SESSION),
    ],
    "dht": [r.RunAdvert(run=RUN_ID, name="vectors"), NODE],
}  # fmt: skip

SIGNED = [(HEADER, WORKER, WORKER_SEED), (RECEIPT, AGGREGATOR, AGGREGATOR_SEED),
          (MANIFEST, AGGREGATOR, AGGREGATOR_SEED), (CROWDED, AGGREGATOR, AGGREGATOR_SEED)]  # fmt: skip


def plain(value: Any) -> Any:
    """``value`` as JSON can say it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def message_vectors(protocol: str) -> list[dict[str, Any]]:
    """Every message of one protocol: its class, its fields, its msgpack."""
    return [
        {
            "class": type(message).__name__,
            "fields": plain(unpack(message.pack())),
            "bytes": message.pack().hex(),
        }
        for message in MESSAGES[protocol]
    ]


def signed_vectors() -> list[dict[str, Any]]:
    """Every signed message: its body, its author's key, the envelope."""
    return [
        {
            "class": type(message).__name__,
            "purpose": message.purpose,
            "private_key": seed.hex(),
            "peer": peer_id_of_key(key),
            "fields": plain(unpack(message.pack())),
            "body": message.pack().hex(),
            "envelope": message.seal(key).hex(),
        }
        for message, key, seed in SIGNED
    ]


def payload_vector(dtype: str) -> dict[str, Any]:
    """An update in one compression: what was learnt, its payload, and what a reader makes of that."""
    payload = encode_vector(LEARNT, dtype)
    return {
        "dtype": dtype,
        "learnt": LEARNT.tolist(),
        "bytes": payload.hex(),
        "digest": payload_digest(payload).hex(),
        "read": decode_vector(payload, dtype).tolist(),
    }


def record_vector() -> dict[str, Any]:
    """A node record as the DHT stores it (protocols/dht.md)."""
    key, expiration = r.nodes_key(RUN_ID, 1), 1767225690.5
    key_id, subkey, value = hashlib.sha1(pack(key)).digest(), pack(WORKER_PEER), pack(NODE.pack())
    signed = pack([key_id, subkey, value, expiration])
    return {
        "private_key": WORKER_SEED.hex(),
        "key": key,
        "key_id": key_id.hex(),
        "subkey": subkey.hex(),
        "body": NODE.pack().hex(),
        "expiration": expiration,
        "signed": signed.hex(),
        "stored": (value + sign_bytes(WORKER, "record", signed)).hex(),
    }


def all_vectors() -> dict[str, Any]:
    """File name → contents, of every file in protocols/vectors."""
    step = m.Step(session=SESSION, position=5, tokens=b"ca")
    return {
        **{f"{protocol}.json": message_vectors(protocol) for protocol in MESSAGES},
        "signed.json": signed_vectors(),
        "payload.json": [payload_vector(dtype) for dtype in ("float32", "fp16", "int8")],
        "record.json": record_vector(),
        "envelope.json": {
            "private_key": WORKER_SEED.hex(),
            "peer": WORKER_PEER,
            "purpose": "example",
            "body": b"any bytes".hex(),
            "envelope": seal(WORKER, "example", b"any bytes").hex(),
        },
        "frame.json": {
            "class": "Step",
            "fields": plain(step.fields()),
            "frame": encode_frame(step.fields()).hex(),
        },
        "run.json": {"id": RUN_ID, "fields": RUN.model_dump(mode="json"), "bytes": RUN.pack().hex()},
    }


def render(contents: Any) -> str:
    return json.dumps(contents, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, contents in all_vectors().items():
        (FOLDER / name).write_text(render(contents), encoding="utf-8")


if __name__ == "__main__":
    main()
