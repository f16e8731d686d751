"""Choices drawn from bytes, so that hypothesis and atheris can both steer what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
ODD = (0, 1, 2, 15, 16, 31, 32, 127, 128, 255)
"""Bytes that begin, or end, something in msgpack, JSON or a frame's length."""


class Source:
    """Reads choices from ``data``; once it is used up, every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def bytes(self, count: int) -> bytes:
        """Up to ``count`` bytes."""
        taken = self._data[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        return self.bytes(len(self._data))

    def below(self, limit: int) -> int:
        """A number from 0 to ``limit`` − 1."""
        size = max(1, (limit - 1).bit_length() + 7 >> 3)
        return int.from_bytes(self.bytes(size), "big") % limit

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def mutated(self, valid: bytes) -> bytes:
        """``valid`` with up to four changes; sometimes none, sometimes nothing of it is left."""
        changed = bytearray(valid)
        for _ in range(self.below(5)):
            at, kind = self.below(len(changed) + 1), self.below(7)
            if kind == 0 and at < len(changed):
                changed[at] ^= 1 << self.below(8)
            elif kind == 1 and at < len(changed):
                changed[at] = self.pick(ODD)
            elif kind == 2:
                changed[at:at] = self.bytes(self.below(9))
            elif kind == 3:
                del changed[at : at + self.below(64)]
            elif kind == 4:
                del changed[at:]
            elif kind == 5:
                changed[at : at + 4] = b"\xff\xff\xff\xff"
            else:
                changed[at:at] = changed[at : at + self.below(256)]
        return bytes(changed) if self.below(16) else self.rest()

    def altered(self, fields: Any) -> Any:
        """A map or list, however deep, with up to three of its values replaced, dropped or doubled."""
        for _ in range(self.below(4)):
            place = fields
            while isinstance(place, dict | list) and place:
                key = self.pick(list(place) if isinstance(place, dict) else range(len(place)))
                if isinstance(place[key], dict | list) and place[key] and self.below(4):
                    place = place[key]
                    continue
                if isinstance(place, dict) and not self.below(6):
                    del place[key]
                elif isinstance(place, list) and not self.below(4):
                    place.append(place[key])
                else:
                    place[key] = self.value()
                break
        return fields

    def value(self) -> Any:
        """Something that a field may turn out to hold."""
        kind = self.below(10)
        if kind == 0:
            return int.from_bytes(self.bytes(8), "big") - self.pick((0, 2**63))
        if kind == 1:
            return self.below(300) - 2
        if kind == 2:
            return self.bytes(self.below(80))
        if kind == 3:
            return self.bytes(self.below(20)).decode("latin-1")
        if kind == 4:
            return [self.below(10) for _ in range(self.below(6))]
        if kind == 5:
            return self.pick((0.0, -0.0, 1.5, -1e300, 1e308, float("nan"), float("inf"), float("-inf")))
        if kind == 6:
            return {"dtype": self.pick(("fp16", "int8", "float32", "x")), "shape": [1, 4], "data": b""}
        if kind == 7:
            return self.pick((2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)))
        return self.pick((None, True, False, {}, [], b"", "", "block-0", "interface"))
