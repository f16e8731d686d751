import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spheroid_node import config
from spheroid_node.errors import ConfigInvalid, MalformedAddress, NoPeersKnown, SeveralRuns

PEER = "12D3KooWA1b2sZcF1uDmeVQ9GhQ2MkUgW8vE1bD8kz4VqT2yVLQe"
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"
OTHER = f"/ip4/127.0.0.1/tcp/31338/p2p/{PEER}"
RUN, OTHER_RUN = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "SPHEROID_RUNTIME_DIR": str(tmp_path / "runtime"),
    }


def write_config(environ: dict[str, str], text: str) -> Path:
    file = config.config_file(environ)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_defaults_need_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    settings = config.resolve({"port": None, "peers": ()}, environ=environ)
    assert settings.state_dir == tmp_path / "state" / "spheroid-node" / "node"
    assert (settings.port, settings.peers, settings.device) == (0, (), "auto")
    assert config.resolve({}, role="bootstrap", environ=environ).state_dir.name == "bootstrap"


def test_each_source_gives_way_to_the_one_before_it(environ: dict[str, str]) -> None:
    write_config(environ, f'port = 1\ndata_port = 1\nthreads = 1\npeers = ["{ADDRESS}"]')
    environ |= {"SPHEROID_DATA_PORT": "2", "SPHEROID_THREADS": "2"}
    settings = config.resolve({"threads": 3, "port": None}, environ=environ)
    assert (settings.port, settings.data_port, settings.threads) == (1, 2, 3)
    assert settings.peers == (ADDRESS,)


def test_the_announced_port_is_that_of_the_router(environ: dict[str, str]) -> None:
    assert config.resolve({"data_port": 5}, environ=environ).announce_data_port is None
    environ["SPHEROID_ANNOUNCE_DATA_PORT"] = "443"
    settings = config.resolve(
        {"data_port": 5, "announce": "203.0.113.7", "announce_port": 7}, environ=environ
    )
    assert (settings.data_port, settings.announce_data_port) == (5, 443)
    assert (settings.port, settings.announce_port) == (0, 7)


def test_zero_on_the_command_line_is_a_value(environ: dict[str, str]) -> None:
    environ["SPHEROID_PORT"] = "9"
    assert config.resolve({"port": 0}, environ=environ).port == 0


def test_lists_in_the_environment(environ: dict[str, str]) -> None:
    environ |= {"SPHEROID_PEERS": f"{ADDRESS}, {OTHER}", "SPHEROID_DATA": f"a b{os.pathsep}c"}
    settings = config.resolve({}, environ=environ)
    assert settings.peers == (ADDRESS, OTHER)
    assert settings.data == ("a b", "c")


@pytest.mark.parametrize(
    ("flags", "variables", "file", "source"),
    [
        ({"data_port": 70_000}, {}, "", "Option --data-port"),
        ({"announce_port": 31337}, {}, "", "Option --announce-port: it needs the address"),
        ({"announce_data_port": 0}, {}, "", "Option --announce-data-port"),
        ({}, {"SPHEROID_THREADS": "none"}, "", "Environment variable SPHEROID_THREADS"),
        ({}, {}, "device = 'tpu'", "config.toml, device"),
        ({}, {}, "prot = 1", "there is no setting 'prot'"),
        ({}, {}, "port = ", "config.toml"),
        ({"run": "nonsense"}, {}, "", "Option --run"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(
    environ: dict[str, str], flags: dict[str, object], variables: dict[str, str], file: str, source: str
) -> None:
    write_config(environ, file)
    with pytest.raises(ConfigInvalid, match=source):
        config.resolve(flags, environ=environ | variables)


def test_config_is_frozen(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.resolve({}, environ=environ).port = 5  # type: ignore[misc]


# --- peers ----------------------------------------------------------------------------------------


def peers(environ: dict[str, str], **flags: object) -> tuple[str, ...]:
    return config.with_peers(config.resolve(flags, environ=environ), environ).peers


def test_no_peers_anywhere(environ: dict[str, str]) -> None:
    with pytest.raises(NoPeersKnown, match=r"--peer.*SPHEROID_PEERS.*config file.*bootstrap"):
        peers(environ)


def test_a_bootstrap_here_is_found_while_it_runs(environ: dict[str, str]) -> None:
    directory = config.runtime_dir(environ)
    with config.address_left(directory, RUN, ADDRESS):
        assert peers(environ) == (ADDRESS,)
        assert peers(environ, run=RUN) == (ADDRESS,)
        assert peers(environ, peers=(OTHER,)) == (OTHER,)
        with pytest.raises(NoPeersKnown):
            peers(environ, run=OTHER_RUN)
    with pytest.raises(NoPeersKnown):
        peers(environ)
    assert list(directory.iterdir()) == []


def test_what_a_dead_bootstrap_left_is_ignored(environ: dict[str, str]) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    directory = config.runtime_dir(environ)
    directory.mkdir()
    left = {"address": ADDRESS, "run": RUN, "pid": dead.pid}
    (directory / f"bootstrap-{RUN}.json").write_text(json.dumps(left))
    (directory / f"bootstrap-{OTHER_RUN}.json").write_text("{")
    with pytest.raises(NoPeersKnown):
        peers(environ)


def test_bootstraps_of_several_runs_need_a_choice(environ: dict[str, str]) -> None:
    directory = config.runtime_dir(environ)
    with config.address_left(directory, RUN, ADDRESS), config.address_left(directory, OTHER_RUN, OTHER):
        with pytest.raises(SeveralRuns, match=f"{RUN}, {OTHER_RUN}"):
            peers(environ)
        assert peers(environ, run=OTHER_RUN) == (OTHER,)


def test_a_later_bootstrap_of_the_run_keeps_its_file(environ: dict[str, str]) -> None:
    directory = config.runtime_dir(environ)
    with config.address_left(directory, RUN, ADDRESS):
        (directory / f"bootstrap-{RUN}.json").write_text(
            json.dumps({"address": OTHER, "run": RUN, "pid": os.getpid()})
        )
    assert config.left_addresses(directory) == {RUN: OTHER}


def test_a_runtime_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with config.address_left(tmp_path / "file" / "runtime", RUN, ADDRESS):
        assert config.left_addresses(tmp_path / "file" / "runtime") == {}


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["ip4/203.0.113.7", "ip6/2001:db8::1", "dns4/seed.example.org"])
def test_good_addresses(host: str) -> None:
    config.check_address(f"/{host}/tcp/31337/p2p/{PEER}")


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("seed.example.org:31337", "must begin with /"),
        ("/ip4/127.0.0.1/tcp/31337", "its form is"),
        (f"/ip4/127.0.0.1/udp/31337/p2p/{PEER}", "its form is"),
        (f"/ip4/127.0.0.256/tcp/31337/p2p/{PEER}", "not an address of kind ip4"),
        (f"/ip6/127.0.0.1/tcp/31337/p2p/{PEER}", "not an address of kind ip6"),
        (f"/onion/abc/tcp/31337/p2p/{PEER}", "none of ip4"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", "not a port"),
        (f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}", "not a port"),
        ("/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWlO0", "not a peer id"),
        (f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER[:-4]}", "not a peer id"),
    ],
)
def test_malformed_addresses_say_why(environ: dict[str, str], address: str, cause: str) -> None:
    with pytest.raises(MalformedAddress, match=cause):
        config.resolve({"peers": (address,)}, environ=environ)
