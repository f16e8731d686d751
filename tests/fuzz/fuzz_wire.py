"""Feeds mutated bytes to everything that reads what another machine sent. By hand, for as long as one likes:

    pip install atheris
    python tests/fuzz/fuzz_wire.py -max_total_time=600 [CORPUS]

A message is either parsed or refused with a WireError. One that is parsed packs to what parses to the same,
and a state is taken apart as a hop takes it apart. Without a corpus it begins with the golden vectors.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["spheroid_node"]):
    from spheroid_node.run import ModelSpec, RunSpec
    from spheroid_node.serving.states import piece_of, state_of
    from spheroid_node.serving.steps import check, split
    from spheroid_node.wire.codes import WireError
    from spheroid_node.wire.frames import HEADER, FrameDecoder, pack, unpack
    from spheroid_node.wire.messages import Manifest, Receipt, State, Step, UpdateHeader, Write, decode
    from spheroid_node.wire.records import NodeRecord
    from spheroid_node.wire.signing import unseal
    from spheroid_node.wire.tensors import decode_vector, unpack_tensor

RUNS = [
    RunSpec(
        name="fuzz",
        model=ModelSpec(blocks=3, layers=1, width=4, heads=2, window=8),
        learning={"readout": readout},
        states=states,
    )
    for readout, states in (("last", "fp16"), ("mean", "int8"))
]
SIGNED = (UpdateHeader, Receipt, Manifest, NodeRecord)


def one(data: bytes) -> None:
    choice, data = data[:1], data[1:]
    with suppress(WireError):
        _read(choice[0] % 8 if choice else 0, data)


def _read(kind: int, data: bytes) -> None:
    if kind == 0:
        _message(data)
    elif kind == 1:
        decoder, bodies = FrameDecoder(), []
        for start in range(0, len(data), 7):
            bodies += decoder.feed(data[start : start + 7])
        for body in bodies:
            _message(body)
    elif kind == 2:
        for signed in SIGNED:
            try:
                parsed = signed.unpack(data)
            except WireError:
                continue
            assert signed.unpack(parsed.pack()) == parsed
    elif kind == 3:
        unseal(data, "update")
    elif kind == 4:
        decode_vector(data, ("fp16", "int8", "float32")[len(data) % 3])
    elif kind > 5:
        _message(_changed(atheris.FuzzedDataProvider(data)))
    else:
        unpack_tensor({"dtype": "int8", "shape": [len(data), 1], "data": data}, (None, 1))


def _message(body: bytes) -> None:
    message = decode(body)
    assert decode(message.pack()) == message
    if isinstance(message, State):
        piece = piece_of(message)
        check(piece, 8, 65_536)
        for run in RUNS:
            for block in range(3):
                try:
                    state_of(run, block, message)
                except WireError:
                    continue
    elif isinstance(message, Step | Write):
        try:
            masked = message.masked if isinstance(message, Step) else 0
            sizes = [part.count for part in split(piece_of_known(message, masked), 8)]
        except ValueError:
            return
        assert sum(sizes) == len(message.tokens) + masked


def _changed(source: atheris.FuzzedDataProvider) -> bytes:
    """A golden message with some of its values replaced."""
    fields = copy.deepcopy(MESSAGES[source.ConsumeIntInRange(0, len(MESSAGES) - 1)])
    for _ in range(source.ConsumeIntInRange(1, 3)):
        place = fields
        while True:
            key = list(place)[source.ConsumeIntInRange(0, len(place) - 1)]
            if not (isinstance(place[key], dict) and place[key] and source.ConsumeBool()):
                break
            place = place[key]
        place[key] = _value(source)
    return pack(fields)


def _value(source: atheris.FuzzedDataProvider) -> object:
    kind = source.ConsumeIntInRange(0, 8)
    if kind == 0:
        return source.ConsumeIntInRange(-(2**63), 2**64 - 1)
    if kind == 1:
        return source.ConsumeIntInRange(-2, 20)
    if kind == 2:
        return source.ConsumeBytes(source.ConsumeIntInRange(0, 64))
    if kind == 3:
        return source.ConsumeUnicodeNoSurrogates(source.ConsumeIntInRange(0, 16))
    if kind == 4:
        return [source.ConsumeIntInRange(0, 9) for _ in range(source.ConsumeIntInRange(0, 5))]
    if kind == 5:
        return source.ConsumeFloat()
    if kind == 6:
        return {
            "dtype": source.PickValueInList(["fp16", "int8", "float32", "x"]),
            "shape": [1, 4],
            "data": b"",
        }
    return source.PickValueInList([None, True, False, {}, [], b"", ""])


def piece_of_known(message: Step | Write, masked: int):  # type: ignore[no-untyped-def]
    from spheroid_node.serving.steps import Piece

    return Piece(message.position, message.tokens, masked)


def golden() -> list[dict[str, object]]:
    """The messages of the golden vectors."""
    vectors = Path(__file__).parents[2] / "protocols/vectors"
    raw = [text for file in vectors.glob("*.json") for text in _hex_strings(json.loads(file.read_text()))]
    found = []
    for text in raw:
        with suppress(WireError):
            fields = unpack(bytes.fromhex(text)[HEADER.size :])
            if isinstance(fields, dict) and "type" in fields:
                found.append(fields)
    return found


def corpus(folder: Path) -> None:
    """The frames of the golden vectors, each behind the byte that has it read as a message."""
    vectors = Path(__file__).parents[2] / "protocols/vectors"
    number = 0
    for file in vectors.glob("*.json"):
        found = json.loads(file.read_text())
        for text in _hex_strings(found):
            raw = bytes.fromhex(text)
            for kind, data in ((0, raw[HEADER.size :]), (1, raw), (2, raw), (3, raw)):
                (folder / str(number)).write_bytes(bytes([kind]) + data)
                number += 1


def _hex_strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _hex_strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _hex_strings(item)]
    is_hex = (
        isinstance(value, str)
        and len(value) > 8
        and not len(value) % 2
        and not set(value) - set("0123456789abcdef")
    )
    return [value] if is_hex else []  # type: ignore[list-item]


MESSAGES = golden()

if __name__ == "__main__":
    arguments = list(sys.argv)
    if not any(not argument.startswith("-") for argument in arguments[1:]):
        folder = Path(tempfile.mkdtemp(prefix="corpus-"))
        corpus(folder)
        arguments.append(str(folder))
    atheris.Setup(arguments, one)
    atheris.Fuzz()
