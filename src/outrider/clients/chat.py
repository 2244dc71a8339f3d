"""Chat templates: programs in Jinja that come with a tokenizer, run with limits.

Jinja's sandbox keeps a template from everything but the messages. It does not keep it from looping
for ever or from filling the memory, so it runs in a process of its own that is ended then.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from outrider.errors import Unsupported

__all__ = ["render_chat"]

DEADLINE = 5.0
"""Seconds that a template may take."""

MOST_BYTES = 8 << 20
"""The most text that a template may write, in bytes."""

_MEMORY = 512 << 20  # bytes that it may take beside those of this process
_FIX = "use a tokenizer with another chat_template, or prompts without it"
_TEXT, _ERROR = b"t", b"e"


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """Return messages as the tokenizer's chat template writes them, ready for an answer.

    Raises Unsupported if the template fails, takes too long or writes too much.
    """
    # loaded here once, and not in each process anew
    import jinja2.sandbox  # noqa: F401
    import transformers.utils.chat_template_utils  # noqa: F401

    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        # threads of torch are asleep, and the child runs nothing but the template
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _write(sender, tokenizer, messages)
    os.close(sender)
    try:
        said = _read(receiver)
    finally:
        os.close(receiver)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if said is None:
        raise Unsupported(f"a chat template that takes over {DEADLINE:.0f} seconds", fix=_FIX)
    if len(said) > MOST_BYTES:
        raise Unsupported(f"a chat template that writes over {MOST_BYTES:,} bytes", fix=_FIX)
    text = said[1:].decode(errors="replace")
    if said[:1] != _TEXT:
        raise Unsupported(f"a chat template that fails ({text or 'it crashed'})", fix=_FIX)
    return text


def _write(sender: int, tokenizer: Any, messages: Sequence[dict[str, str]]) -> None:
    """Write what the template makes of the messages, and end this process."""
    try:
        gc.disable()  # what it would free is the parent's
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        with open("/proc/self/statm", "rb") as statm:
            taken = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        said = _TEXT + text.encode(errors="replace")
    except BaseException as error:
        said = _ERROR + f"{type(error).__name__}: {error!s:.200}".encode(errors="replace")
    try:
        while said:
            said = said[os.write(sender, said) :]
    finally:
        os._exit(0)


def _read(receiver: int) -> bytes | None:
    """Return what comes until the end, somewhat more than the most, or None after the deadline."""
    said, ends = bytearray(), time.monotonic() + DEADLINE
    while len(said) <= MOST_BYTES:
        if not select.select([receiver], [], [], max(0.0, ends - time.monotonic()))[0]:
            return None
        if not (piece := os.read(receiver, 1 << 16)):
            break
        said += piece
    return bytes(said)
