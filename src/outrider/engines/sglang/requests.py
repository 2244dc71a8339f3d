"""SGLang's requests as the served step sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from outrider.core import FinishReason, SamplingParams
from outrider.engines.sglang.sampling.grammars import can_roll_back
from outrider.engines.sglang.sampling.penalties import has_penalties
from outrider.engines.sglang.sampling.processors import reads_text_only
from outrider.engines.sglang.sampling.sampler import sampling_kind
from outrider.serving.profile import Profile, request_options
from outrider.serving.values import ServedRequest, Traits


class Options(NamedTuple):
    """The options of a request, completed by the server's defaults: see `RequestOptions`."""

    drafter: str
    max_drafts: int
    explain: bool


class Describer:
    """Makes the state of each of SGLang's requests.

    names: the drafters that a request may choose
    profile: whose defaults complete its options
    server_args: SGLang's
    fallbacks: requests that cannot have drafts, by reason
    """

    def __init__(
        self, names: list[str], profile: Profile, server_args: Any, fallbacks: Counter[str]
    ) -> None:
        self._names, self._default, self._fallbacks = names, profile.drafter, fallbacks
        self._limit = server_args.speculative_num_steps
        self._usual = self._limit if profile.max_drafts is None else profile.max_drafts
        self._has_seeds = server_args.enable_deterministic_inference

    def options(self, req: Any) -> Options:
        """Return the options of a request."""
        try:
            options = request_options(req.sampling_params.custom_params, self._names)
        except ValueError:  # the tokenizer's process has refused it; what passed it has no drafts
            return Options(self._default, 0, explain=False)
        drafter, asked = options.drafter or self._default, options.max_drafts
        most = self._usual if asked is None else min(self._limit, asked)
        return Options(drafter, 0 if drafter == "none" else most, options.explain)

    def __call__(self, req: Any, number: int) -> ServedRequest:
        """Return the state of a request."""
        drafter, most, explain = self.options(req)
        if req.grammar is not None and not can_roll_back(req.grammar):
            self._fallbacks["grammar"] += 1
            most = 0
        if req.custom_logit_processor and not reads_text_only(req.custom_logit_processor):
            self._fallbacks["processor"] += 1
            most = 0
        seed = req.sampling_params.sampling_seed
        return ServedRequest(
            id=number,
            prompt=tuple(req.origin_input_ids),
            sampling=self._draft_sampling(req.sampling_params),
            seed=42 if seed is None else seed & (2**63 - 1),  # SGLang's own default
            output=list(req.output_ids),
            # beside a grammar SGLang takes in what a step emitted after it has chosen the next
            finish_reason=FinishReason.STOP if req.finished() else None,
            req=req,
            traits=_traits(req),
            drafter=drafter if most else "none",  # other drafters need not know of it
            max_drafts=most,
            explain=explain,
            tenant=tenant_of(req),
        )

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


def _traits(req: Any) -> Traits:
    params, has_grammar = req.sampling_params, req.grammar is not None
    has_stops = params.stop_strs or params.stop_regex_strs
    return Traits(
        max_tokens=params.max_new_tokens,
        kind=sampling_kind(params),
        may_end_early=bool(has_stops or has_grammar or req.require_reasoning),
        stop_ids=frozenset(_stop_ids(req)),
        needs_text=bool(
            has_grammar or req.custom_logit_processor is not None or has_penalties(req)
        ),
        wants_output=bool(req.return_logprob or req.return_hidden_states),
    )


def _stop_ids(req: Any) -> set[int]:
    """Return the tokens that may end a request: more than do is fine."""
    found = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        found |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return {token for token in found if token is not None}


def tenant_of(req: Any) -> str:
    """Return whose texts a request may share; "" for all without a name.

    SGLang 0.5.23 keeps `cache_salt` apart from `extra_key`. The length of the first tells "a", "bc"
    from "ab", "c".
    """
    salt, key = getattr(req, "cache_salt", None) or "", req.extra_key or ""
    return f"{len(salt)}:{salt}{key}" if salt or key else ""
