"""What happens to the server of soak_sglang.py while it works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from threading import Event
from typing import TYPE_CHECKING, Any

from draft_process import TINY

if TYPE_CHECKING:
    from soak_sglang import Soak

Trouble = Callable[["Soak"], Awaitable[Any]]

SECONDS = 1.0
"""How long most troubles last."""


async def flush_cache(soak: Soak) -> None:
    """Flush the prefix cache: a busy server refuses."""
    assert await soak.post("/flush_cache") in (200, 400)


async def update_weights(soak: Soak) -> None:
    """Load the same weights again: SGLang first lets all requests end, unless it is paused."""
    # a flush fails while a request waits, and then SGLang 0.5.11 crashes
    body = {"model_path": str(TINY / "target"), "flush_cache": False}
    assert await soak.post("/update_weights_from_disk", body) == 200


async def pause(soak: Soak, mode: str, meanwhile: Trouble | None = None) -> None:
    """Pause all requests, cause another trouble, continue them."""
    assert await soak.post("/pause_generation", {"mode": mode}) == 200
    await asyncio.sleep(0.2)
    if meanwhile is not None:
        await meanwhile(soak)
    assert await soak.post("/continue_generation", {}) == 200


async def change_logging(soak: Soak) -> None:
    """Log every request for a while."""
    for wanted in (True, False):
        body = {"log_requests": wanted, "log_requests_level": 2 if wanted else 0}
        assert await soak.post("/configure_logging", body) == 200
        await asyncio.sleep(SECONDS)


async def say(soak: Soak, file: str, *words: str) -> None:
    """Write each word into a file that the server reads, for a while."""
    for word in words:
        (soak.folder / file).write_text(word)
        await asyncio.sleep(SECONDS)


TROUBLES: dict[str, Trouble] = {
    "cache flush": flush_cache,
    "weight update": update_weights,
    "pause in place": lambda soak: pause(soak, "in_place"),
    "pause with retraction": lambda soak: pause(soak, "retract"),
    "cache flush while paused": lambda soak: pause(soak, "retract", flush_cache),
    "weight update while paused": lambda soak: pause(soak, "retract", update_weights),
    "logging changed": change_logging,
    "draft process killed": lambda soak: asyncio.to_thread(soak.drafts.restart, Event()),
    "draft process stalled": lambda soak: asyncio.to_thread(soak.drafts.stall, Event()),
    "draft model out of memory": lambda soak: say(soak, "fault", "oom", ""),
    "draft model computes NaN": lambda soak: say(soak, "fault", "nan", ""),
    "draft model reads no prompts": lambda soak: say(soak, "fault", "prefill", ""),
    "clock steps": lambda soak: say(soak, "clock", "3600", "-3600", "0"),
}
"""Each trouble, by its name; they follow one another in this order."""
