"""Messages: every type comes back, and whatever else arrives is a WireError and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from spheroid_node.wire import messages as m
from spheroid_node.wire.codes import ERRORS, MAX_DETAIL, REASONS, ErrorCode, Reason, Verdict, WireError
from spheroid_node.wire.frames import MAX_FRAME, pack, unpack
from spheroid_node.wire.tensors import CHUNK_BYTES

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
VECTORS = Path(__file__).parents[2] / "protocols" / "vectors"
PACKED = [
    bytes.fromhex(entry["bytes"])
    for protocol in ("link", "round", "transfer", "hop")
    for entry in json.loads((VECTORS / f"{protocol}.json").read_text(encoding="utf-8"))
]

counts = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
norms = st.floats(0, allow_nan=False, allow_infinity=False)
peers = st.text(max_size=64)
runs = st.text("0123456789abcdef", min_size=16, max_size=16)
groups = st.text(min_size=1, max_size=32)
digests = st.binary(min_size=32, max_size=32)
sessions = st.binary(min_size=16, max_size=16)
sealed = st.binary(max_size=100)
positions = st.integers(0, 2**31 - 1)
lines = st.integers(-1, 2**31 - 1)
tokens = st.binary(min_size=1, max_size=50)
numbers = st.integers(1, 65_536)
tensors = st.fixed_dictionaries({"dtype": st.text(), "shape": st.lists(counts), "data": st.binary()})
seconds = st.lists(finite, max_size=4)
addresses = st.builds(
    m.HopAddress, peer=peers, host=st.text(min_size=1, max_size=50), port=st.integers(1, 65_535)
)
outcomes = st.builds(
    m.UpdateOutcome, peer=peers, digest=digests, tokens=counts, norm=norms,
    verdict=st.sampled_from(Verdict), reason=st.sampled_from(Reason),
)  # fmt: skip
steps: dict[str, Any] = {
    "session": sessions, "position": positions, "tokens": tokens, "masked": st.integers(0, 65_536),
    "decide": numbers,
}  # fmt: skip

EVERY_TYPE: dict[type[m.Message], st.SearchStrategy[Any]] = {
    m.Hello: st.builds(
        m.Hello, oldest=counts, newest=counts, run=runs, peer=peers, nonce=st.binary(min_size=32, max_size=32)
    ),
    m.Greeting: st.builds(
        m.Greeting, version=counts, run=runs, service=st.sampled_from(["round", "transfer", "hop"]),
        peer=peers, signature=st.binary(max_size=64),
    ),
    m.Welcome: st.builds(m.Welcome),
    m.Error: st.builds(
        m.Error, code=st.sampled_from(ErrorCode), detail=st.text(max_size=MAX_DETAIL),
        session=st.none() | sessions,
    ),
    m.Update: st.builds(m.Update, header=sealed, hashes=st.binary(max_size=100)),
    m.Proceed: st.builds(m.Proceed, first=counts),
    m.ReceiptMessage: st.builds(m.ReceiptMessage, receipt=sealed),
    m.Ping: st.builds(m.Ping),
    m.Pong: st.builds(m.Pong),
    m.ManifestMessage: st.builds(m.ManifestMessage, manifest=sealed),
    m.Want: st.builds(m.Want, group=groups, version=st.integers(-1, 2**63 - 1)),
    m.Listing: st.builds(
        m.Listing, group=groups, version=counts, size=counts, hashes=st.binary(max_size=100), manifest=sealed
    ),
    m.Read: st.builds(m.Read, group=groups, version=counts, index=counts),
    m.Chunk: st.builds(m.Chunk, index=counts, data=st.binary(max_size=100)),
    m.Open: st.builds(
        m.Open, session=sessions, block=counts, block_version=counts, interface_version=counts,
        next=st.none() | addresses, last=st.none() | addresses, seed=counts,
        temperature=st.floats(0, 100), logits=st.booleans(),
    ),
    m.Opened: st.builds(m.Opened, session=sessions, via=st.sampled_from([None, "tcp", "libp2p"])),
    m.Attach: st.builds(m.Attach, session=sessions, role=st.sampled_from(["states", "results"])),
    m.Attached: st.builds(m.Attached, session=sessions),
    m.Step: st.builds(m.Step, **steps),
    m.Write: st.builds(
        m.Write, session=sessions, position=positions, tokens=tokens, count=st.integers(1, m.MAX_POSITIONS),
        drafts=st.integers(0, m.MAX_DRAFTS),
    ),
    m.State: st.builds(
        m.State, **steps, line=lines, hidden=tensors, noisy=tensors, log_probs=st.none() | tensors,
        seconds=seconds,
    ),
    m.Result: st.builds(
        m.Result, session=sessions, position=positions, tokens=tokens, line=lines,
        logits=st.none() | tensors, seconds=seconds,
    ),
    m.Close: st.builds(m.Close, session=sessions),
}  # fmt: skip

SIGNED: dict[type[m.Signed], st.SearchStrategy[Any]] = {
    m.UpdateHeader: st.builds(
        m.UpdateHeader, run=runs, group=groups, round=counts, base=counts, base_digest=digests,
        nonce=sessions, steps=counts, tokens=counts, norm=norms,
        dtype=st.sampled_from(["fp16", "int8", "float32"]), elements=counts, digest=digests,
    ),
    m.Receipt: st.builds(
        m.Receipt, run=runs, group=groups, round=counts, update=digests, verdict=st.sampled_from(Verdict),
        reason=st.sampled_from(Reason),
    ),
    m.Manifest: st.builds(
        m.Manifest, run=runs, group=groups, round=counts, version=st.integers(1, 2**63 - 1), parent=digests,
        digest=digests, elements=counts, rank=counts, steps=counts, updates=st.lists(outcomes, max_size=3),
    ),
}  # fmt: skip


def test_every_type_is_tried() -> None:
    assert set(EVERY_TYPE) == set(m.MESSAGES.values())
    assert set(SIGNED) == set(m.Signed.__subclasses__())


@pytest.mark.parametrize("kind", EVERY_TYPE, ids=lambda kind: kind.__name__)
@given(st.data())
def test_messages_come_back(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(EVERY_TYPE[kind])
    again = m.decode(message.pack())
    assert type(again) is kind
    assert again == message
    assert again.pack() == message.pack()


@pytest.mark.parametrize("kind", SIGNED, ids=lambda kind: kind.__name__)
@given(st.data())
def test_signed_messages_come_back_to_their_own_purpose_alone(
    kind: type[m.Signed], data: st.DataObject
) -> None:
    message = data.draw(SIGNED[kind])
    envelope = message.seal(KEY)
    _, again = kind.unseal(envelope)
    assert again == message
    for other in set(SIGNED) - {kind}:
        with pytest.raises(WireError) as caught:
            other.unseal(envelope)
        assert caught.value.code is ErrorCode.NOT_AUTHENTIC


def test_purposes_differ() -> None:
    assert len({kind.purpose for kind in SIGNED}) == len(SIGNED)


def decodes_or_is_malformed(data: bytes) -> None:
    try:
        m.decode(data)
    except WireError as error:
        assert error.code is ErrorCode.MALFORMED
        m.Error(code=error.code, detail=error.detail)  # it can be told to the peer


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    decodes_or_is_malformed(data)


@given(
    st.dictionaries(
        st.text(max_size=10) | st.just("session"),
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | finite | st.lists(st.none()),
    ),
    st.sampled_from([*m.MESSAGES, "nothing"]),
)
def test_random_fields(fields: dict[str, Any], name: str) -> None:
    decodes_or_is_malformed(pack({"type": name} | fields))


@given(st.sampled_from(PACKED), st.data())
def test_truncations(packed: bytes, data: st.DataObject) -> None:
    with pytest.raises(WireError) as caught:
        m.decode(packed[: data.draw(st.integers(0, len(packed) - 1))])
    assert caught.value.code is ErrorCode.MALFORMED


@given(
    st.sampled_from(PACKED),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_mutations(packed: bytes, changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(packed)
    for where, byte in changes:
        mutated[where % len(mutated)] = byte
    decodes_or_is_malformed(bytes(mutated))


NUMBERS, TEXTS, BYTES = [-2, 2**63, 2**64 - 1], ["x" * 600], [b"x" * 3_000_000]
NEVER: list[Any] = [[[]], [{}]]
WRONG: dict[type, list[Any]] = {
    int: [*NUMBERS, True, 1.0, 1.5, "1", b"1", None, *NEVER],
    float: [float("nan"), float("inf"), True, "1", b"1", None, *NEVER],
    str: [*TEXTS, 1, 1.0, True, b"x", None, *NEVER],
    bytes: [*BYTES, 1, "x", None, *NEVER],
    bool: [0, 1, "true", b"", None, *NEVER],
    list: [1, "x", b"x", {}, [float("nan")], ["1"], [True], [0.0] * 1025],
    dict: [1, "x", b"x", [], [{}]],
}
"""By the type of a field's value, what is not allowed in its place: other types, and beyond every limit."""


