"""What an answer says about drafts: how many were proposed and accepted, and what each step did.

SGLang computes the number of proposed drafts in the tokenizer's process, as K for every step. That
process gets few fields of a request. One of them, on every version, is the number of accepted
drafts, so that number brings the rest along. (SGLang's `customized_info` cannot be used: it has an
entry only for requests that set it, and the receiver confuses requests unless all of them do.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.hosts.sglang.host import host


class AcceptedDrafts(int):
    """The number of a request's accepted drafts, as SGLang sends it with an answer.

    proposed: how many drafts were proposed
    steps: what each step did, if the request asked and has ended. No sooner: SGLang sends it with
        every chunk of a stream
    """

    proposed: int = 0
    steps: Sequence[dict[str, Any]] = ()

    def plus(self, accepted: int, proposed: int) -> AcceptedDrafts:
        """Return the number after one more step."""
        total = AcceptedDrafts(self + accepted)
        total.proposed = self.proposed + proposed
        return total


def accepted_drafts(req: Any) -> AcceptedDrafts:
    """Return the host's count of a request's accepted drafts, as one of ours."""
    counted = getattr(req, host().accepted)
    if not isinstance(counted, AcceptedDrafts):
        counted = AcceptedDrafts(counted)
        setattr(req, host().accepted, counted)
    return counted


def count_step(req: Any, drafts: int, accepted: int) -> None:
    """Tell a request of the host's that it had a step, with so many drafts."""
    host().count_step(req, accepted)
    if drafts:
        setattr(req, host().accepted, accepted_drafts(req).plus(accepted, drafts))


def correct_meta_info(meta_info: dict[str, Any], accepted: int) -> None:
    """Correct what SGLang computes as if every step drafted K tokens. accepted: as it was sent"""
    proposed = getattr(accepted, "proposed", 0)
    for name in ("spec_proposed_drafts", "spec_num_proposed_drafts"):
        if name in meta_info:
            meta_info[name] = proposed
            meta_info["spec_accept_rate"] = int(accepted) / proposed if proposed else 0.0
    if steps := getattr(accepted, "steps", ()):
        meta_info["outrider_steps"] = steps
