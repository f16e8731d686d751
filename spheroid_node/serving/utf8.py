"""Text out of a stream of bytes that may stop anywhere in a character."""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Holds an incomplete sequence back until it completes; what can never complete becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """The text that ``data`` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD if the stream ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
