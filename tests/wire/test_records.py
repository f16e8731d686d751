"""DHT record bodies: they come back, they stay small, and keys do not collide."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.wire import records as r
from spheroid_node.wire.codes import ErrorCode, Reason, Verdict, WireError
from spheroid_node.wire.frames import pack, unpack
from spheroid_node.wire.messages import (
    MAX_UPDATES_BESIDE,
    MAX_UPDATES_NAMED,
    PREFIX_BYTES,
    Manifest,
    UpdateOutcome,
)

counts = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(0, allow_nan=False, allow_infinity=False)
runs = st.text("0123456789abcdef", min_size=16, max_size=16)
held = st.builds(
    r.HeldVersion,
    group=st.text(min_size=1, max_size=32),
    version=counts,
    digest=st.binary(min_size=32, max_size=32),
)
nodes = st.builds(
    r.NodeRecord, run=runs, block=counts, state=st.sampled_from(["joining", "online", "leaving"]),
    host=st.text(min_size=1, max_size=255), port=st.integers(1, 65_535), device=st.text(max_size=64),
    started=finite, round=st.integers(-1, 2**63 - 1), held=st.lists(held, max_size=3), serves=counts,
    accepted=counts, late=counts, refused=counts, led=counts, tokens_per_second=positive,
    train_loss=st.none() | finite, from_noise_ce=st.none() | finite, bytes_in=counts, bytes_out=counts,
    sessions=counts, hop_seconds=positive, note=st.text(max_size=200),
)  # fmt: skip
adverts = st.builds(r.RunAdvert, run=runs, name=st.text(max_size=64))


@given(nodes | adverts)
def test_records_come_back(record: r.NodeRecord | r.RunAdvert) -> None:
    assert type(record).unpack(record.pack()) == record


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed(data: bytes) -> None:
    for kind in (r.NodeRecord, r.RunAdvert):
        with pytest.raises(WireError, match="malformed"):
            kind.unpack(data)


NODE = r.NodeRecord(
    run="0" * 16, block=1, state="online", host="h" * 255, port=1, device="d" * 64, started=1e9,
    round=2**63 - 1, held=[r.HeldVersion(group="g" * 32, version=2**63 - 1, digest=bytes(32))] * 16,
    serves=2**63 - 1, accepted=2**63 - 1, late=2**63 - 1, refused=2**63 - 1, led=2**63 - 1,
    tokens_per_second=1.0, train_loss=1.0, from_noise_ce=1.0, bytes_in=2**63 - 1, bytes_out=2**63 - 1,
    sessions=2**63 - 1, hop_seconds=1.0, note="é" * 200,
)  # fmt: skip


@given(st.integers(0), st.integers(0, 255))
def test_mutations_are_records_or_malformed(where: int, byte: int) -> None:
    mutated = bytearray(NODE.pack())
    mutated[where % len(mutated)] = byte
    try:
        record = r.NodeRecord.unpack(bytes(mutated))
    except WireError as error:
        assert error.code is ErrorCode.MALFORMED
    else:
        assert r.NodeRecord.unpack(record.pack()) == record


@pytest.mark.parametrize(
    "change",
    [
        {"state": "asleep"},
        {"port": 0},
        {"port": 65_536},
        {"host": ""},
        {"block": -1},
        {"round": -2},
        {"tokens_per_second": float("inf")},
        {"hop_seconds": -1.0},
        {"from_noise_ce": float("nan")},
        {"held": [{"group": "g", "version": 1, "digest": bytes(31)}]},
        {"held": [{"group": "g", "version": 1, "digest": bytes(32)}] * 17},
        {"run": "0" * 15},
        {"run": "G" * 16},
        {"note": "n" * 201},
        {"surplus": 1},
    ],
    ids=str,
)
def test_values_outside_their_limits_are_malformed(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="malformed"):
        r.NodeRecord.unpack(pack(unpack(NODE.pack()) | change))


def test_the_largest_records_fit() -> None:
    """With room for the validator's signature."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    outcome = UpdateOutcome(
        peer="p" * 64, digest=bytes(32), tokens=2**63 - 1, norm=1.0, verdict=Verdict.ACCEPTED,
        reason=max(Reason, key=len),
    )  # fmt: skip
    manifest = Manifest(
        run="0" * 16, group="g" * 32, round=2**63 - 1, version=2**63 - 1, parent=bytes(32), digest=bytes(32),
        elements=2**63 - 1, rank=2**63 - 1, steps=2**63 - 1, total=2**63 - 1,
        updates=[outcome] * MAX_UPDATES_NAMED,
    )  # fmt: skip
    accepted = outcome.model_copy(update={"reason": Reason.NONE})
    also = bytes(MAX_UPDATES_BESIDE * PREFIX_BYTES)
    crowded = manifest.model_copy(update={"updates": [accepted] * MAX_UPDATES_NAMED, "also": also})
    assert len(NODE.pack()) + 256 < r.MAX_RECORD_BYTES
    assert len(manifest.seal(key)) + 256 < r.MAX_RECORD_BYTES
    assert len(crowded.seal(key)) + 256 < r.MAX_RECORD_BYTES
    # Those of all rounds that have not expired are one dictionary, and one message of the DHT.
    for period in (1.0, 5.0, 60.0, 3600.0):
        assert r.manifest_ttl(period) / max(period, 5.0) * r.MAX_RECORD_BYTES < 2**21


def test_keys_are_different_and_stable() -> None:
    assert r.runs_key() == "spheroid/1/runs"
    assert r.run_key("ab") == "spheroid/1/ab/run"
    assert r.nodes_key("ab", 2) == "spheroid/1/ab/nodes/2"
    assert r.manifests_key("ab", "block-2") == "spheroid/1/ab/manifests/block-2"


def test_a_manifest_lives_for_as_many_rounds() -> None:
    assert [r.manifest_ttl(period) for period in (1.0, 60.0, 1e6)] == [300.0, 1920.0, 21_600.0]
