"""The ``spheroid-node`` command: finds the command's file, and turns every error into one line.

Nothing here may import torch or hivemind: ``--help`` answers at once because only the command that is
asked for is imported, and its heavy imports wait until it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from spheroid_node.cli.parent import die_with_parent
from spheroid_node.config import state_home
from spheroid_node.errors import SpheroidError

COMMANDS = {
    "bootstrap": "Publish a run and be the peer that others enter its swarm through.",
    "join": "Own a replica of a block: train it, share it, serve it.",
    "generate": "Write on from a prompt, through the chain of blocks.",
    "status": "Show who is in the swarm and how it learns.",
    "eval": "Measure the swarm's model, or an exported one, on held-out text.",
    "export": "Write the swarm's model to a directory.",
    "demo": "Run a whole swarm on this machine, train it, and let it speak.",
    "plan": "Say what owning a block asks of a machine.",
    "simulate": "Run a swarm in virtual time.",
    "bench": "Measure how this machine serves shapes of any size.",
    "gateway": "Serve the swarm over HTTP.",
}
"""Command → its line in ``--help``; here so that the list needs no command's file."""

INTERRUPTED = 130
CRASHED = 1


class LazyCommands(click.Group):
    """Imports ``spheroid_node.cli.NAME`` when the command NAME is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"spheroid_node.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="spheroid-node", prog_name="spheroid-node")
def group() -> None:
    """Train and serve one language model together, a block a machine."""


def main() -> None:
    """Entry point of the console script."""
    die_with_parent()
    exit_code = run(sys.argv[1:])
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Everything is closed by now. Python would go on to take torch and hivemind apart piece by piece, which
    # costs seconds on a busy machine, and a user who has pressed Ctrl-C waits for it.
    os._exit(exit_code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; problems go to stderr as one line."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries, and no user can act on them
    try:
        outcome = group.main(args=list(arguments), prog_name="spheroid-node", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "spheroid-node"
        return _complain(f"{error.format_message().rstrip('.')}. See `{path} --help`.", error.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except SpheroidError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        where = _write_crash_log()
        kind = type(error).__name__
        return _complain(f"{kind}: {error}. This is a bug; the traceback is in {where}.", CRASHED)


def _complain(message: str, exit_code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return exit_code


def _write_crash_log() -> str:
    """Write the current exception to a file of its own and return its path."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for directory in (state_home(), Path(tempfile.gettempdir())):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(f"{sys.argv}\n{traceback.format_exc()}", encoding="utf-8")
        except OSError:
            continue
        return str(directory / name)
    return "no file, as none could be written"
