"""NodeConfig: what one machine decides for itself, resolved once before anything starts.

A setting comes from the command line, else from ``SPHEROID_*`` in the environment, else from the config
file, else it has its default. What all nodes of a run must agree on is in run.py.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import base58
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from spheroid_node.errors import ConfigInvalid, MalformedAddress, NoPeersKnown, SeveralRuns

APPLICATION = "spheroid-node"
LOOPBACK = "127.0.0.1"
RUNTIME_DIR = "SPHEROID_RUNTIME_DIR"
"""Environment variable that overrides where bootstraps leave their addresses."""

Port = Annotated[int, Field(ge=0, le=65_535)]
Paths = tuple[Annotated[str, Field(min_length=1)], ...]


class NodeConfig(BaseModel):
    """Settings of one process. Frozen; made by :func:`resolve`, or directly in tests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path
    """Where a node keeps its key, versions and optimiser state; one node a directory."""
    peers: tuple[str, ...] = ()
    """Multiaddresses of peers to enter the DHT through."""
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """Run id; None where the peers publish only one run."""
    host: Annotated[str, Field(min_length=1, max_length=255)] = "0.0.0.0"
    """Address to listen on."""
    announce: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Address that other peers should dial, where it differs from ``host``."""
    relay: bool = False
    """Others cannot dial this machine: be reached through nodes that they can dial."""
    port: Port = 0
    """TCP port of the DHT; 0 is any free one."""
    announce_port: Annotated[int, Field(gt=0, le=65_535)] | None = None
    """Port that other peers should dial for it, where it differs from ``port``; with ``announce``."""
    data_port: Port = 0
    """TCP port of updates, versions and prompts; 0 is any free one."""
    announce_data_port: Annotated[int, Field(gt=0, le=65_535)] | None = None
    """Port that other peers should dial for them, where it differs from ``data_port``."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """What matrices are multiplied in when training; auto: bf16 where the device is faster with it."""
    compile: bool = False
    """Have torch.compile translate the training step: needs a C++ compiler, and a minute at the start."""
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """CPU threads of the trainer; None: ``OMP_NUM_THREADS``, else all cores."""
    cache_mb: Annotated[int, Field(gt=0)] = 1024
    """Memory for the key/value caches of the texts that this node serves, MB."""
    data: Paths = ()
    """Files and folders of training text."""
    held_out: Paths = ()
    """Files and folders of text that is measured on and never trained on."""
    log_format: Literal["auto", "console", "json"] = "auto"

    @field_validator("announce_port")
    @classmethod
    def _has_an_address(cls, port: int | None, fields: ValidationInfo) -> int | None:
        # libp2p finds out addresses of its own, and all of them have the port that it listens on.
        if port is not None and fields.data.get("announce") is None:
            raise ValueError("it needs the address as well: give announce")
        return port


# --- resolving ------------------------------------------------------------------------------------

_SEPARATORS = {"peers": r"[\s,]+", "data": re.escape(os.pathsep), "held_out": re.escape(os.pathsep)}
"""Settings that hold several values, and what separates these in an environment variable."""


def resolve(
    flags: Mapping[str, Any], *, role: str = "node", environ: Mapping[str, str] = os.environ
) -> NodeConfig:
    """All settings of this process; ``flags`` of None or () were not given on the command line.

    ``role`` names the default state directory. Raises :class:`ConfigInvalid`, which names the source of the
    wrong value, and :class:`MalformedAddress`.
    """
    file = config_file(environ)
    layers = (
        ("the default state directory", {"state_dir": state_home(environ) / role}),
        (f"Config file {file}", _from_file(file)),
        ("Environment", _from_environment(environ)),
        ("Command line", {name: value for name, value in flags.items() if value not in (None, ())}),
    )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        values |= layer
        sources |= dict.fromkeys(layer, source)
    try:
        config = NodeConfig.model_validate(values)
    except ValidationError as error:
        complaint = error.errors()[0]
        name = str(complaint["loc"][0])
        raise ConfigInvalid(_named(sources[name], name), _reason(complaint["msg"])) from error
    for address in config.peers:
        check_address(address)
    return config.model_copy(update={"state_dir": config.state_dir.expanduser().absolute()})


def with_peers(config: NodeConfig, environ: Mapping[str, str] = os.environ) -> NodeConfig:
    """``config`` with peers to enter through: its own, else what a bootstrap on this machine left.

    Raises :class:`NoPeersKnown`, or :class:`SeveralRuns` where bootstraps of several runs are here and
    ``config.run`` names none.
    """
    if config.peers:
        return config
    left = left_addresses(runtime_dir(environ))
    if config.run is not None:
        left = {run: address for run, address in left.items() if run == config.run}
    if not left:
        raise NoPeersKnown
    if len(left) > 1:
        raise SeveralRuns(sorted(left))
    return config.model_copy(update={"peers": tuple(left.values())})


def _from_file(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigInvalid(f"Config file {path}", error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"Config file {path}", str(error)) from error
    for name in settings:
        if name not in NodeConfig.model_fields:
            raise ConfigInvalid(f"Config file {path}", f"there is no setting {name!r}")
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in NodeConfig.model_fields:
        value = environ.get(f"SPHEROID_{name.upper()}", "").strip()
        if value:
            separator = _SEPARATORS.get(name)
            settings[name] = tuple(filter(None, re.split(separator, value))) if separator else value
    return settings


def _named(source: str, name: str) -> str:
    if source == "Environment":
        return f"Environment variable SPHEROID_{name.upper()}"
    if source == "Command line":
        return f"Option --{name.replace('_', '-')}"
    return f"{source}, {name}"


def _reason(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


# --- places ---------------------------------------------------------------------------------------


def config_file(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CONFIG_HOME/spheroid-node/config.toml``; it need not exist."""
    home = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / APPLICATION / "config.toml"


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/spheroid-node``: parent of the default state directories."""
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / APPLICATION


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where bootstraps on this machine leave their addresses for other processes of the same user."""
    if chosen := environ.get(RUNTIME_DIR):
        return Path(chosen)
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / APPLICATION
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"{APPLICATION}-{user}"


