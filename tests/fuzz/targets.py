"""All that reads what another machine sent, or what a disk may have spoilt: a function of bytes each.

A target makes something almost valid of the bytes, has the product read it, and raises AssertionError for
what must not happen. Anything else that it raises is a fault too: what may be raised is caught.
"""

from __future__ import annotations

import asyncio
import copy
import json
import struct
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spheroid_node.errors import (
    CheckpointInvalid,
    RunFileInvalid,
    RunMismatch,
    RunNotFound,
    SeveralRuns,
    SpheroidError,
)
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import elements
from spheroid_node.net import directory
from spheroid_node.net._hivemind import (
    DHTID,
    DHTLocalStorage,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    PeerID,
)  # fmt: skip
from spheroid_node.net.dialling import LinkFailed
from spheroid_node.net.directory import Directory, find_run
from spheroid_node.net.keys import Keys
from spheroid_node.net.store import RecordStore
from spheroid_node.net.validator import RecordValidator, harden
from spheroid_node.node.history import History, Signed
from spheroid_node.node.outbox import INDEX_FILE, Outbox
from spheroid_node.node.sync import Synchroniser
from spheroid_node.node.versions import Held, VersionStore
from spheroid_node.rounds.aggregation import payload_facts
from spheroid_node.rounds.aggregator import Aggregator, Desk
from spheroid_node.rounds.collection import ACCEPTED, Base
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.run import ModelSpec, RoundSpec, RunSpec
from spheroid_node.serving.states import piece_of, state_of
from spheroid_node.serving.steps import Piece, check, split
from spheroid_node.training import trainer_protocol
from spheroid_node.training.checkpoint import read_tensors, read_version, write_tensors, write_version
from spheroid_node.wire.codes import Verdict, WireError
from spheroid_node.wire.frames import HEADER, FrameDecoder, pack, unpack
from spheroid_node.wire.messages import (
    Manifest,
    Receipt,
    State,
    Step,
    UpdateHeader,
    UpdateOutcome,
    Write,
    decode,
)  # fmt: skip
from spheroid_node.wire.records import (
    HeldVersion,
    NodeRecord,
    RunAdvert,
    manifests_key,
    nodes_key,
    run_key,
    runs_key,
)  # fmt: skip
from spheroid_node.wire.signing import peer_id_of_key, unseal
from spheroid_node.wire.tensors import (
    chunk_hashes,
    chunks,
    decode_vector,
    encode_vector,
    payload_digest,
    unpack_tensor,
    vector_digest,
)  # fmt: skip

from .source import Source

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
NOW = 1075.0
"""In round 7 of the run, before its deadline."""
ALICE, MALLORY = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
PEERS = [peer_id_of_key(key) for key in (ALICE, MALLORY)]
RUN = RunSpec(
    name="fuzz",
    model=ModelSpec(blocks=2, layers=1, width=4, heads=2, window=8),
    round=RoundSpec(genesis=1000.0, period=10.0, settle=2.0),
)
GROUP = "block-0"
ELEMENTS = elements(RUN, GROUP)
VECTOR = initial_vector(RUN, GROUP)


def finished(work: Coroutine[Any, Any, T]) -> T:
    """The result of what waits for nothing but this process."""
    return _loop().run_until_complete(asyncio.wait_for(work, 10))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


# --- frames and messages ---------------------------------------------------------------------------


def frames(source: Source) -> None:
    """A stream of frames, in pieces."""
    stream = source.mutated(b"".join(HEADER.pack(len(body)) + body for body in map(pack, golden()[:3])))
    decoder, piece = FrameDecoder(), 1 + source.below(300)
    for start in range(0, len(stream), piece):
        try:
            bodies = decoder.feed(stream[start : start + piece])
        except WireError:
            return
        for body in bodies:
            _read(body)


def messages(source: Source) -> None:
    """A message with other values in it, and one of arbitrary bytes."""
    fields = copy.deepcopy(source.pick(golden()))
    _read(pack(source.altered(fields)))
    _read(source.mutated(pack(fields)))


