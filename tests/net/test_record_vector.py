"""The golden DHT record, as the validator that runs in every node sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.net._hivemind import DHTID, DHTRecord
from spheroid_node.net.keys import Keys
from spheroid_node.net.validator import RecordValidator
from spheroid_node.run import RunSpec
from spheroid_node.wire.frames import unpack

VECTORS = Path(__file__).parents[2] / "protocols" / "vectors"
VECTOR = json.loads((VECTORS / "record.json").read_text(encoding="utf-8"))
RUN = json.loads((VECTORS / "run.json").read_text(encoding="utf-8"))
KEYS = Keys()
KEYS.know(RunSpec.unpack(bytes.fromhex(RUN["bytes"])))
STORED = DHTRecord(
    key=bytes.fromhex(VECTOR["key_id"]),
    subkey=bytes.fromhex(VECTOR["subkey"]),
    value=bytes.fromhex(VECTOR["stored"]),
    expiration_time=VECTOR["expiration"],
)
VALIDATOR = RecordValidator(
    Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTOR["private_key"])),
    KEYS,
    clock=lambda: VECTOR["expiration"] - 10,
)


def test_the_key_is_hashed_as_hivemind_hashes_it() -> None:
    assert DHTID.generate(source=VECTOR["key"]).to_bytes() == STORED.key


def test_the_validator_accepts_it_and_no_other_expiration() -> None:
    assert VALIDATOR.validate(STORED)
    assert not VALIDATOR.validate(replace(STORED, expiration_time=STORED.expiration_time + 1))


def test_the_validator_signs_and_strips_it() -> None:
    stripped = VALIDATOR.strip_value(STORED)
    assert unpack(stripped) == bytes.fromhex(VECTOR["body"])
    assert VALIDATOR.sign_value(replace(STORED, value=stripped)) == STORED.value
