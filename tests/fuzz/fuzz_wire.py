"""Has atheris look for bytes that a target does not stand. By hand, for as long as one likes:

    pip install atheris
    python tests/fuzz/fuzz_wire.py TARGET [-runs=1000000] [-max_total_time=600] [CORPUS]

TARGET is one of tests/fuzz/targets.py. The process may not grow past its limit, nor an input take long: a
length that is believed before the bytes are there shows as either. It begins with random inputs: one that
is used up makes no more choices, and of short ones libFuzzer finds longer ones slowly.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from random import Random

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["spheroid_node", "tests.fuzz"]):
    from tests.fuzz.source import Source
    from tests.fuzz.targets import TARGETS, quiet

LIMITS = ["-timeout=20", "-max_len=1024", "-len_control=0", "-rss_limit_mb=2048"]
SEEDS = 200
GROWTH = 512 * 1024 * 1024
"""Bytes of address space that a process may get beyond what it begins with."""

if __name__ == "__main__":
    name, arguments = sys.argv[1], sys.argv[2:]
    target = TARGETS[name]

    def one(data: bytes) -> None:
        target(Source(data))

    quiet()
    one(b"")
    if all(argument.startswith("-") for argument in arguments):
        arguments.append(tempfile.mkdtemp(prefix="corpus-"))
    folder = Path(next(argument for argument in arguments if not argument.startswith("-")))
    for seed in range(SEEDS):
        (folder / f"random-{seed}").write_bytes(Random(seed).randbytes(400))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GROWTH,) * 2)
    atheris.Setup([sys.argv[0], *LIMITS, *arguments], one)
    atheris.Fuzz()