def _read(body: bytes) -> None:
    """A message is parsed or refused; what is parsed packs to what parses to the same."""
    with suppress(WireError):
        message = decode(body)
        assert decode(message.pack()) == message
        if isinstance(message, State):
            check(piece_of(message), 8, 65_536)
            for run in STATES:
                for block in range(2):
                    with suppress(WireError):
                        state_of(run, block, message)
        elif isinstance(message, Step | Write):
            masked = message.masked if isinstance(message, Step) else 0
            with suppress(ValueError):
                sizes = [part.count for part in split(Piece(message.position, message.tokens, masked), 8)]
                assert sum(sizes) == len(message.tokens) + masked


STATES = [
    RUN.model_copy(
        update={"states": states, "learning": RUN.learning.model_copy(update={"readout": readout})}
    )
    for readout, states in (("last", "fp16"), ("mean", "int8"))
]


@cache
def golden() -> list[dict[str, Any]]:
    """The messages of the golden vectors."""
    found = []
    for file in sorted((ROOT / "protocols/vectors").glob("*.json")):
        for text in _hex_strings(json.loads(file.read_text())):
            with suppress(WireError):
                fields = unpack(bytes.fromhex(text)[HEADER.size :])
                if isinstance(fields, dict) and "type" in fields:
                    found.append(fields)
    return found


