"""The documents say what the program does: commands parse, links lead somewhere, tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from spheroid_node.cli.main import COMMANDS, group
from spheroid_node.config import NodeConfig
from spheroid_node.wire import messages, records
from spheroid_node.wire.codes import ERRORS, Reason

ROOT = Path(__file__).parents[1]
PROTOCOLS = ROOT / "protocols"
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *PROTOCOLS.glob("*.md"),
    ROOT / "bootstrap/README.md",
]
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:spheroid-node|make)(?: [^`]*)?)`")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def command_lines(text: str) -> list[list[str]]:
    """Every command line of ours in code, as words; comments, prompts and other programs left out."""
    fenced = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    lines = [*fenced, *INLINE.findall(FENCED.sub("", text))]
    words = [
        shlex.split(line.strip().removeprefix("$ "), comments=True)
        for line in lines
        if "make" in line or "sph" in line
    ]
    return [line for line in words if line and line[0] in ("spheroid-node", "make")]


COMMAND_LINES = [
    pytest.param(line, id=f"{relative(path)}: {' '.join(line)[:60]}")
    for path in sorted(DOCUMENTS)
    for line in command_lines(path.read_text(encoding="utf-8"))
]


def check_ours(words: list[str]) -> None:
    """Raise unless the command exists and takes these options and arguments. Nothing runs."""
    with click.Context(group, info_name="spheroid-node") as context:
        _check(group, context, words)


def _check(group: click.Group, context: click.Context, words: list[str]) -> None:
    name, command, rest = group.resolve_command(context, words)
    if isinstance(command, click.Group):
        _check(command, context, rest)
    elif command is not None:
        command.make_context(name, rest, parent=context)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_command_lines(words: list[str]) -> None:
    if words[0] == "spheroid-node":
        if len(words) > 1:
            check_ours(words[1:])
        return
    targets = [word for word in words[1:] if not word.startswith("-") and "=" not in word and "/" not in word]
    assert set(targets) <= make_targets()


def test_the_command_lines_were_found() -> None:
    found = {tuple(parameter.values[0][:2]) for parameter in COMMAND_LINES}
    assert {("make", "demo"), ("make", "test"), ("spheroid-node", "join")} <= found


@pytest.mark.parametrize(
    "words",
    [
        ["jion"],
        ["join", "--blok", "1"],
        ["join", "1"],
        ["bootstrap"],
        ["join", "--block", "x"],
        ["bench", "x"],
    ],
)
def test_a_wrong_command_line_would_be_seen(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        check_ours(words)


def test_every_command_can_be_imported() -> None:
    with click.Context(group) as context:
        assert all(group.get_command(context, name) for name in COMMANDS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target.split("#")[0]).exists()] == []


def test_the_quickstart_lists_every_setting() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for name in NodeConfig.model_fields:
        assert f"| `{name}` |" in text
        assert f"`SPHEROID_{name.upper()}`" in text


PAGES = {
    "link": (messages.Hello, messages.Greeting, messages.Welcome, messages.Error),
    "round": (
        messages.Update,
        messages.Proceed,
        messages.Chunk,
        messages.ReceiptMessage,
        messages.Ping,
        messages.Pong,
        messages.ManifestMessage,
        messages.UpdateHeader,
        messages.Receipt,
        messages.Manifest,
        messages.UpdateOutcome,
    ),
    "transfer": (messages.Want, messages.Listing, messages.Read, messages.Chunk),
    "hop": (
        messages.Open,
        messages.HopAddress,
        messages.Opened,
        messages.Attach,
        messages.Attached,
        messages.Step,
        messages.Write,
        messages.State,
        messages.Result,
        messages.Close,
    ),
    "dht": (records.RunAdvert, records.NodeRecord, records.HeldVersion, records.Neighbour),
}


@pytest.mark.parametrize("page", PAGES)
def test_every_message_and_field_has_its_place(page: str) -> None:
    text = (PROTOCOLS / f"{page}.md").read_text(encoding="utf-8")
    for kind in PAGES[page]:
        for name, field in kind.model_fields.items():
            word = field.default if name == "type" else name
            assert re.search(rf"\b{word}\b", text), f"{kind.__name__}.{name}"


def test_no_message_is_left_out() -> None:
    described = {kind for kinds in PAGES.values() for kind in kinds}
    assert set(messages.MESSAGES.values()) | set(messages.Signed.__subclasses__()) <= described


def test_every_code_is_explained() -> None:
    link, round = ((PROTOCOLS / f"{page}.md").read_text(encoding="utf-8") for page in ("link", "round"))
    for code, meaning in ERRORS.items():
        assert f"| `{code}` | {meaning} |" in link
    for reason in Reason:
        assert f"`{reason}`" in round or reason is Reason.NONE
