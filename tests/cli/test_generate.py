"""``generate`` on an exported model, and its answers to wrong prompts."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spheroid_node.cli import generate
from spheroid_node.cli.logging_setup import set_up_logging
from spheroid_node.errors import BlockWithoutReplica, GenerationEndedEarly, PromptInvalid, SpheroidError
from spheroid_node.model import load
from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.parameters import flatten, group_module
from spheroid_node.serving.chain import ChainLost, Sweep
from spheroid_node.serving.decoders import DECODERS, decode
from spheroid_node.serving.local import LocalChain
from spheroid_node.training.checkpoint import export_model
from spheroid_node.wire.codes import ErrorCode
from tests.serving.memory import small_model


@pytest.fixture(scope="module")
def model() -> ComposedModel:
    return small_model(window=64)


@pytest.fixture(scope="module")
def checkpoint(model: ComposedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("export") / "model"
    vectors = {group: flatten(group_module(model, group)) for group in model.run.groups}
    export_model(directory, model.run, vectors, dict.fromkeys(model.run.groups, 3))
    return str(directory)


def invoke(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(generate.command, arguments, input=stdin)


def expected(checkpoint: str, decoder: str, prompt: bytes, count: int, seed: int) -> str:
    model = load(checkpoint)
    chain = LocalChain(model, seed, 0.8)

    async def text() -> bytes:
        return b"".join([part async for part in decode(decoder, model.run, chain, prompt, count)])  # type: ignore[arg-type]

    return asyncio.run(text()).decode(errors="replace")


def test_the_decoders_offered_are_the_decoders_there_are() -> None:
    assert generate.DECODERS == DECODERS


@pytest.mark.parametrize("decoder", DECODERS)
def test_text_on_stdout_and_statistics_on_stderr(checkpoint: str, decoder: str) -> None:
    arguments = ["-n", "50", "--seed", "4", "--decode", decoder, "--stats", "--checkpoint", checkpoint]
    result = invoke("The ä", *arguments)
    assert result.exit_code == 0, result.exception
    assert result.stdout == expected(checkpoint, decoder, "The ä".encode(), 50, 4)
    sweeps = int(result.stderr.split(" sweeps")[0].split()[-1])
    assert sweeps == {"autoregressive": 50, "one-sweep": 1}.get(decoder, sweeps) and 1 <= sweeps <= 50
    assert "seed 4," in result.stderr
    assert invoke("-", *arguments, stdin="The ä".encode()).stdout == result.stdout


def test_several_texts_each_under_its_prompt(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("The ä\n\nA river\n".encode())
    options = ("-n", "20", "--temperature", "0.9", "--checkpoint", checkpoint)
    result = invoke("--prompts", str(file), "--n", "2", "--seed", "7", *options, "--stats")
    assert result.exit_code == 0, result.exception
    shown = ""
    for prompt in ("The ä", "A river"):
        for seed in ("7", "8"):
            shown += f"==> {prompt} <==\n{invoke(prompt, '--seed', seed, *options).stdout}\n\n"
    assert result.stdout == shown
    assert result.stderr.count("seed 7,") == result.stderr.count("seed 8,") == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give either PROMPT or --prompts FILE"),
        (("The", "--prompts", "somewhere"), "give either PROMPT or --prompts FILE"),
        (("--prompts", "/nowhere/prompts.txt"), "No such file"),
    ],
)
def test_prompts_that_are_not_there(arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(generate.command, [*arguments])
    assert (result.exit_code, result.stdout) == (2, "") and complaint in result.stderr


def test_nothing_is_asked_for(checkpoint: str) -> None:
    result = invoke("The", "-n", "0", "--checkpoint", checkpoint)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_without_a_seed_the_text_differs(checkpoint: str) -> None:
    texts = {invoke("The", "-n", "40", "--checkpoint", checkpoint).stdout_bytes for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("prompt", "stdin", "complaint"),
    [
        ("", b"", "is empty"),
        ("-", b"", "is empty"),
        ("-", b"\xff", "is not UTF-8"),
        ("a\udcff", b"", "is not UTF-8"),
        (65 * "x", b"", "has 65 bytes; the window of this run has 64"),
    ],
)
def test_wrong_prompts(checkpoint: str, prompt: str, stdin: bytes, complaint: str) -> None:
    result = invoke(prompt, "--checkpoint", checkpoint, stdin=stdin)
    assert isinstance(result.exception, PromptInvalid) and complaint in str(result.exception)
    assert result.stdout == ""


def test_a_prompt_that_is_not_utf8_on_a_real_command_line(environment: dict[str, str]) -> None:
    """Before any peer is looked for, in one line."""
    command = [sys.executable, "-m", "spheroid_node", "generate", os.fsdecode(b"caf\xe9")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: The prompt is not UTF-8.") and ended.stderr.count("\n") == 1


async def test_a_lost_chain_ends_with_what_there_is(
    model: ComposedModel, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    class Dying(LocalChain):
        async def sweep(self, position: int, tokens: bytes, masked: int = 0, decide: int = 1) -> Sweep:
            if position > 4:
                raise ChainLost(1, ErrorCode.NEXT_HOP_LOST)
            return Sweep(position + len(tokens), b"x", None, (0.1,))

    class Source:
        opened = 0

        async def open(self) -> Dying:
            self.opened += 1
            if self.opened > 1:
                raise BlockWithoutReplica([1])
            return Dying(model)

        def lost(self, chain: Dying, error: ChainLost) -> None:
            assert error.block == 1

    set_up_logging("auto", level=logging.WARNING)  # as the command does
    request = generate.Request(b"abc", 9, 0, 0.0, "autoregressive")
    with pytest.raises(GenerationEndedEarly, match="after 3 bytes: No live replica of block 1") as ended:
        await generate.write(model.run, Source(), request, sys.stdout.buffer)
    assert ended.value.exit_code == 4
    assert capsysbinary.readouterr().out == b"xxx"


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    result = invoke("The", "--checkpoint", str(tmp_path))
    assert isinstance(result.exception, SpheroidError) and result.exception.exit_code == 2