def _hex_strings(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _hex_strings(item)
    elif isinstance(value, str) and len(value) > 8 and not len(value) % 2 and HEX.issuperset(value):
        yield value


HEX = frozenset("0123456789abcdef")


def tensors(source: Source) -> None:
    """Tensors and vectors whose bytes, shape and dtype may not agree."""
    dtype = source.pick(("fp16", "int8", "float32"))
    shape = source.pick(((None, 1), (None, 4), (1, None)))
    fields = {"dtype": dtype, "shape": [source.below(9), source.below(9)], "data": source.bytes(200)}
    with suppress(WireError):
        unpack_tensor(source.altered(fields), shape)
    data = source.mutated(encode_vector(VECTOR[:50], dtype))
    with suppress(WireError):
        decode_vector(data, dtype)
    with suppress(WireError):
        payload_facts(chunks(data), dtype)


# --- envelopes and manifests -----------------------------------------------------------------------


def manifest(version: int = 1, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "run": RUN.run_id, "group": GROUP, "round": 7, "version": version, "parent": vector_digest(VECTOR),
        "digest": bytes(32), "elements": ELEMENTS, "rank": 0, "steps": 1,
        "total": len(PEERS) * version,
        "updates": [
            UpdateOutcome(peer=peer, digest=bytes(32), tokens=1, norm=1.0, verdict=Verdict.ACCEPTED)
            for peer in PEERS
        ],
    }  # fmt: skip
    return Manifest(**fields | changes)


def header(payload: bytes, **changes: Any) -> UpdateHeader:
    fields: dict[str, Any] = {
        "run": RUN.run_id, "group": GROUP, "round": 7, "base": 0, "base_digest": vector_digest(VECTOR),
        "nonce": bytes(16), "steps": 5, "tokens": 80, "norm": 1.0, "dtype": "fp16", "elements": ELEMENTS,
        "digest": payload_digest(payload),
    }  # fmt: skip
    return UpdateHeader(**fields | changes)


@cache
def _signed() -> list[Any]:
    receipt = Receipt(run=RUN.run_id, group=GROUP, round=7, update=bytes(32), verdict=Verdict.ACCEPTED)
    return [manifest(), header(b""), receipt]


@cache
def _envelopes() -> list[bytes]:
    return [message.seal(ALICE) for message in _signed()]


def envelopes(source: Source) -> None:
    """Of what has been changed after it was signed, nothing is believed."""
    which = source.below(len(_signed()))
    message, envelope = _signed()[which], _envelopes()[which]
    changed = source.mutated(envelope)
    if source.below(2):
        changed = pack(source.altered(unpack(envelope)))
    with suppress(WireError):
        assert type(message).unseal(changed) == (PEERS[0], message)
    with suppress(WireError):
        unseal(changed, "another purpose")
        raise AssertionError("signed for one thing and taken for another")


def manifests(source: Source) -> None:
    """A manifest that a peer did sign, of whatever it likes: without its parameters it changes nothing."""
    node = _node()
    fields = source.altered(unpack(manifest().pack()))
    body = pack(fields) if source.below(8) else source.mutated(pack(fields))
    sealed = _sealed(MALLORY, body, "manifest")
    with suppress(WireError):
        signer, read = Manifest.unseal(sealed)
        assert signer == PEERS[1] and Manifest.unpack(read.pack()) == read
    asked = len(node.dialled)
    with suppress(WireError):
        held = finished(node.sync.follow(PEERS[1], sealed))
        assert held.version == 0
    for _ in node.dialled[asked:]:  # only for what can be true has anybody been asked
        assert read.elements == ELEMENTS and read.group == GROUP and read.run == RUN.run_id
    with suppress(WireError):
        finished(node.sync.follow(PEERS[0], sealed))
    assert node.store.newest(GROUP).version == 0


def _sealed(key: Ed25519PrivateKey, body: bytes, purpose: str) -> bytes:
    from spheroid_node.wire.signing import seal

    return seal(key, purpose, body)


@cache
def _node() -> SimpleNamespace:
    """What of a node follows manifests. Whom it dials does not answer."""
    dialled: list[Any] = []

    async def dial(address: Any, service: str) -> Any:
        dialled.append(address)
        raise LinkFailed(address, "no answer")

    async def all_nodes(blocks: int) -> dict[str, NodeRecord]:
        return {PEERS[1]: record()}

    client = SimpleNamespace(
        run=RUN, dial=dial, dht=SimpleNamespace(time=lambda: NOW), identity=SimpleNamespace(peer=PEERS[0]),
        directory=SimpleNamespace(all_nodes=all_nodes),
    )  # fmt: skip
    store = VersionStore(RUN)
    store.newest(GROUP)
    return SimpleNamespace(sync=Synchroniser(client, store), store=store, dialled=dialled)  # type: ignore[arg-type]


# --- updates ---------------------------------------------------------------------------------------


def updates(source: Source) -> None:
    """An update that a peer did sign, with chunks of anything: what is accepted is finite and as signed."""
    dtype = source.pick(("fp16", "int8", "float32"))
    run = _compressing(dtype)
    desk = Desk(run)
    aggregator = Aggregator(run, GROUP, 7, Base.initial(VECTOR), ELEMENTS, PEERS, BytesIO)
    desk.open(aggregator)
    valid = encode_vector(VECTOR, dtype)
    payload = source.mutated(valid) if source.below(2) else valid
    signed = header(payload, run=run.run_id, dtype=dtype)
    fields = unpack(signed.pack())
    body = pack(source.altered(fields)) if source.below(2) else pack(fields)
    try:
        offer = desk.offer(_sealed(MALLORY, body, "update"), NOW)
        if offer.answer is not None:
            assert offer.answer != ACCEPTED
            return
        meter = offer.meter(source.mutated(chunk_hashes(payload)) if source.below(2) else None)
        for chunk in chunks(payload) if source.below(8) else (payload[:7], payload[7:]):
            meter.feed(chunk)
        if not meter.complete:
            return
        facts = meter.facts()
    except WireError:
        return
    answer = desk.deliver(offer, facts, chunks(payload), NOW)
    made = aggregator.close(VECTOR, 0)
    assert (answer == ACCEPTED) == (made is not None)
    if made is not None:
        assert offer.header.digest == payload_digest(payload)
        assert np.isfinite(made.vector).all()


@cache
def _compressing(dtype: Any) -> RunSpec:
    rules = RUN.round.model_copy(update={"compression": dtype, "aggregation": "mean"})
    return RUN.model_copy(update={"round": rules})


# --- DHT -------------------------------------------------------------------------------------------


def record(**changes: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "run": RUN.run_id, "block": 0, "state": "online", "host": "127.0.0.1", "port": 7, "device": "cpu",
        "started": 1.0, "round": 3, "held": [HeldVersion(group=GROUP, version=1, digest=bytes(32))],
        "serves": 1, "accepted": 1, "late": 0, "refused": 0, "led": 0, "tokens_per_second": 1.0,
        "train_loss": None, "from_noise_ce": 2.0, "bytes_in": 1, "bytes_out": 1, "sessions": 0,
        "hop_seconds": 0.1, "neighbours": [],
    }  # fmt: skip
    return NodeRecord(**fields | changes)


LATER = 4_000_000_000.0
"""When records are judged: nothing that is kept until then has expired by hivemind's own clock."""
KEY = DHTID.generate(source=nodes_key(RUN.run_id, 0)).to_bytes()
KEYS = Keys()
KEYS.know(RUN)


@cache
def _stored() -> DHTRecord:
    whole = DHTRecord(KEY, pack(PEERS[0]), pack(record().pack()), LATER + 60)
    return DHTRecord(KEY, whole.subkey, RecordValidator(ALICE, KEYS).sign_value(whole), whole.expiration_time)


def records(source: Source) -> None:
    """A DHT record counts only as its author has signed it."""
    true, judge = _stored(), RecordValidator(MALLORY, KEYS, clock=lambda: LATER)
    changed = DHTRecord(
        source.mutated(true.key) if not source.below(4) else true.key,
        source.mutated(true.subkey) if not source.below(4) else true.subkey,
        source.mutated(true.value) if source.below(4) else true.value,
        source.pick((true.expiration_time, LATER + 59, -1.0, float("nan"), float("inf"), 1e300)),
    )
    assert judge.validate(changed) in (True, False)
    if judge.validate(changed):
        assert changed == true
        assert judge.strip_value(changed) == pack(record().pack())


def dictionaries(source: Source) -> None:
    """What a peer answers to a search: only what its author signed is left of it."""
    author, value, expiration = PEERS[0], _stored().value, _stored().expiration_time
    answer = DictionaryDHTValue()
    answer.store(author, value, expiration)
    answer.store(PEERS[1], source.mutated(value), expiration)
    raw = DHTProtocol.serializer.dumps(answer)
    kind = source.below(3)
    protocol, sent = _protocol(), source.mutated(raw) if source.below(3) else raw
    protocol.answer = SimpleNamespace(
        peer=None,
        results=[
            SimpleNamespace(
                type=kind, value=sent, expiration_time=source.pick((LATER + 60, float("inf"), float("nan"))),
                nearest_node_ids=[], nearest_peer_ids=[],
            )
        ],
    )  # fmt: skip
    found = finished(protocol.call_find(PeerID.from_base58(author), [DHTID.from_bytes(KEY)]))
    values = [kept for kept, _ in (found or {}).values() if kept is not None]
    assert len(values) == 1 or kind != 2 or sent != raw
    for kept in values:
        with kept.value.freeze():
            held = {subkey: tuple(item) for subkey, item in kept.value.items()}
        assert held in ({}, {author: (value, expiration)})
        assert kept.expiration_time in (expiration, float("-inf"))


@cache
def _protocol() -> Any:
    """hivemind's, without a network."""
    made: Any = DHTProtocol.__new__(DHTProtocol)

    async def rpc_find(request: Any, timeout: float) -> Any:
        return made.answer

    async def nothing(*_: Any, **__: Any) -> None:
        return

    made.record_validator = RecordValidator(MALLORY, KEYS, clock=lambda: LATER)
    made.rpc_semaphore, made.wait_timeout, made.node_info = asyncio.Semaphore(1), 1.0, None
    made.get_stub = lambda peer: SimpleNamespace(rpc_find=rpc_find)
    made.update_routing_table, made.routing_table = nothing, SimpleNamespace(get=lambda **_: None)
    made.storage, made.call_store = DHTLocalStorage(), nothing
    harden(made, RecordStore(KEYS, PEERS[1], clock=lambda: LATER), KEYS)
    return made


def bodies(source: Source) -> None:
    """Values that their author signed, with anything in them: a directory leaves out what makes no sense."""
    node = pack(source.altered(unpack(record().pack())))
    seal = _sealed(MALLORY, pack(source.altered(unpack(manifest().pack()))), "manifest")
    spec = pack(source.altered(unpack(RUN.pack())))
    advert = pack(source.altered(unpack(RunAdvert(run=RUN.run_id, name=RUN.name).pack())))
    values = {
        nodes_key(RUN.run_id, 0): node, manifests_key(RUN.run_id, GROUP): seal,
        run_key(RUN.run_id): spec, runs_key(): advert,
    }  # fmt: skip
    shaken = {key: source.mutated(value) if not source.below(4) else value for key, value in values.items()}

    async def get(key: str) -> dict[str, bytes]:
        return {PEERS[1]: shaken[key]} if key in shaken else {}

    dht: Any = SimpleNamespace(get=get, time=lambda: NOW, keys=Keys())
    found = finished(Directory(dht, RUN).nodes(0))
    assert all(item.block == 0 and item.run == RUN.run_id for item in found.values())
    announced = finished(Directory(dht, RUN).manifests(GROUP, ELEMENTS))
    assert all((signer, found.elements) == (PEERS[1], ELEMENTS) for signer, found, _ in announced)
    with patch.object(directory, "FIND_RUN_ATTEMPTS", 1), suppress(RunNotFound, SeveralRuns):
        assert finished(find_run(dht)).run_id == RUN.run_id


# --- run files -------------------------------------------------------------------------------------


@cache
def _toml() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "bootstrap/runs").glob("*.toml"))]


