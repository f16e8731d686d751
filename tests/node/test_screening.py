"""What an aggregator makes of its trainer's answers about an update."""

from __future__ import annotations

from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from spheroid_node.errors import TrainerFailed
from spheroid_node.node import screening
from spheroid_node.node.screening import TrainerScreening
from spheroid_node.training.trainer_protocol import Screen
from spheroid_node.wire.messages import Message, UpdateHeader

HEADER = UpdateHeader(
    run="0" * 16, group="block-0", round=7, base=4, base_digest=bytes(32), nonce=bytes(16), steps=1, tokens=8,
    norm=1.0, dtype="fp16", elements=2, digest=bytes(32),
)  # fmt: skip


class Answering:
    """Gives its answers in turn, the last one again and again."""

    def __init__(self, *answers: dict[str, Any] | TrainerFailed) -> None:
        self._answers = list(answers)
        self.asked: list[Message] = []

    async def request(self, request: Message, timeout: float) -> dict[str, Any]:
        self.asked.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, TrainerFailed):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "POLL_SECONDS", 0.01)


async def worse_by(trainer: Answering) -> float | None:
    return await TrainerScreening(cast(Any, trainer), 16).worse_by(HEADER, b"1234", 0.5)


@pytest.mark.parametrize("found", [-0.5, 0.25, None])
async def test_it_is_what_the_trainer_finds(found: float | None) -> None:
    trainer = Answering({"loaded": True, "worse_by": found})
    assert await worse_by(trainer) == found
    assert trainer.asked == [
        Screen(group="block-0", version=4, payload=b"1234", dtype="fp16", scale=0.5, windows=16)
    ]


async def test_a_trainer_that_has_not_got_the_base_yet_is_waited_for() -> None:
    later = {"loaded": True, "worse_by": 1.0}
    assert await worse_by(Answering({"loaded": False}, {"loaded": False}, later)) == 1.0


@pytest.mark.parametrize("answer", [{"loaded": False}, TrainerFailed("it is dead")])
async def test_without_an_answer_in_time_nobody_can_tell(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | TrainerFailed
) -> None:
    monkeypatch.setattr(screening, "LOADING_SECONDS", 0.05)
    with capture_logs() as logs:
        assert await worse_by(Answering(answer)) is None
    assert [entry["event"] for entry in logs] == ["round.not_screened"]
