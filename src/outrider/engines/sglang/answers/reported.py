"""What an answer says about drafts: how many were proposed and accepted, and what each step did.

SGLang computes the number of proposed drafts in the tokenizer's process, as K for every step. That
process gets few fields of a request. One of them, on every version, is the number of accepted
drafts, so that number brings the rest along. (SGLang's `customized_info` cannot be used: it has an
entry only for requests that set it, and the receiver confuses requests unless all of them do.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engines.sglang.versions.base import SglangVersion


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

    def with_steps(self, steps: Sequence[dict[str, Any]]) -> AcceptedDrafts:
        """Return the same number with what each step did."""
        total = self.plus(0, 0)
        total.steps = steps
        return total


def accepted_drafts(version: SglangVersion, req: Any) -> AcceptedDrafts:
    """Return SGLang's count of a request's accepted drafts, as one of ours."""
    counted = getattr(req, version.accepted)
    if not isinstance(counted, AcceptedDrafts):
        counted = AcceptedDrafts(counted)
        setattr(req, version.accepted, counted)
    return counted


def count_step(version: SglangVersion, req: Any, drafts: int, accepted: int) -> None:
    """Count a step of a request, with so many drafts."""
    version.count_step(req, accepted)
    if drafts:
        total = accepted_drafts(version, req).plus(accepted, drafts)
        setattr(req, version.accepted, total)


def add_record(version: SglangVersion, req: Any, record: dict[str, Any], is_last: bool) -> None:
    """Keep what a step did to a request that asks, and send all of it when the request ends."""
    # in SGLang's request: it may be retracted, and come again
    req.outrider_steps = [*getattr(req, "outrider_steps", ()), record]
    if is_last:
        setattr(req, version.accepted, accepted_drafts(version, req).with_steps(req.outrider_steps))


def correct_meta_info(meta_info: dict[str, Any], accepted: int) -> None:
    """Correct what SGLang computes as if every step drafted K tokens. accepted: as it was sent"""
    proposed = getattr(accepted, "proposed", 0)
    for name in ("spec_proposed_drafts", "spec_num_proposed_drafts"):
        if name in meta_info:
            meta_info[name] = proposed
            meta_info["spec_accept_rate"] = int(accepted) / proposed if proposed else 0.0
    if steps := getattr(accepted, "steps", ()):
        meta_info["outrider_steps"] = steps
