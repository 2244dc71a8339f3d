"""How the rows of a pass are shared out where there is a limit to them."""

from __future__ import annotations

from collections.abc import Sequence


def share_rows(wanted: Sequence[int], max_rows: int) -> tuple[tuple[int, ...], int]:
    """Return how many drafts each request may have, and how many requests have fewer than wanted.

    Each request has one row for its last token. If all drafts do not fit, all requests get the same
    share of the rows.

    wanted: the most drafts of each request
    """
    count = len(wanted)
    if count + sum(wanted) <= max_rows:
        return tuple(wanted), 0
    room = max(0, max_rows // count - 1)
    return tuple(min(drafts, room) for drafts in wanted), sum(d > room for d in wanted)