ODD_TOML = (
    b"1e999", b"-1", b"nan", b"9" * 30, b"9" * 5000, b"[" * 3000, b"1979-05-27", b'"\\u0000"', b"[{}]"
)  # fmt: skip


def run_files(source: Source) -> None:
    """A run file, whole or not, with numbers that nobody would think of."""
    text = source.mutated(source.pick(_toml()))
    for _ in range(source.below(3)):
        odd = source.pick(
            (b"1e999", b"-1", b"nan", b"9" * 30, b"9" * 5000, b"[" * 3000, b"1979-05-27", b'"\\u0000"')
        )
        at = text.find(b"= ", source.below(len(text) + 1))
        text = text[: at + 2] + odd + text[text.find(b"\n", at) :] if at >= 0 else text
    path = _folder() / "run.toml"
    path.write_bytes(text)
    with suppress(RunFileInvalid):
        run = RunSpec.from_toml(path)
        assert RunSpec.unpack(run.pack()) == run
    packed = source.mutated(RUN.pack())
    fields = source.altered(unpack(RUN.pack()))
    for data in (packed, pack(fields)):
        with suppress(ValueError):
            run = RunSpec.unpack(data)
            assert RunSpec.unpack(run.pack()).run_id == run.run_id


_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")  # gone when the process ends


