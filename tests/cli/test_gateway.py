"""``gateway`` on the command line."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from click.testing import CliRunner

from spheroid_node.cli.gateway import command
from spheroid_node.errors import ExtraMissing, PortInUse
from spheroid_node.net.ports import listening_socket


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn", "sse_starlette"])
def test_without_the_extra_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "spheroid_node.gateway.serve":
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ExtraMissing)
    assert "pip install 'spheroid-node[gateway]'" in str(result.exception)


def test_a_port_in_use_is_told_before_any_peer_is_looked_for() -> None:
    with listening_socket("127.0.0.1", 0, "--port") as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(command, ["--port", port, "--peer", PEER])
    assert isinstance(result.exception, PortInUse) and f"Port {port} " in str(result.exception)


PEER = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
