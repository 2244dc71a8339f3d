"""The table of SGLang's requests that are being decoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from outrider.core import Bools, FinishReason, Ints, SamplingParams
from outrider.hosts.sglang.drafting import Drafters
from outrider.hosts.sglang.grammars import can_roll_back
from outrider.hosts.sglang.penalties import has_penalties
from outrider.hosts.sglang.processors import reads_text_only
from outrider.hosts.sglang.profile import ADAPTIVE, request_options
from outrider.hosts.sglang.requests import LiveRequest, tenant_of
from outrider.hosts.sglang.sampling import sampling_kind


@dataclass(frozen=True, eq=False)
class Columns:
    """What is looked at in every step of the requests that run, one entry for each.

    max_drafts: the most drafts in a step
    max_tokens: the most tokens to emit
    kinds: how each is sampled
    careful: whether more than its tokens may end it: stop strings, a grammar, reasoning
    stop_ids: all tokens that may end one of them
    may_draft: whether one of them may have drafts
    drafters: of those that may
    adaptive: whether control decides for all of them
    needs_text: whether what is sampled depends on what one of them has emitted
    wants_output: whether one of them wants logprobs or hidden states
    explain: whether one of them asks what each step did
    """

    max_drafts: Ints
    max_tokens: Ints
    kinds: list[str]
    careful: Bools
    stop_ids: frozenset[int]
    may_draft: bool
    drafters: frozenset[str]
    adaptive: bool
    needs_text: bool
    wants_output: bool
    explain: bool

    @staticmethod
    def of(requests: Sequence[LiveRequest]) -> Columns:
        """Return the columns of these requests."""
        reqs = [request.req for request in requests]
        params = [req.sampling_params for req in reqs]
        careful = [
            bool(
                p.stop_strs or p.stop_regex_strs or req.grammar is not None or req.require_reasoning
            )
            for req, p in zip(reqs, params, strict=True)
        ]
        stops = set[int]().union(*map(_stop_ids, reqs))
        drafters = frozenset(request.drafter for request in requests if request.max_drafts)
        return Columns(
            max_drafts=np.array([request.max_drafts for request in requests], np.int64),
            max_tokens=np.array([p.max_new_tokens for p in params], np.int64),
            kinds=[sampling_kind(p) for p in params],
            careful=np.array(careful, np.bool_),
            stop_ids=frozenset(stops),
            may_draft=bool(drafters),
            drafters=drafters,
            adaptive=drafters <= {ADAPTIVE},
            needs_text=any(
                req.grammar is not None
                or req.custom_logit_processor is not None
                or has_penalties(req)
                for req in reqs
            ),
            wants_output=any(req.return_logprob or req.return_hidden_states for req in reqs),
            explain=any(request.explain for request in requests),
        )


def _stop_ids(req: Any) -> set[int]:
    """Return the tokens that may end a request: more than do is fine."""
    found = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        found |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return {token for token in found if token is not None}


class Options(NamedTuple):
    """The options of a request, completed by the server's defaults: see `RequestOptions`."""

    drafter: str
    max_drafts: int
    explain: bool


