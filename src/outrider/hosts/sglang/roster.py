"""SGLang's requests as drafters see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from outrider.core import Request, SamplingParams
from outrider.hosts.sglang.drafting import Drafters
from outrider.hosts.sglang.profile import request_options
from outrider.hosts.sglang.rows import can_roll_back


@dataclass
class LiveRequest(Request):
    """A request of SGLang's as drafters see it.

    req: the host's own
    drafter: who drafts for it
    max_drafts: the most drafts in a step
    explain: whether it asks what each step did
    tenant: whose texts it may share: those with its `cache_salt` or `extra_key`, as in SGLang's own
        prefix cache
    """

    req: Any = None
    drafter: str = "none"
    max_drafts: int = 0
    explain: bool = False
    tenant: str = ""


class Wishes(NamedTuple):
    """What a request asks for, with the server's defaults: see `RequestOptions`."""

    drafter: str
    max_drafts: int
    explain: bool


class Roster:
    """Knows who is being decoded, and tells the drafters who comes and goes.

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
        self._ids = count()

    def __len__(self) -> int:
        return len(self._live)

    def call(self, reqs: Sequence[Any]) -> list[LiveRequest]:
        """Return these requests, welcome new ones, and take leave of all others."""
        present = {req.rid for req in reqs}
        self.dismiss([rid for rid in self._live if rid not in present])
        new = [self._welcome(req) for req in reqs if req.rid not in self._live]
        if new:
            self._drafters.router.start(new)
        return [self._live[req.rid] for req in reqs]

    def dismiss(self, rids: Sequence[str]) -> None:
        """Let the drafters forget those of these requests that they know."""
        gone = [self._live.pop(rid) for rid in rids if rid in self._live]
        if gone:
            self._drafters.router.stop(gone)

    def wishes(self, req: Any) -> Wishes:
        """Return what a request asks for."""
        try:
            options = request_options(req.sampling_params.custom_params, self._names)
        except ValueError:  # the tokenizer's process has refused it; whoever passed it by: K = 0
            return Wishes(self._default, 0, explain=False)
        asked = options.max_drafts
        most = self._usual if asked is None else min(self._most, asked)
        return Wishes(options.drafter or self._default, most, options.explain)

    def _welcome(self, req: Any) -> LiveRequest:
        drafter, most, explain = self.wishes(req)
        if req.grammar is not None and not can_roll_back(req.grammar):
            self._drafters.fallbacks["grammar"] += 1
            most = 0
        seed = req.sampling_params.sampling_seed
        live = self._live[req.rid] = LiveRequest(
            id=next(self._ids),
            prompt=tuple(req.origin_input_ids),
            sampling=self._guess(req.sampling_params),
            seed=42 if seed is None else seed & (2**63 - 1),  # the host's own default
            output=list(req.output_ids),
            req=req,
            drafter=drafter,
            max_drafts=most,
            explain=explain,
            tenant=req.extra_key or "",
        )
        return live

    def _guess(self, params: Any) -> SamplingParams:
        """Return the law by which a draft model should guess; nothing is emitted by it.

        Without seeds nobody knows the coin that the host will toss: the most likely token is the
        best guess then.
        """
        most = max(1, params.max_new_tokens or 1)
        if not self._has_seeds or params.top_k <= 1:
            return SamplingParams(max_tokens=most)
        return SamplingParams(
            temperature=params.temperature,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            max_tokens=most,
        )
