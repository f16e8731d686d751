"""The trainer as a real child process, spoken to over its pipes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from spheroid_node.errors import DataMissing, DeviceUnavailable, TrainerFailed
from spheroid_node.model.initial import initial_vector
from spheroid_node.run import RunSpec
from spheroid_node.training.trainer_protocol import (
    FRAME_LIMIT,
    MODULE,
    Configure,
    Evaluate,
    Load,
    Save,
    Screen,
    Stop,
    Take,
    Train,
    decode,
    encode_request,
    error_of,
)
from spheroid_node.wire.frames import HEADER, FrameDecoder, pack
from spheroid_node.wire.messages import Message
from spheroid_node.wire.tensors import decode_vector, encode_vector

SECONDS = 60.0


class Child:
    """A trainer process and its pipes."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        assert self.process.stdin
        assert self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._decoder = FrameDecoder(FRAME_LIMIT)

    def send(self, frame: bytes) -> None:
        while frame:
            frame = frame[self.stdin.write(frame) :]

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self.stdout.fileno(), 1 << 20)
            assert data, f"the child closed its end: {self.log.read_text()}"
            for body in self._decoder.feed(data):
                return decode(body)
        raise AssertionError(f"no reply in time: {self.log.read_text()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()

    def ask(self, request: Message) -> dict[str, Any]:
        self.send(encode_request(request))
        return self.receive()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path / "child.log")
    yield child
    child.end()


