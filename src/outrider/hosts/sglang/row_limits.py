"""How the rows of a pass are shared out where there is a limit to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.core import Ints
from outrider.hosts.sglang.host import host


def share_rows(wanted: Ints, max_rows: int) -> tuple[Ints, int]:
    """Return how many drafts each request may have, and how many requests have fewer than wanted.

    Each request has one row for its last token. If all drafts do not fit, all requests get the same
    share of the rows.

    wanted: the most drafts of each request
    """
    count = len(wanted)
    if count + int(wanted.sum()) <= max_rows:
        return wanted, 0
    room = max(0, max_rows // count - 1)
    return np.minimum(wanted, room), int((wanted > room).sum())


def backend_rows(runner: Any) -> int:
    """Return how many rows the attention backend has room for.

    SGLang's GPU backends make room for as many decode requests as may run at once. Others take all
    rows that there may be.
    """
    args, requests = host().arguments(runner.server_args), int(runner.req_to_token_pool.size)
    if args.attention_backend in ("outrider", "torch_native"):
        return requests * int(args.speculative_num_draft_tokens)
    return requests
