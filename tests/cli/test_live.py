import io

import pytest
from rich.console import Console

from spheroid_node.cli.live import duration, render, size, sparkline
from spheroid_node.node.snapshot import GroupVersion, Replica, Snapshot
from spheroid_node.run import ModelSpec, RunSpec

RUN = RunSpec(name="test", model=ModelSpec(blocks=3, layers=1, width=16, heads=2, window=16))


def replica(block: int, peer: str = "12D3KooWaaaaaaaa", **changes: object) -> Replica:
    fields: dict[str, object] = {
        "peer": peer,
        "block": block,
        "state": "online",
        "host": "127.0.0.1",
        "device": "cpu",
        "seconds_up": 5.0,
        "round": 4,
        "version": 3,
        "interface_version": 4,
        "accepted": 3,
        "late": 1,
        "refused": 0,
        "led": 2,
        "tokens_per_second": 1234.5,
        "train_loss": 2.5,
        "from_noise_ce": 2.25,
        "bytes_in": 1_500_000,
        "bytes_out": 900,
        "sessions": 0,
        "hop_seconds": 0.01,
        "note": "",
    }
    return Replica(**(fields | changes))  # type: ignore[arg-type]


def snapshot(*replicas: Replica, seconds_to_deadline: float = 12.0) -> Snapshot:
    versions = {
        f"block-{block}": GroupVersion(f"block-{block}", 3, 4, 700 + block, 1, 0, "00") for block in range(3)
    }
    return Snapshot(RUN, 100.0, 4, seconds_to_deadline, replicas, versions)


def drawn(shown: Snapshot, curve: tuple[float, ...] = (), width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(shown, curve))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


FULL = (
    replica(0),
    replica(1, "12D3KooWbbbbbbbb"),
    replica(1, "12D3KooWcccccccc"),
    replica(2, note="too slow"),
)


def test_a_row_for_each_replica_and_the_swarm_in_a_line() -> None:
    text = drawn(snapshot(*FULL))
    row = next(line for line in text.splitlines() if "…bbbbbbbb" in line)
    assert row.split() == [
        "1", "…bbbbbbbb", "3", "701", "1,234", "2.500", "2.250", "3/1/0", "2", "1.5", "MB", "900", "B",
    ]  # fmt: skip
    assert "round 4 · deadline in 12 s · from-noise CE 2.250" in text
    assert "4 replicas · 4,938 tokens/s · 6.0 MB in, 3.6 kB out" in text
    assert "updates 12 accepted, 4 late, 0 refused" in text
    assert "has no live replica" not in text and "MISSING" not in text


def test_a_block_without_replica_is_loud() -> None:
    text = drawn(snapshot(replica(0), replica(2)))
    assert "MISSING" in text and "Block 1 has no live replica" in text


def test_what_a_replica_wants_known_is_said() -> None:
    assert "(block 2): too slow" in drawn(snapshot(*FULL))


def test_after_the_deadline_a_round_settles() -> None:
    assert "settling" in drawn(snapshot(*FULL, seconds_to_deadline=-0.1))


def test_the_table_fits_a_terminal() -> None:
    text = drawn(snapshot(*FULL, replica(0, tokens_per_second=123_456.0, version=9999)), width=80)
    assert "…aaaaaaaa" in text and "123,456" in text and "1.5 MB" in text and "900 B" in text
    assert not any(line.endswith("…") for line in text.splitlines())


def test_strings_of_other_peers_are_not_markup() -> None:
    text = drawn(snapshot(*FULL, replica(0, state="[bold]online", note="[/red]note")))
    assert "[bold]online" in text and "[/red]note" in text


def test_the_curve_is_drawn_with_its_ends() -> None:
    assert "CE by round █▅▁ 5.000 → 1.000" in drawn(snapshot(*FULL), (5.0, 3.0, 1.0))


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([9.0, *[1.0] * 5], width=5) == "▁▁▁▁▁"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (123_456, "123 kB"),
        (15_220_000_000, "15.2 GB"),
        (2e15, "2000.0 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59.9, "59 s"), (125, "2 min 5 s"), (11_040, "3 h 4 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