@pytest.fixture(scope="module")
def lasting_child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One for all tests that configure it anew and do not end it: torch takes its time to start."""
    child = Child(tmp_path_factory.mktemp("lasting") / "child.log")
    yield child
    child.end()


@pytest.fixture
def configure(run: RunSpec, tmp_path: Path) -> Callable[..., Configure]:
    """A valid first request, with fields replaced by keyword."""
    data = tmp_path / "text.txt"
    data.write_text("the castle on the hill stands above the river.\n" * 200)

    def build(**fields: Any) -> Configure:
        settings = {
            "run": run.pack(),
            "block": 1,
            "device": "cpu",
            "data": [str(data)],
            "held_out": [],
            "worker_seed": 3,
            "threads": 1,
            "state": str(tmp_path / "state.safetensors"),
        }
        return Configure(**{**settings, **fields})

    return build


MakeConfigure = Callable[..., Configure]


def load(run: RunSpec, group: str) -> Load:
    vector = encode_vector(initial_vector(run, group), "float32")
    return Load(group=group, version=1, steps=10, vector=vector)


def test_a_life(child: Child, configure: MakeConfigure, run: RunSpec, tmp_path: Path) -> None:
    about = child.ask(configure())
    assert about["ok"] is True
    assert (about["device"], about["drawn"]) == ("cpu", 0)
    assert about["train_bytes"] + about["held_out_bytes"] == (tmp_path / "text.txt").stat().st_size
    assert about["eval_windows"] == about["held_out_bytes"] // 33
    for group in ("block-0", "block-1", "interface"):
        assert child.ask(load(run, group)) == {"ok": True}

    before = child.ask(Evaluate(windows=4))["ce"]
    reply = child.ask(Train(max_steps=20, seconds=SECONDS))
    assert child.ask(Evaluate(windows=4))["ce"] == before, "the versions are what is measured"
    updates = child.ask(Take())["updates"]
    assert reply["steps"] == 20
    assert reply["tokens"] == 20 * run.training.batch * run.model.window
    assert reply["seconds"] >= reply["step_seconds"] > 0
    assert set(updates) == {"block-1", "interface"}
    for group, packed in updates.items():
        update = decode_vector(packed, "float32")
        assert update.shape == initial_vector(run, group).shape
        tried = {"payload": packed, "dtype": "float32", "windows": 4}
        good = child.ask(Screen(group=group, version=1, scale=1.0, **tried))
        bad = child.ask(Screen(group=group, version=1, scale=-1.0, **tried))
        # Version 0 has a head of zeros, so nothing that a block learns can show yet.
        shows = group == "interface"
        assert good["loaded"] and (good["worse_by"] < 0 < bad["worse_by"] if shows else good["worse_by"] == 0)
        assert child.ask(Screen(group=group, version=2, scale=1.0, **tried)) == {"ok": True, "loaded": False}
        begun = load(run, group)
        child.ask(begun.model_copy(update={"version": 2, "left_over": packed, "carry": True}))
    assert not any(decode_vector(packed, "float32").any() for packed in child.ask(Take())["updates"].values())
    after = child.ask(Evaluate(windows=4))["ce"]
    assert after == before, "what is left over is on top of the version"
    learnt = {
        group: np.frombuffer(packed, "<f4") + initial_vector(run, group) for group, packed in updates.items()
    }
    for group, vector in learnt.items():
        child.ask(load(run, group).model_copy(update={"vector": encode_vector(vector, "float32")}))
    after = child.ask(Evaluate(windows=4))["ce"]
    assert len(before) == len(after) == 2
    assert after[1] < before[1] - 0.5

    assert child.ask(Save()) == {"ok": True}
    assert (tmp_path / "state.safetensors").is_file()
    child.send(encode_request(Stop()))
    assert child.process.wait(SECONDS) == 0


def test_moments_and_draws_outlive_the_process(
    child: Child, configure: MakeConfigure, tmp_path: Path
) -> None:
    child.ask(configure())
    child.ask(Train(max_steps=3, seconds=SECONDS))
    child.ask(Save())
    successor = Child(tmp_path / "successor.log")
    try:
        assert successor.ask(configure())["drawn"] == 3
    finally:
        successor.end()


def test_a_damaged_state_is_discarded(lasting_child: Child, configure: MakeConfigure, tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"half writ")
    assert lasting_child.ask(configure())["drawn"] == 0
    assert "trainer.state_discarded" in lasting_child.log.read_text()


def test_a_budget_of_time_ends_training(lasting_child: Child, configure: MakeConfigure) -> None:
    lasting_child.ask(configure())
    some = lasting_child.ask(Train(max_steps=10**9, seconds=0.5))
    assert 0 < some["steps"] < 10**6
    # One step is made in any case, so that a machine that was slow once finds out that it no longer is.
    assert lasting_child.ask(Train(max_steps=10, seconds=0.0))["steps"] == 1


@pytest.mark.parametrize(
    ("fields", "kind", "part"),
    [
        ({"data": ["/no/such/text"]}, DataMissing, "/no/such/text"),
        ({"device": "abacus"}, DeviceUnavailable, "abacus"),
    ],
)
def test_a_users_error_comes_back_as_it_is(
    lasting_child: Child, configure: MakeConfigure, fields: dict[str, Any], kind: type[Exception], part: str
) -> None:
    error = error_of(lasting_child.ask(configure(**fields)))
    assert isinstance(error, kind)
    assert part in str(error)
    assert error.exit_code == 2
    assert error.remedy.startswith(("Give", "Choose"))
    assert error_of(lasting_child.ask(configure())) is None


def test_an_error_without_a_remedy_is_the_trainers() -> None:
    error = error_of({"error": "it broke", "kind": "DataMissing", "problem": "it broke"})
    assert isinstance(error, TrainerFailed)


def test_a_request_that_cannot_be_done_is_answered_and_the_next_one_served(
    child: Child, configure: MakeConfigure, run: RunSpec
) -> None:
    def refusal(frame: bytes) -> str:
        child.send(frame)
        error = error_of(child.receive())
        assert isinstance(error, TrainerFailed)
        return str(error)

    def frame(body: bytes) -> bytes:
        return HEADER.pack(len(body)) + body

    assert "configure" in refusal(encode_request(Evaluate(windows=1)))
    assert "not msgpack" in refusal(frame(b"\xc1garbage"))
    assert "not a map" in refusal(frame(pack([1, 2])))
    assert "no request is called 'dance'" in refusal(frame(pack({"do": "dance"})))
    assert "no request is called" in refusal(frame(pack({"do": ["train"]})))
    assert "max_steps" in refusal(frame(pack({"do": "train", "seconds": 1.0})))
    child.ask(configure())
    assert "ValueError" in refusal(encode_request(Load(group="block-1", version=1, steps=1, vector=b"1234")))
    assert "block-9" in refusal(encode_request(Load(group="block-9", version=1, steps=1, vector=b"1234")))
    assert child.ask(load(run, "block-1")) == {"ok": True}


def test_stray_output_does_not_reach_the_pipe(
    lasting_child: Child, configure: MakeConfigure, tmp_path: Path
) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"damaged, which is logged")
    lasting_child.ask(configure())
    descriptors = {Path(f"/proc/{lasting_child.process.pid}/fd/{number}").readlink() for number in (1, 2)}
    assert descriptors == {lasting_child.log}


def test_the_end_of_input_ends_an_idle_process(child: Child) -> None:
    child.stdin.close()
    assert child.process.wait(SECONDS) == 0


@pytest.mark.parametrize("farewell", [b"", encode_request(Stop())], ids=["end of input", "stop"])
def test_training_is_given_up_when_nobody_waits_for_it(
    child: Child, configure: MakeConfigure, farewell: bytes
) -> None:
    child.ask(configure())
    child.send(encode_request(Train(max_steps=10**9, seconds=3600.0)))
    child.send(farewell)
    child.stdin.close()
    child.receive()
    assert child.process.wait(SECONDS) == 0


def test_ctrl_c_is_left_to_the_node(lasting_child: Child, configure: MakeConfigure) -> None:
    lasting_child.ask(configure())
    lasting_child.process.send_signal(signal.SIGINT)
    assert lasting_child.ask(Train(max_steps=1, seconds=SECONDS))["steps"] == 1


PARENT = f"""
import subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-m", {MODULE!r}], stdin=int(sys.argv[1]), stdout=int(sys.argv[2]))
print(child.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_a_killed_parent_takes_the_trainer_with_it_in_the_middle_of_training(
    configure: MakeConfigure,
) -> None:
    """The pipes stay open here, so that it is not the end of input that ends the trainer."""
    (child_in, our_out), (our_in, child_out) = os.pipe(), os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(child_in), str(child_out)],
        stdout=subprocess.PIPE,
        pass_fds=(child_in, child_out),
    )
    assert parent.stdout
    trainer = psutil.Process(int(parent.stdout.readline()))
    try:
        os.write(our_out, encode_request(configure()))
        assert select.select([our_in], [], [], SECONDS)[0]
        os.write(our_out, encode_request(Train(max_steps=10**9, seconds=3600.0)))
        assert trainer.is_running()
        parent.kill()
        trainer.wait(SECONDS)
        assert not trainer.is_running()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if trainer.is_running():
            trainer.kill()
        for descriptor in (child_in, our_out, our_in, child_out):
            os.close(descriptor)
