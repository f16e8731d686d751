"""Options that several commands share, so that each is named and explained once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]


def combine(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator of several, in the order in which ``--help`` lists them."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


peer_options = combine(
    click.option(
        "--peer",
        "peers",
        multiple=True,
        metavar="ADDRESS",
        help="Peer to enter through, as `bootstrap` printed it; may be given several times.",
    ),
    click.option("--run", metavar="ID", help="Run id, where the peers know several runs."),
)

text_options = combine(
    click.option(
        "--data",
        multiple=True,
        metavar="PATH",
        help="File or folder of training text, or wikitext-2; may be given several times.",
    ),
    click.option(
        "--held-out",
        multiple=True,
        metavar="PATH",
        help="File or folder of text to measure on, never trained on. Default: the end of the training text.",
    ),
)

state_option = click.option(
    "--state-dir", metavar="DIR", help="Where this node keeps its key and versions; one node a directory."
)

listen_options = combine(
    click.option("--host", metavar="HOST", help="Address to listen on. Default: 0.0.0.0, all of them."),
    click.option(
        "--announce", metavar="HOST", help="Address others should dial, where it differs from --host."
    ),
    click.option("--port", type=int, metavar="N", help="TCP port of the DHT. Default: any free one."),
    click.option(
        "--announce-port",
        type=int,
        metavar="N",
        help="Port others should dial, where a router forwards another one to --port; with --announce.",
    ),
)

device_option = click.option(
    "--device", metavar="auto|cpu|cuda|mps", help="Where to compute. Default: auto, the fastest there is."
)

speed_options = combine(
    click.option("--threads", type=int, metavar="N", help="CPU threads of the trainer."),
    click.option(
        "--precision",
        metavar="auto|float32|bf16",
        help="What the trainer multiplies matrices in. Default: auto, bf16 where that is faster.",
    ),
    click.option(
        "--compile",
        is_flag=True,
        default=None,
        help="Translate the training step with torch.compile: a minute at the start, faster steps after it.",
    ),
)

log_option = click.option(
    "--log-format", metavar="auto|console|json", help="How log lines look. Default: auto, for people."
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def block_choice(_ctx: click.Context, _option: click.Parameter, value: str) -> int | None:
    """Callback of ``--block``: an index, or None for ``auto``."""
    if value == "auto":
        return None
    try:
        return int(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither the number of a block nor auto") from error
