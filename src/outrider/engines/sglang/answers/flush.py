"""Streams in chunks of a fixed size: how many tokens a step accepted is not to be seen in them.

The scheduler's process sends whole chunks and no others (`send_chunks`); the server's hands each
one over before it takes the next (`one_by_one`), for SGLang merges what it finds waiting.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, FINISHED_MATCHED_REGEX

TURNS = 100
"""How often the server's event loop may go round until a stream has taken a chunk. One whose client
does not read stays behind, and finds several chunks merged."""


def send_chunks(send: Callable[[list[Any]], None], reqs: Sequence[Any], size: int) -> list[Any]:
    """Send every whole chunk of the streams among these requests.

    Returns those left for the host: requests that do not stream, and those that have ended, with
    `size` tokens to send or fewer.
    """
    streams = [req for req in reqs if req.stream and not req.finished_output]
    while ready := [req for req in streams if _unsent(req) >= size + req.finished()]:
        sent = [req.send_token_offset for req in ready]
        with ExitStack() as chunks:
            for req in ready:
                chunks.enter_context(_next_chunk(req, size))
            send(ready)
        # the host holds back what may be the beginning of a stop string
        streams = [r for r, before in zip(ready, sent, strict=True) if r.send_token_offset > before]
    return [req for req in reqs if not req.stream or req.finished()]


def _unsent(req: Any) -> int:
    return int(len(req.output_ids_through_stop) - req.send_token_offset)


@contextmanager
def _next_chunk(req: Any, size: int) -> Iterator[None]:
    """Let the host see a request that goes on, and has one chunk more than was sent."""
    length, params = req.send_token_offset + size, copy(req.sampling_params)
    params.stream_interval = 1
    shown = {
        "finished_reason": None,
        "finished_len": length,
        "sampling_params": params,
        "reasoning_tokens": min(req.reasoning_tokens, length),  # an answer begins with these
    }
    if req.finished():
        params.stop_strs = []  # nothing follows that could complete one
    if isinstance(req.finished_reason, FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX):
        # the host cuts the text at the match in the last chunk: it must have all of it there
        shown["send_decode_id_offset"] = sys.maxsize
    real = {name: getattr(req, name) for name in shown}
    vars(req).update(shown)
    try:
        yield
    finally:
        vars(req).update(real)


async def one_by_one(handle: Callable[..., Any], manager: Any, output: Any) -> None:
    """Let SGLang handle some output, and wait until its streams have taken it."""
    states = [manager.rid_to_state.get(rid) for rid in output.rids]
    streams = [s for s in states if s is not None and getattr(s.obj, "stream", False)]
    await handle(manager, output)
    for _ in range(TURNS):
        if not any(state.out_list for state in streams):
            break
        await asyncio.sleep(0)
