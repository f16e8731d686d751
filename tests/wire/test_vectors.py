"""The golden vectors of protocols/vectors, decoded and encoded again byte for byte."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.run import RunSpec
from spheroid_node.wire import messages, records
from spheroid_node.wire.frames import FrameDecoder, encode_frame, pack, unpack
from spheroid_node.wire.signing import public_key_of, seal, sign_bytes, unseal, verify_bytes

PROTOCOLS = Path(__file__).parents[2] / "protocols"
FILES = {
    path.name: json.loads(path.read_text(encoding="utf-8")) for path in (PROTOCOLS / "vectors").iterdir()
}

MESSAGES = [entry for name in ("link", "round", "transfer", "hop") for entry in FILES[f"{name}.json"]]
RECORDS = FILES["dht.json"]
SIGNED = FILES["signed.json"]


def with_bytes(value: Any) -> Any:
    """JSON's {"hex": …} as bytes."""
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["hex"])
            if value.keys() == {"hex"}
            else {k: with_bytes(v) for k, v in value.items()}
        )
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


def name(entry: dict[str, Any]) -> str:
    return str(entry["class"])


@pytest.mark.parametrize("entry", MESSAGES, ids=name)
def test_messages(entry: dict[str, Any]) -> None:
    packed = bytes.fromhex(entry["bytes"])
    message = messages.decode(packed)
    assert type(message).__name__ == entry["class"]
    assert unpack(packed) == with_bytes(entry["fields"])
    assert message == type(message).parse(with_bytes(entry["fields"]))
    assert message.pack() == packed


@pytest.mark.parametrize("entry", RECORDS, ids=name)
def test_records(entry: dict[str, Any]) -> None:
    packed = bytes.fromhex(entry["bytes"])
    record = getattr(records, entry["class"]).unpack(packed)
    assert record == type(record).parse(with_bytes(entry["fields"]))
    assert record.pack() == packed


@pytest.mark.parametrize("entry", SIGNED, ids=name)
def test_signed(entry: dict[str, Any]) -> None:
    envelope, body = bytes.fromhex(entry["envelope"]), bytes.fromhex(entry["body"])
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(entry["private_key"]))
    kind = getattr(messages, entry["class"])
    author, message = kind.unseal(envelope)
    assert author == entry["peer"]
    assert public_key_of(author) == key.public_key().public_bytes_raw()
    assert message == kind.parse(with_bytes(entry["fields"]))
    assert message.pack() == body
    assert kind.purpose == entry["purpose"]
    assert message.seal(key) == seal(key, entry["purpose"], body) == envelope


def test_envelope() -> None:
    entry = FILES["envelope.json"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(entry["private_key"]))
    body, envelope = bytes.fromhex(entry["body"]), bytes.fromhex(entry["envelope"])
    assert seal(key, entry["purpose"], body) == envelope
    assert unseal(envelope, entry["purpose"]) == (entry["peer"], body)


def test_record_as_it_is_stored() -> None:
    entry = FILES["record.json"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(entry["private_key"]))
    stored, subkey = bytes.fromhex(entry["stored"]), bytes.fromhex(entry["subkey"])
    value, signature = stored[:-64], stored[-64:]
    node = records.NodeRecord.unpack(unpack(value))
    assert node.pack() == bytes.fromhex(entry["body"])
    assert entry["key"] == records.nodes_key(node.run, node.block)
    assert entry["key_id"] == hashlib.sha1(pack(entry["key"])).hexdigest()
    signed = pack([bytes.fromhex(entry["key_id"]), subkey, value, entry["expiration"]])
    assert signed == bytes.fromhex(entry["signed"])
    assert verify_bytes(unpack(subkey), "record", signed, signature)
    assert value + sign_bytes(key, "record", signed) == stored


def test_frame() -> None:
    entry = FILES["frame.json"]
    frame = bytes.fromhex(entry["frame"])
    (body,) = FrameDecoder().feed(frame)
    message = messages.decode(body)
    assert type(message).__name__ == entry["class"]
    assert message.fields() == with_bytes(entry["fields"])
    assert encode_frame(message.fields()) == frame


def test_run() -> None:
    entry = FILES["run.json"]
    packed = bytes.fromhex(entry["bytes"])
    run = RunSpec.unpack(packed)
    assert run == RunSpec.model_validate(entry["fields"])
    assert run.pack() == packed
    assert run.run_id == entry["id"]


def test_nothing_is_left_out() -> None:
    assert {entry["class"] for entry in MESSAGES} == {kind.__name__ for kind in messages.MESSAGES.values()}
    assert {entry["class"] for entry in SIGNED} == {
        kind.__name__ for kind in messages.Signed.__subclasses__()
    }
    # what a record is made of (HeldVersion) stands inside it
    assert {entry["class"] for entry in RECORDS} == {"RunAdvert", "NodeRecord"}


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_vectors", PROTOCOLS / "make_vectors.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_these_files() -> None:
    assert _script().all_vectors() == FILES