@pytest.mark.parametrize("packed", PACKED, ids=lambda packed: unpack(packed)["type"])
def test_every_field_has_a_type_and_limits(packed: bytes) -> None:
    fields = unpack(packed)
    kind = m.MESSAGES[fields["type"]]
    for field, good in fields.items():
        for value in WRONG.get(type(good), []):
            if value is None and type(None) in get_args(kind.model_fields[field].annotation):
                continue
            with pytest.raises(WireError) as caught:
                m.decode(pack(fields | {field: value}))
            assert caught.value.code is ErrorCode.MALFORMED, (field, value)


@pytest.mark.parametrize("packed", PACKED, ids=lambda packed: unpack(packed)["type"])
def test_unknown_and_missing_fields_are_malformed(packed: bytes) -> None:
    fields = unpack(packed)
    kind = m.MESSAGES[fields["type"]]
    with pytest.raises(WireError, match="malformed"):
        m.decode(pack(fields | {"surplus": 1}))
    for field in fields:
        rest = {key: value for key, value in fields.items() if key != field}
        if field == "type" or kind.model_fields[field].is_required():
            with pytest.raises(WireError, match="malformed"):
                m.decode(pack(rest))
        else:
            m.decode(pack(rest))


@pytest.mark.parametrize("body", [[], 1, {"type": 1}, {"type": ["step"]}, {"type": "nothing"}, {}])
def test_what_has_no_known_type_is_malformed(body: Any) -> None:
    with pytest.raises(WireError) as caught:
        m.decode(pack(body))
    assert caught.value.code is ErrorCode.MALFORMED


