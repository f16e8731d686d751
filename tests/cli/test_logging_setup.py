import json
import logging

import pytest
import structlog
from structlog.typing import EventDict

from spheroid_node.cli.logging_setup import set_up_logging


def test_json_is_one_object_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json")
    structlog.get_logger().info("round.trained", round=3, loss=2.5)
    structlog.get_logger().debug("not.shown")
    out, err = capsys.readouterr()
    event = json.loads(err)
    assert out == "" and event.pop("timestamp").endswith("Z")
    assert event == {"event": "round.trained", "round": 3, "loss": 2.5, "level": "info"}


def test_json_keeps_a_traceback_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json")
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError:
        structlog.get_logger().exception("handler.failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: oh" in json.loads(line)["exception"]


def test_auto_is_plain_text_without_colour_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("auto")
    structlog.get_logger().warning("round.late", round=3)
    err = capsys.readouterr().err
    assert "round.late" in err and "round=3" in err and "\x1b" not in err


def test_a_listener_may_drop_events(capsys: pytest.CaptureFixture[str]) -> None:
    heard = []

    def listener(_logger: object, _method: str, event: EventDict) -> EventDict:
        heard.append(event["event"])
        raise structlog.DropEvent

    set_up_logging("json", listener=listener)
    structlog.get_logger().info("node.started")
    assert heard == ["node.started"] and capsys.readouterr().err == ""


def test_errors_of_libraries_come_through_and_chatter_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json")
    logging.getLogger("library").error("broken %s", "pipe")
    logging.getLogger("library").warning("chatter")
    event = json.loads(capsys.readouterr().err)
    assert (event["event"], event["source"], event["problem"]) == ("library.error", "library", "broken pipe")
