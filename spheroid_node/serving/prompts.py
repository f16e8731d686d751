"""Which prompts a run can take."""

from __future__ import annotations

from spheroid_node.errors import PromptInvalid


def prompt_bytes(prompt: str | bytes, window: int) -> bytes:
    """``prompt`` as bytes. Raises :class:`PromptInvalid` if empty, longer than ``window``, or not UTF-8.

    An argument of the command line that was not UTF-8 comes as a string with lone surrogates.
    """
    try:
        data = prompt.encode("utf-8") if isinstance(prompt, str) else prompt
        data.decode("utf-8")
    except UnicodeError as error:
        raise PromptInvalid("is not UTF-8") from error
    if not data:
        raise PromptInvalid("is empty")
    if len(data) > window:
        raise PromptInvalid(f"has {len(data)} bytes; the window of this run has {window}")
    return data