class RequestTable:
    """The requests that are being decoded. It tells the drafters of new and ended ones.

    names: the drafters that a request may choose
    default: the one that drafts if it does not
    usual: how many drafts it may have in a step if it does not say; by default as many as any may
    """

    def __init__(
        self,
        drafters: Drafters,
        names: list[str],
        default: str,
        server_args: Any,
        usual: int | None = None,
    ) -> None:
        self._drafters = drafters
        self._names = names
        self._default = default
        self._most = server_args.speculative_num_steps
        self._usual = self._most if usual is None else usual
        self._has_seeds = server_args.enable_deterministic_inference
        self._live: dict[str, LiveRequest] = {}
        self._started: set[str] = set()  # those that the drafters know
        self._ids = count()
        self._present: list[Any] = []  # the host's requests of the last step
        self._requests: list[LiveRequest] = []
        self.columns = Columns.of(())

    def __len__(self) -> int:
        return len(self._live)

    def differ(self, reqs: Sequence[Any]) -> bool:
        """Say whether these are other requests than those of the last step."""
        return reqs != self._present

    def update(
        self,
        reqs: Sequence[Any],
        first: Mapping[str, tuple[int, int, Any]] | None = None,
        unread: Collection[str] = (),
        unsettled: Collection[str] = (),
    ) -> list[LiveRequest]:
        """Return these requests. Add new ones and drop those that have left the batch.

        The list is the same one as long as the requests are.

        first: of requests that have just been read: how long they were, and the token that
            follows, which the host may not have appended yet
        unread: ids of requests whose first token is not known yet; `complete` will tell it
        unsettled: ids of requests that have a step in flight: they are not dropped yet
        """
        if not self.differ(reqs):  # as nearly always
            return self._requests
        present = {req.rid for req in reqs}
        self.drop([rid for rid in self._live if rid not in present and rid not in unsettled])
        first = first or {}
        new = [self._add(req, first.get(req.rid)) for req in reqs if req.rid not in self._live]
        self._start([live for live in new if live.req.rid not in unread])
        self._present, self._requests = list(reqs), [self._live[req.rid] for req in reqs]
        self.columns = Columns.of(self._requests)
        return self._requests

    def complete(
        self,
        requests: Sequence[LiveRequest],
        first: Mapping[str, tuple[int, int, Any]] | None = None,
    ) -> None:
        """Give new ones of these requests their first token, and tell the drafters of them.

        first: as in `update`; of others the host has appended it
        """
        if len(self._started) == len(self._live):
            return
        new = [live for live in requests if live.req.rid not in self._started]
        for live in new:
            length, token, _ = (first or {}).get(live.req.rid, (-1, -1, None))
            if live.length == length:
                live.output.append(token)
            elif len(live.output) < len(live.req.output_ids):
                live.output = list(live.req.output_ids)
        self._start(new)

    def drop(self, rids: Sequence[str]) -> None:
        """Drop those of these requests that are in the table, from the drafters too."""
        gone = [self._live.pop(rid) for rid in rids if rid in self._live]
        if gone:
            self._present = []
            started = [live for live in gone if live.req.rid in self._started]
            self._started.difference_update(live.req.rid for live in started)
            self._drafters.router.stop(started)

    def _start(self, requests: Sequence[LiveRequest]) -> None:
        if new := [live for live in requests if live.finish_reason is None]:
            self._started.update(live.req.rid for live in new)
            self._drafters.router.start(new)

    def most_tokens(self, req: Any) -> int:
        """Return how many tokens a request has after the last step that was settled, at most.

        The first token of a request that the drafters do not know counts, whether known or not.
        """
        live = self._live.get(req.rid)
        if live is not None and req.rid in self._started:
            return live.length
        known = len(req.origin_input_ids) + len(req.output_ids)
        return 1 + (known if live is None else max(known, live.length))

    def options(self, req: Any) -> Options:
        """Return the options of a request."""
        try:
            options = request_options(req.sampling_params.custom_params, self._names)
        except ValueError:  # the tokenizer's process has refused it; whoever passed it by: K = 0
            return Options(self._default, 0, explain=False)
        drafter, asked = options.drafter or self._default, options.max_drafts
        most = self._usual if asked is None else min(self._most, asked)
        return Options(drafter, 0 if drafter == "none" else most, options.explain)

    def ended(self) -> list[str]:
        """Return the ids of those that have ended."""
        return [rid for rid, live in self._live.items() if live.finish_reason is not None]

    def _add(self, req: Any, first: tuple[int, int, Any] | None) -> LiveRequest:
        drafter, most, explain = self.options(req)
        output = list(req.output_ids)
        if first is not None and first[0] == len(req.origin_input_ids) + len(output):
            output.append(first[1])
        if req.grammar is not None and not can_roll_back(req.grammar):
            self._drafters.fallbacks["grammar"] += 1
            most = 0
        if req.custom_logit_processor and not reads_text_only(req.custom_logit_processor):
            self._drafters.fallbacks["processor"] += 1
            most = 0
        seed = req.sampling_params.sampling_seed
        live = self._live[req.rid] = LiveRequest(
            id=next(self._ids),
            prompt=tuple(req.origin_input_ids),
            sampling=self._draft_sampling(req.sampling_params),
            seed=42 if seed is None else seed & (2**63 - 1),  # the host's own default
            output=output,
            # beside a grammar the host takes in what a step emitted after it has chosen the next
            finish_reason=FinishReason.STOP if req.finished() else None,
            req=req,
            drafter=drafter if most else "none",  # others need not know of it
            max_drafts=most,
            explain=explain,
            tenant=tenant_of(req),
        )
        return live

    def _draft_sampling(self, params: Any) -> SamplingParams:
        """Return the sampling parameters by which a draft model drafts; nothing is emitted by them.

        Without seeds the coin that SGLang will toss is not known: the most likely token is the
        best guess then.
        """
        most = max(1, params.max_new_tokens or 1)
        if not self._has_seeds or params.top_k <= 1:
            return SamplingParams(max_tokens=most)
        try:
            return SamplingParams(
                temperature=params.temperature,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                max_tokens=most,
            )
        except ValueError:  # SGLang serves what drafters need not
            return SamplingParams(max_tokens=most)
