"""Every error a user can meet, each with what to do next.

The command line prints ``str(error)`` as one line and leaves with ``error.exit_code``:
2 is wrong input, 3 is a network that cannot be reached, 4 is a generation that ended early.
"""

from __future__ import annotations

from collections.abc import Iterable


class SpheroidError(Exception):
    """A problem and its remedy, both in words for the person at the terminal."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}.")
        self.problem = problem
        self.remedy = remedy


class UsageError(SpheroidError):
    """The input is wrong and trying again unchanged cannot help."""

    exit_code = 2


class NetworkError(SpheroidError):
    """Something on the network is not there; trying again later may help."""

    exit_code = 3


class GenerationEndedEarly(SpheroidError):
    """The chain was lost and could not be replaced; the text so far was printed."""

    exit_code = 4

    def __init__(self, problem: str, produced: int) -> None:
        super().__init__(
            f"Generation ended after {produced} bytes: {problem}", "Try again, or see `spheroid-node status`"
        )


# --- finding the swarm ---------------------------------------------------------------------------


class NoPeersKnown(UsageError):
    def __init__(self) -> None:
        super().__init__(
            "No peers are known",
            "Give one with --peer, in SPHEROID_PEERS, as `peers` in the config file, or start "
            "`spheroid-node bootstrap` on this machine",
        )


class MalformedAddress(UsageError):
    def __init__(self, address: str, cause: str) -> None:
        super().__init__(
            f"{address!r} is not a peer address: {cause}",
            "An address looks like /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo…; copy the line that "
            "`spheroid-node bootstrap` printed",
        )


class PeersUnreachable(NetworkError):
    def __init__(self, addresses: Iterable[str], cause: str) -> None:
        super().__init__(
            f"No bootstrap peer answered at {', '.join(addresses)} ({cause})",
            "Check the address, that the bootstrap runs, and that no firewall is between",
        )


class PortInUse(UsageError):
    def __init__(self, port: int, option: str) -> None:
        super().__init__(
            f"Port {port} is already in use on this machine",
            f"Choose another with {option}, for example {option} {port + 1 if port < 65535 else 0}, "
            f"or {option} 0 for any free one",
        )


class DhtFailed(NetworkError):
    def __init__(self, cause: str) -> None:
        super().__init__(f"The DHT did not start: {cause}", "Try again; if it fails again, report it")


class ClockWrong(UsageError):
    def __init__(self, cause: str) -> None:
        super().__init__(
            f"The clocks of this machine and of its peers differ too much: {cause}",
            "Set the clock of this machine, for example with NTP",
        )


class NotReachable(NetworkError):
    def __init__(self, port: int) -> None:
        super().__init__(
            f"Other peers cannot reach this node on port {port}",
            f"Open TCP port {port} in the firewall, and give the address that others see with --announce; "
            "or join with --relay, and be reached through other nodes",
        )


class RunNotFound(NetworkError):
    def __init__(self, run_id: str | None) -> None:
        what = f"run {run_id}" if run_id else "any run"
        super().__init__(
            f"The peers that answered do not know {what}",
            "Check --run against what `spheroid-node bootstrap` printed",
        )


class SeveralRuns(UsageError):
    def __init__(self, run_ids: Iterable[str]) -> None:
        super().__init__(f"These peers publish several runs: {', '.join(run_ids)}", "Choose one with --run")


class RunMismatch(UsageError):
    def __init__(self, ours: str, theirs: str, where: str) -> None:
        super().__init__(
            f"{where} belongs to run {theirs}, not to run {ours}",
            "Use another --state-dir, or join the run it belongs to",
        )


class NotAllowed(UsageError):
    def __init__(self, run_id: str, peer: str) -> None:
        super().__init__(
            f"Run {run_id} is open to listed peers only, and {peer} is not on its list",
            "Ask the operator of the run to add this peer id",
        )


# --- the run and its data ------------------------------------------------------------------------


class RunFileInvalid(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"Run file {path}: {cause}", "Mend it; bootstrap/runs/ in the source tree holds working examples"
        )


class NoSuchBlock(UsageError):
    def __init__(self, block: int, blocks: int) -> None:
        super().__init__(
            f"There is no block {block}: this run has {blocks} blocks, 0 to {blocks - 1}",
            "Choose one of them, or --block auto",
        )


class NoBlockFits(UsageError):
    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"No block of this run fits this machine: the smallest needs {needed / 1e9:.1f} GB to train, "
            f"{free / 1e9:.1f} GB are free",
            "Free memory, use another --device, or join a run with smaller blocks (spheroid-node plan)",
        )


class BlockWithoutReplica(NetworkError):
    def __init__(self, blocks: Iterable[int]) -> None:
        names = ", ".join(str(block) for block in blocks)
        first = names.split(",")[0]
        super().__init__(
            f"No live replica of block {names}",
            f"Start one with `spheroid-node join --block {first}`, or wait",
        )


class DataMissing(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"No training text at {path}: {cause}", "Give files or folders of UTF-8 text with --data"
        )


class DataTooShort(UsageError):
    def __init__(self, name: str, size: int, needed: int) -> None:
        super().__init__(
            f"The {name} text has {size} bytes; a window of this run needs at least {needed}",
            "Give more text with --data",
        )


class DataMismatch(UsageError):
    def __init__(self, name: str, ours: str, theirs: str) -> None:
        super().__init__(
            f"The training text is not the run's {name}: SHA-256 {ours}, the run names {theirs}",
            "Give the run's own text with --data",
        )


class DataUnavailable(UsageError):
    def __init__(self, name: str, cause: str) -> None:
        super().__init__(
            f"The text {name!r} cannot be had here: {cause}",
            "Give files or folders of text with --data instead",
        )


# --- this machine --------------------------------------------------------------------------------


class ConfigInvalid(UsageError):
    def __init__(self, source: str, cause: str) -> None:
        super().__init__(f"{source}: {cause}", "Mend the setting or remove it; docs/quickstart.md lists them")


class StateInUse(UsageError):
    def __init__(self, path: str, holder: str) -> None:
        super().__init__(
            f"State directory {path} is in use by {holder}",
            "Stop that node first, or choose another with --state-dir",
        )


class StateUnwritable(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"State directory {path} cannot be used: {cause}", "Mend that, or choose another with --state-dir"
        )


class IdentityInvalid(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"The identity file {path} cannot be used: {cause}",
            "Restore it from a backup, or remove it to become a new peer",
        )


class IdentityCopied(UsageError):
    def __init__(self, path: str, peer: str) -> None:
        super().__init__(
            f"Another live node uses the identity {peer}",
            f"Remove {path} on one of the two machines; it gets a new identity at its next start",
        )


class DeviceUnavailable(UsageError):
    def __init__(self, device: str, available: Iterable[str]) -> None:
        super().__init__(
            f"Device {device!r} is not available on this machine",
            f"Choose one of: {', '.join(available)}",
        )


class PrecisionUnavailable(UsageError):
    def __init__(self, device: str) -> None:
        super().__init__(
            f"The device {device} has no arithmetic for bfloat16",
            "Leave out --precision, or choose float32",
        )


class TrainerFailed(SpheroidError):
    def __init__(self, cause: str) -> None:
        super().__init__(
            f"The trainer process failed: {cause}",
            "See its last lines in the log, and this machine's memory; a node that is up starts another",
        )


class ExtraMissing(UsageError):
    def __init__(self, extra: str, package: str) -> None:
        super().__init__(
            f"This command needs the package {package}",
            f"Install it with: pip install 'spheroid-node[{extra}]'",
        )


class TransferFailed(NetworkError):
    """No holder could give all of a version."""

    def __init__(self, group: str, version: int, causes: Iterable[str]) -> None:
        name = f"version {version}" if version >= 0 else "the newest version"
        super().__init__(
            f"No peer could give {name} of {group}: {'; '.join(causes) or 'no holder is known'}",
            "Wait for a replica to come back; the node tries again",
        )


# --- prompts and models --------------------------------------------------------------------------


class PromptInvalid(UsageError):
    def __init__(self, cause: str) -> None:
        super().__init__(f"The prompt {cause}", "Give UTF-8 text of at least one byte and at most one window")


class ModelInvalid(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"No model could be loaded from {path}: {cause}",
            "Give a directory written by `spheroid-node export`",
        )


class CheckpointInvalid(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"The stored file {path} cannot be used: {cause}",
            "It is left aside; versions come from other replicas, and what only this file held is lost",
        )


class OutputUnwritable(UsageError):
    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"Cannot write {path}: {cause}", "Choose another place, or free some room")


class ChainFailed(NetworkError):
    def __init__(self, cause: str) -> None:
        super().__init__(
            f"The chain of blocks failed: {cause}", "Try again; `spheroid-node status` shows the swarm"
        )


class DemoFailed(SpheroidError):
    def __init__(self, problem: str, logs: str) -> None:
        super().__init__(f"The demo ended: {problem}", f"The logs of its processes are in {logs}")
