"""How the rows of a pass are shared out where there is a limit to them."""

from __future__ import annotations

import numpy as np

from outrider.core import Ints


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