def _folder() -> Path:
    return Path(_FOLDER.name)


# --- disk ------------------------------------------------------------------------------------------


def stored(source: Source) -> None:
    """Versions, outboxes and manifests that a disk has spoilt, or that something else has written there."""
    path = _folder() / f"{GROUP}.safetensors"
    if source.below(2):
        path.write_bytes(source.mutated(_version()))
    else:
        _version()
        metadata, held = read_tensors(_folder() / "valid.safetensors")
        with suppress(ValueError, TypeError):  # nothing that safetensors could write
            write_tensors(path, _other_tensors(source, held), _texts(source.altered(dict(metadata))))
    with suppress(CheckpointInvalid, RunMismatch):
        read = read_version(path, RUN, GROUP)
        assert read.payload.shape == (ELEMENTS,) and read.payload.dtype == np.float32
        with suppress(WireError, ValueError):
            Held.of(GROUP, read.version, read.payload, read.manifest)
    _spoil_outbox(source)
    outbox, again = Outbox(RUN, _folder() / "outbox"), Contributor(RUN, GROUP, ELEMENTS)
    outbox.restore(GROUP, again, 8)
    outbox.tidy(8)
    assert again.residual.vector.shape == (ELEMENTS,)
    again.settle({})
    remembered = _folder() / "manifests"
    remembered.write_bytes(source.mutated(_remembered()))
    for version, known in History(RUN.run_id, GROUP, remembered).manifests.items():
        assert (known.run, known.group, known.version) == (RUN.run_id, GROUP, version)


@cache
def _remembered() -> bytes:
    """The manifests of two versions and of another group's, as a node keeps them."""
    path = _folder() / "valid"
    history = History(RUN.run_id, GROUP, path)
    found = [manifest(version=1), manifest(version=3), manifest(group="interface", version=5)]
    history.follow(Signed(item, item.seal(ALICE)) for item in found)
    history.save()
    return path.read_bytes()


def _texts(metadata: dict[str, Any]) -> dict[str, str]:
    return {str(name): value if isinstance(value, str) else repr(value) for name, value in metadata.items()}