@contextmanager
def address_left(directory: Path, run: str, address: str) -> Iterator[None]:
    """While open, other processes of this user find ``address`` in ``directory``.

    A directory that cannot be written only means that peers must be given by hand, so that is no error.
    """
    file = directory / f"bootstrap-{run}.json"
    content = json.dumps({"address": address, "run": run, "pid": os.getpid()})
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text(encoding="utf-8") == content:  # a later bootstrap of the run may own it now
                file.unlink()


def left_addresses(directory: Path) -> dict[str, str]:
    """Run id → address of every bootstrap of this user that is alive on this machine."""
    found: dict[str, str] = {}
    with suppress(OSError):
        # In a shared temporary folder somebody else could have made the directory to lead us astray.
        if hasattr(os, "getuid") and directory.stat().st_uid != os.getuid():
            return {}
        for file in sorted(directory.glob("bootstrap-*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                left = json.loads(file.read_text(encoding="utf-8"))
                if _is_alive(int(left["pid"])):
                    found[str(left["run"])] = str(left["address"])
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- addresses ------------------------------------------------------------------------------------


def check_address(address: str) -> None:
    """Raise :class:`MalformedAddress` unless ``address`` is a TCP multiaddress that ends in a peer id."""
    if not address.startswith("/"):
        raise MalformedAddress(address, "it must begin with /")
    parts = address[1:].split("/")
    if len(parts) != 6 or parts[2] != "tcp" or parts[4] != "p2p":
        raise MalformedAddress(address, "its form is /ip4/HOST/tcp/PORT/p2p/PEER")
    kind, host, _, port, _, peer = parts
    if kind in ("ip4", "ip6"):
        try:
            if f"ip{ip_address(host).version}" != kind:
                raise ValueError(host)
        except ValueError:
            raise MalformedAddress(address, f"{host!r} is not an address of kind {kind}") from None
    elif kind not in ("dns", "dns4", "dns6") or not host:
        raise MalformedAddress(address, f"{kind!r} is none of ip4, ip6, dns, dns4, dns6")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise MalformedAddress(address, f"{port!r} is not a port")
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        raw = b""
    if len(raw) not in (34, 38):  # SHA-256 of a long key, or an Ed25519 key itself
        raise MalformedAddress(address, f"{peer!r} is not a peer id")
