import pytest
import structlog

from spheroid_node.cli.status_line import StatusLine

EVENTS = [
    {"event": "node.started", "level": "info", "block": 2, "peer": "12D3", "run": "00"},
    {"event": "round.evaluated", "level": "info", "round": 7, "ce": [3.0, 2.5, 2.25], "block": 2},
    {"event": "round.trained", "level": "info", "round": 7, "loss": 2.4, "tokens_per_second": 4321.0},
    {"event": "round.receipt", "level": "info", "round": 7, "group": "block-2", "verdict": "accepted"},
    {"event": "round.receipt", "level": "info", "round": 7, "group": "interface", "verdict": "late"},
    {"event": "round.version", "level": "info", "round": 7, "group": "block-2", "version": 8},
    {"event": "round.version", "level": "info", "round": 7, "group": "interface", "version": 99},
    {"event": "node.traffic", "level": "info", "bytes_in": 1_000_000, "bytes_out": 2000},
]


def test_the_line_follows_the_events() -> None:
    line = StatusLine(shown=False)
    assert line.text() == "starting"
    for event in EVENTS:
        assert line.hear(None, "info", dict(event)) == event
    assert line.text() == (
        "block 2 · round 7 · version 8 · CE 2.250 · loss 2.400 · 4,321 tokens/s · "
        "1 accepted, 1 late · 1.0 MB in, 2.0 kB out"
    )


def test_routine_only_changes_the_line_and_the_rest_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine(shown=True) as line:
        with pytest.raises(structlog.DropEvent):
            line.hear(None, "info", {"event": "round.trained", "level": "info", "round": 1})
        for name, level in (("node.started", "info"), ("round.trained", "warning")):
            event = {"event": name, "level": level}
            assert line.hear(None, level, dict(event)) == event


def test_after_leaving_begins_everything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    routine = {"event": "round.trained", "level": "info", "round": 1}
    with StatusLine(shown=True) as line:
        line.hear(None, "info", {"event": "node.leaving", "level": "info"})
        assert line.hear(None, "info", dict(routine)) == routine
