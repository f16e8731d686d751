"""Where log lines go and how they look: JSON, plain text, or lines above a live status.

Logs go to stderr; stdout is for what a command was asked for.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "console", "json"]


def set_up_logging(
    log_format: LogFormat, *, level: int = logging.INFO, listener: Processor | None = None
) -> None:
    """Configure structlog and quieten the libraries; call once, before anything heavy is imported.

    Commands that are no daemons take ``level`` WARNING: their answer is on stdout.
    ``listener`` sees every event before it is rendered and may drop it (structlog.DropEvent).
    ``auto`` is plain text, in colour on a terminal.
    """
    # hivemind reads these when it is imported, and writes to stderr by itself; what matters of what it
    # says reaches users through our own errors.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    logging.basicConfig(level=logging.ERROR, handlers=[_ToStructlog()], force=True)
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        *([listener] if listener else []),
        *_renderers(log_format),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_StderrLoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _renderers(log_format: LogFormat) -> list[Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [
        _short_time,
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ,
            pad_event_to=18,
            sort_keys=False,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _short_time(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A person reads the log on the day; the date would only push the line out of the window."""
    event["timestamp"] = str(event["timestamp"])[11:19]
    return event


class _StderrLoggerFactory:
    """Looks stderr up at each line: a live display replaces it while it is on the screen."""

    def __call__(self, *_args: Any) -> structlog.PrintLogger:
        return structlog.PrintLogger(sys.stderr)


class _ToStructlog(logging.Handler):
    """Errors of libraries that use the standard logging module."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().error("library.error", source=record.name, problem=record.getMessage())
