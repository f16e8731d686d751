"""The rooms of the package: arrows point down only, and model, rounds and wire are pure."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spheroid_node"
PURE = ("model", "rounds", "wire")

CLOCKS_FILES_AND_CHANCE = {
    "asyncio", "datetime", "fileinput", "getpass", "glob", "io", "multiprocessing", "os", "pathlib",
    "platform", "random", "secrets", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile",
    "threading", "time", "uuid",
}  # fmt: skip
CALLS = {"open", "input", "print", "__import__", "exec", "eval"}
GLOBAL_RANDOMNESS = {
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "manual_seed", "seed",
    "shuffle",
    "standard_normal", "uniform", "choice", "default_rng", "rand_like", "randn_like", "set_rng_state",
}  # fmt: skip
ALLOWED = {"model/__init__.py: pathlib"}
"""``model.load``: what users call for an exported model, and the one function here that reads a file."""


def impurities(source: str) -> Iterator[str]:
    """Imports and calls through which a clock, a file, the environment or hidden chance could come in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        yield from (module for module in modules if module.split(".")[0] in CLOCKS_FILES_AND_CHANCE)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"{node.func.id}()"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if (
                owner in ("torch", "np.random", "numpy.random", "random")
                and node.func.attr in GLOBAL_RANDOMNESS
            ):
                yield f"{owner}.{node.func.attr}()"
            if owner in ("torch", "np", "numpy") and node.func.attr in (
                "load",
                "save",
                "fromfile",
                "loadtxt",
            ):
                yield f"{owner}.{node.func.attr}()"


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_read_no_clock_file_or_environment(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {impurity}"
        for path in files
        for impurity in impurities(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED == set()


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from pathlib import Path",
        "def f():\n    import random",
        "from time import monotonic",
        "open('file')",
        "np.random.normal(3)",
        "torch.randn(3)",
        "np.load('file')",
    ],
)
def test_the_purity_test_sees(source: str) -> None:
    assert list(impurities(source))


def test_every_room_is_in_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = {layer.removeprefix("spheroid_node.") for layer in contracts["contracts"][0]["layers"]}
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert layers == rooms | modules


def test_arrows_point_down_only(capsys: pytest.CaptureFixture[str]) -> None:
    broken = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert not broken, capsys.readouterr().out