def test_deep_nesting_is_an_error_like_any_other() -> None:
    for depth in (10, 200, 900, 5000):
        decodes_or_is_malformed(b"\x81\xa4type" + b"\x91" * depth + b"\xc0")


def test_an_error_that_quotes_its_cause_can_still_be_sent() -> None:
    with pytest.raises(WireError) as caught:
        m.decode(pack({"type": "welcome", "k" * 10_000: 1}))
    assert len(caught.value.detail) <= MAX_DETAIL
    assert m.decode(m.Error(code=caught.value.code, detail=caught.value.detail).pack())


def test_the_largest_chunk_and_listing_fit_into_a_frame() -> None:
    chunk = m.Chunk(index=2**63 - 1, data=bytes(CHUNK_BYTES))
    listing = m.Listing(
        group="g" * 32,
        version=2**63 - 1,
        size=2**63 - 1,
        hashes=bytes(m.MAX_POSITIONS * 32),
        manifest=bytes(65_536),
    )
    for message in (chunk, listing):
        assert len(message.pack()) <= MAX_FRAME
        assert m.decode(message.pack()) == message
    with pytest.raises(WireError):
        m.decode(pack({"type": "chunk", "index": 0, "data": bytes(CHUNK_BYTES + 1)}))


def test_accepted_counts_the_accepted() -> None:
    verdicts = [Verdict.ACCEPTED, Verdict.LATE, Verdict.ACCEPTED, Verdict.REFUSED]
    updates = [m.UpdateOutcome(peer="p", digest=bytes(32), tokens=1, norm=0, verdict=v) for v in verdicts]
    manifest = m.Manifest(
        run="0" * 16, group="g", round=1, version=1, parent=bytes(32), digest=bytes(32), elements=1, rank=0,
        steps=1, total=2, updates=updates,
    )  # fmt: skip
    assert manifest.accepted == 2


def test_every_code_is_explained() -> None:
    assert set(REASONS) == set(Reason)
    assert set(ERRORS) == set(ErrorCode)
    assert str(WireError(ErrorCode.BUSY)) == f"busy: {ERRORS[ErrorCode.BUSY]}"
