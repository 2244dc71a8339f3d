"""What one step did to one request, for a request that asks (`explain`)."""

from __future__ import annotations

from typing import Any

from outrider.core import ROOT, Draft, Outcome


def step_record(
    outcome: Outcome, draft: Draft, drafter: str, foreseen: str | None
) -> dict[str, Any]:
    """Return who drafted, the tree of drafts, the path that was kept, and the tokens emitted.

    parents: the index of each draft's parent, -1 for the request's last token
    kept: the indices of the accepted drafts, whose tokens `emitted` begins with
    foreseen: what a draft server had, if one was asked: see `AheadDrafter`
    """
    kept = [row - 1 for row in outcome.rows[1:]]
    if len(kept) < outcome.num_accepted_drafts:  # the request ended with a draft: it has no row
        last = (outcome.tokens[-1], kept[-1] if kept else ROOT)
        kept.append([*zip(draft.tokens, draft.parents, strict=True)].index(last))
    return {
        "drafter": drafter,
        "drafts": list(draft.tokens),
        "parents": list(draft.parents),
        "kept": kept,
        "emitted": list(outcome.tokens),
        "foreseen": foreseen,
    }
