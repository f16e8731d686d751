"""A disk that is full: a small file system in memory where that may be mounted."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from spheroid_node.node.disk import Disk
from spheroid_node.node.outbox import Outbox
from spheroid_node.node.report import Report
from spheroid_node.node.versions import VersionStore
from spheroid_node.rounds.contribution import Contributor
from spheroid_node.run import RunSpec

from .conftest import World
from .test_round import peers, ranked, submission
from .test_versions import GROUP as HELD
from .test_versions import made

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return filler


def test_a_full_disk_is_told_once_and_written_to_again_when_there_is_room(run: RunSpec, small: Path) -> None:
    disk = Disk()
    store = VersionStore(run, lambda group: small / "versions" / group, disk)
    outbox, contributor = Outbox(run, small / "outbox", disk), Contributor(run, HELD, 1000)
    vector = store.newest(HELD).vector
    store.adopt(made(run, 1, vector + 1))
    outbox.save(HELD, contributor.kept(), 1)
    assert disk.note == ""
    filler = fill(small)
    with capture_logs() as logs:
        for version in (2, 3, 4):
            store.adopt(made(run, version, vector + version))
            outbox.save(HELD, contributor.kept(), version)
            store.write_again()
    assert [(entry["event"], entry["what"]) for entry in logs] == [
        ("disk.not_written", "versions"),
        ("disk.not_written", "what was learnt"),
    ]
    assert all("free some room" in entry["remedy"] for entry in logs)
    assert disk.note == "versions, what was learnt not on disk: no space left on device"
    assert store.listing(HELD, -1).version == 4, "it is served from memory"  # type: ignore[union-attr]
    assert VersionStore(run, lambda group: small / "versions" / group).newest(HELD).version == 1
    assert not any(small.rglob(".*")), "nothing half written is left"

    filler.unlink()
    with capture_logs() as logs:
        store.write_again()
        outbox.save(HELD, contributor.kept(), 5)
    assert [entry["event"] for entry in logs] == ["disk.written_again"] * 2
    assert disk.note == ""
    assert VersionStore(run, lambda group: small / "versions" / group).newest(HELD).version == 4
    assert not store.unwritten


async def test_an_aggregator_without_room_sends_its_workers_to_the_next(world: World, tmp_path: Path) -> None:
    async with peers(world, tmp_path, (0, 0, 0)) as members:
        by_name = {peer.id: peer for peer in members}
        leader, successor, worker = (by_name[name] for name in ranked(world))

        class NoRoom:
            def write(self, data: bytes) -> None:
                raise FULL

            def close(self) -> None: ...

        leader.collector._arrivals._spooled = cast(Any, NoRoom)
        delivery = await worker.submitter.deliver(submission(worker, 1.0), ranked(world), world.records)
        assert delivery is not None and delivery.aggregator == successor.id
        assert "updates of others" in leader.store.disk.note


def test_what_is_wrong_with_the_machine_stands_before_what_its_work_says() -> None:
    report: Any = Report(0, "cpu")
    report.note = "late in 2 rounds in a row"
    report.of_machine(clock="clock 600 s slow", disk="")
    assert report.all_notes == "clock 600 s slow; late in 2 rounds in a row"
    assert report.changed.is_set()
    report.changed.clear()
    report.of_machine(clock="clock 600 s slow", disk="")
    assert not report.changed.is_set(), "nothing is new"
    report.of_machine(clock="")
    assert report.all_notes == "late in 2 rounds in a row"