def _other_tensors(source: Source, tensors: dict[str, Any]) -> dict[str, Any]:
    """Some missing, some of another dtype or shape."""
    changed = {name: tensor for name, tensor in tensors.items() if source.below(16)}
    for name in changed:
        if not source.below(4):
            changed[name] = changed[name].astype(source.pick(("f2", "f8", "i1", "u8", "?")))
        if not source.below(8):
            changed[name] = (
                np.stack([changed[name]] * source.below(3)) if source.below(2) else changed[name][:1]
            )
    return changed


def _spoil_outbox(source: Source) -> None:
    """One of its files is mutated, or its index says something else."""
    folder = _folder() / "outbox" / GROUP
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _outbox().items():
        (folder / name).write_bytes(data)
    name = source.pick(sorted(_outbox()))
    if source.below(2):
        (folder / name).write_bytes(source.mutated(_outbox()[name]))
        return
    metadata, _ = read_tensors(folder / INDEX_FILE)
    index = source.altered(json.loads(metadata["index"]))
    with suppress(ValueError, TypeError):  # nothing that JSON could hold
        write_tensors(folder / INDEX_FILE, {}, {"index": json.dumps(index, default=repr)})


@cache
def _version() -> bytes:
    path = _folder() / "valid.safetensors"
    write_version(path, RUN, GROUP, 1, VECTOR, manifest(digest=vector_digest(VECTOR)).seal(ALICE))
    return path.read_bytes()


@cache
def _outbox() -> dict[str, bytes]:
    """The files of one, by name."""
    contributor = Contributor(RUN, GROUP, ELEMENTS)
    for round in (6, 7):
        contributor.prepare(round, Base.initial(VECTOR), VECTOR, 5, 80, bytes(16))
    Outbox(RUN, _folder() / "valid-outbox").save(GROUP, contributor.kept(), 7)
    return {path.name: path.read_bytes() for path in (_folder() / "valid-outbox" / GROUP).iterdir()}


def headers(source: Source) -> None:
    """safetensors files whose header is JSON of anything."""
    (length,) = struct.unpack("<Q", _version()[:8])
    fields = source.altered(json.loads(_version()[8 : 8 + length]))
    for entry in [value for value in fields.values() if isinstance(value, dict) and "dtype" in value]:
        if not source.below(4):
            entry["dtype"] = source.pick(("F64", "BF16", "F8_E4M3", "I8", "BOOL", "U64", "F16", "x"))
    text = json.dumps(fields, default=repr).encode()
    path = _folder() / "header.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + _version()[8 + length :])
    with suppress(CheckpointInvalid, RunMismatch):
        read_version(path, RUN, GROUP)


# --- the trainer -----------------------------------------------------------------------------------


def trainer(source: Source) -> None:
    """What a trainer and its node say to each other."""
    request = source.pick((
        {"do": "train", "round": 1, "max_steps": 5, "seconds": 1.0},
        {"do": "load", "group": GROUP, "version": 1, "steps": 2, "vector": b"1234"},
        {"do": "evaluate", "windows": 3}, {"do": "save"},
        {"ok": True, "steps": 1, "updates": {GROUP: b"1234"}},
        {"error": "it broke", "kind": "TrainerFailed", "problem": "x", "remedy": "y", "exit_code": 1},
    ))  # fmt: skip
    body = pack(source.altered(dict(request)))
    with suppress(WireError):
        fields = trainer_protocol.decode(body if source.below(2) else source.mutated(body))
        with suppress(WireError):
            parsed = trainer_protocol.parse_request(fields)
            again = trainer_protocol.encode_request(parsed)[HEADER.size :]
            assert trainer_protocol.parse_request(trainer_protocol.decode(again)) == parsed
        error = trainer_protocol.error_of(fields)
        assert (error is None) == ("error" not in fields)
        assert error is None or (isinstance(error, SpheroidError) and str(error))


TARGETS: dict[str, Callable[[Source], None]] = {
    target.__name__: target
    for target in (
        frames, messages, tensors, envelopes, manifests, updates, records, dictionaries, bodies, run_files,
        stored, headers, trainer,
    )
}  # fmt: skip


def quiet() -> None:
    """Without a log of everything that is refused."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
