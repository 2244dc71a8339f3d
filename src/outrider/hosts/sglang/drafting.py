"""The server's drafters: made at start-up, guarded, and one of them for each request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.control import AdaptiveDrafter, TieredDrafter, adaptive_drafter
from outrider.core import (
    Budget,
    Drafter,
    Proposal,
    Request,
    Unsupported,
)
from outrider.drafters import (
    OURS,
    AheadDrafter,
    GuardedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    OwnRequests,
    RoutedDrafter,
    make_drafter,
)
from outrider.drafters.compiled import IS_COMPILED
from outrider.hosts.sglang.draft_model import SglangDraftModel
from outrider.hosts.sglang.draft_weights import quantize
from outrider.hosts.sglang.heads import draft_kind
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import (
    ADAPTIVE,
    DEVICE,
    HEAD_OPTIONS,
    LOOKUP,
    MODEL,
    TIERS,
    Profile,
    load_profile,
)
from outrider.hosts.sglang.ranks import Message, Ranks
from outrider.hosts.sglang.slot_heads import SlotHead

logger = logging.getLogger(__name__)


@dataclass
class Drafters:
    """The server's drafters.

    router: sends each request to the one it chose; on ranks other than 0 it knows none of them
    guards: each of them, by name; a fault of one costs speed only
    model: the draft model, if there is one
    readers: what reads prompts with the target, the draft model and heads: with the names of the
        drafters that have a use for it. Heads are on rank 0 only.
    control: the drafter that chooses among the others, if requests may have it
    ranks: those that run the models
    models: the drafters that make passes
    ahead: the drafters that ask a draft server
    fallbacks: requests that went without drafts for reasons outside the drafters
    wants_calibration: whether control should be told first how long passes take
    lookup: the n-grams that are looked up on the device
    """

    router: RoutedDrafter | NoDrafter
    guards: dict[str, GuardedDrafter]
    model: SglangDraftModel | None
    control: AdaptiveDrafter | None
    ranks: Ranks
    models: Sequence[ModelDrafter[Any]] = ()
    ahead: Sequence[AheadDrafter] = ()
    readers: Sequence[tuple[SglangDraftModel | SlotHead, set[str]]] = ()
    fallbacks: Counter[str] = field(default_factory=Counter)
    wants_calibration: bool = False
    lookup: Mapping[str, int] = field(default_factory=lambda: dict(LOOKUP))

    @staticmethod
    def make(
        profile: Profile,
        names: list[str],
        vocab_size: int,
        model: SglangDraftModel | None,
        ranks: Ranks | None = None,
        row_buckets: Sequence[int] = (),
        heads: Mapping[str, SlotHead | None] | None = None,
    ) -> Drafters:
        """Make the drafters of these names, with the profile's options.

        ranks: those that run the models; None if there is only one
        row_buckets: for control: sizes of captured graphs
        heads: those of the server, by name; None on ranks other than 0
        """
        control: AdaptiveDrafter | None = None
        guards: dict[str, GuardedDrafter] = {}
        models: list[ModelDrafter[Any]] = []
        made: list[Drafter] = []
        lookup = dict(LOOKUP)
        ranks, heads = ranks or Ranks(), heads or {}
        ours = {name: head for name, head in heads.items() if head is not None}
        readers: list[tuple[SglangDraftModel | SlotHead, set[str]]] = []
        if model is not None:
            readers.append((model, {MODEL, TIERS, ADAPTIVE}))
        readers += [(head, {name, ADAPTIVE}) for name, head in ours.items()]

        def drafts(
            by: SglangDraftModel | SlotHead, options: Mapping[str, Any]
        ) -> ModelDrafter[Any]:
            # they run where the target runs, and would only be in its own way in a thread
            if isinstance(by, SlotHead):
                models.append(by.drafter(vocab_size, **options))
            else:
                models.append(ModelDrafter(by, vocab_size, **options))
            return models[-1]

        for name in names:
            drafter: Drafter
            options, timeout = dict(profile.drafters.get(name, {})), None
            for option in HEAD_OPTIONS:
                options.pop(option, None)
            try:
                if name in heads:
                    # on ranks other than 0 nobody asks it
                    drafter = drafts(ours[name], options) if name in ours else NoDrafter()
                elif name == ADAPTIVE:
                    if row_buckets and "knots" not in options:  # its former name
                        options.setdefault("row_buckets", row_buckets)
                    # how far to go is for control to say
                    asked = {"min_survival": 0.0, "siblings": 1}
                    passing = [] if model is None else [drafts(model, asked)]
                    for mine, head in ours.items():
                        passing.append(drafts(head, asked))
                        passing[-1].name = mine  # two may be of the same kind
                    drafter = control = adaptive_drafter(passing, **options)
                elif name == TIERS:
                    drafter = TieredDrafter(
                        drafts(_needed(model), {"min_survival": 0.0}), **options
                    )
                elif name == DEVICE:
                    lookup |= options
                    drafter = NgramDrafter(**lookup)  # where the device cannot draft
                elif name == MODEL:
                    drafter = drafts(_needed(model), options)
                else:
                    drafter = make_drafter(name, options)
                    # ours come back by themselves, and a thread takes time in every step
                    if name not in OURS:
                        drafter, timeout = OwnRequests(drafter), profile.draft_timeout
            except (TypeError, ValueError) as error:
                raise Unsupported(f"drafter {name!r} with {options}", fix=str(error)) from error
            guards[name] = GuardedDrafter(drafter, vocab_size, timeout)
            made.append(drafter)
        if not IS_COMPILED:
            logger.warning(
                "numba is not installed: looking drafts up takes about 100 times as long; "
                "pip install 'outrider[fast]'"
            )
        router = RoutedDrafter(guards, _chosen) if ranks.leads else NoDrafter()
        made += [] if control is None else control.free.values()
        ahead = [drafter for drafter in made if isinstance(drafter, AheadDrafter)]
        found = Drafters(router, guards, model, control, ranks, models, ahead, readers)
        found.wants_calibration, found.lookup = control is not None, lookup
        return found

    def prefill(self, plain: Any, drafters: set[str]) -> None:
        """Let the draft model and heads read the host's prefill batch, as far as they are needed.

        A fault on any rank that runs one of them: the batch is skipped.

        drafters: those that its requests use
        """
        longest = int(plain.seq_lens_cpu.max())
        for reader, users in self.readers:
            if users.isdisjoint(drafters) or longest > reader.max_length:
                reader.skip(plain)
                continue
            fault = None
            try:
                reader.prefill(plain)
            except Exception as error:
                fault = error
                logger.warning("drafts of %s: error in prefill: %s", min(users), error)
            is_fault = fault is not None
            if self.ranks.any(is_fault) if reader is self.model else is_fault:
                reader.skip(plain)
                self.fallbacks["prefill"] += len(plain.reqs)

    def propose(self, plain: Any, requests: Sequence[Request], budget: Budget) -> Proposal:
        """Ask the drafters, on rank 0; on the others, make the passes that it tells of.

        All ranks return the same. A pass that failed on one of them makes the step a plain one on
        all, and the draft model fails when it is asked next: its drafters rest then.

        plain: the host's decode batch, as its workers take it
        """
        if not budget.max_drafts.any():
            return Proposal.empty(len(requests))
        if self.model is not None:
            self.model.bind(plain)
        if not self.ranks.leads:
            return self._follow(len(requests))
        proposal = self.router.propose(requests, budget)
        if self.ranks.alone:
            return proposal
        shape = proposal.num_drafts.tolist(), proposal.parents.tolist()
        self.ranks.tell(Message.DONE, proposal.tokens.tolist(), *shape)
        if self.model is not None and self.model.has_run and self.ranks.any(False):
            self.model.undo("a pass failed on another rank")
            return Proposal.empty(len(requests))
        return proposal

    def add_to_device(self, heads: Iterable[str]) -> None:
        """Tell control of heads that can draft on the device."""
        if self.control is not None and self.control.device is not None:
            for name in heads:
                self.control.device.add(self.control.models[name])

    def allow_device(self, may: bool, heads: frozenset[str] = frozenset()) -> None:
        """Tell control whether the device can draft in the next step, and which heads there."""
        if self.control is not None and self.control.device is not None:
            self.control.device.is_possible, self.control.device.ready = may, heads

    def drafted_on_device(self, drafter: str) -> None:
        """Tell control who drafted on the device in the step that it is told of next."""
        if self.control is not None and self.control.device is not None:
            self.control.device.drafted = drafter

    def look(self, requests: Sequence[Any], budget: Budget) -> None:
        """Let control look for the drafts of a step that was launched without: to learn."""
        mine = [r for r, request in enumerate(requests) if _chosen(request) == ADAPTIVE]
        if mine:
            some = replace(budget, max_drafts=budget.max_drafts[mine])
            self.guards[ADAPTIVE].look([requests[r] for r in mine], some)

    def _follow(self, batch_size: int) -> Proposal:
        """Make the passes that rank 0 tells of. Return its proposal, unless one of them failed."""
        has_run, fault = False, None
        while (heard := self.ranks.hear())[0] is not Message.DONE:
            assert self.model is not None
            has_run = True
            try:
                self.model.follow(heard[0], *heard[1])
            except Exception as error:  # rank 0 goes on, and the passes that follow need this rank
                fault = error
                logger.warning("draft model: error in a pass: %s", error)
        if has_run and self.ranks.any(fault is not None):
            return Proposal.empty(batch_size)
        tokens, num_drafts, parents = heard[1]
        return Proposal.unclaimed(tokens, num_drafts, parents)

    def calibrate(self, rows: int, seconds: float, draft_seconds: Sequence[float]) -> None:
        """Tell control how long a pass of so many rows takes: of the target, and of all `timed`."""
        assert self.control is not None
        self.control.cost.observe(rows, 0, seconds)
        for model, taken in zip(self.control.models.values(), draft_seconds, strict=False):
            model.cost.passes.observe(rows, taken)

    @property
    def timed(self) -> list[SglangDraftModel | SlotHead]:
        """Return the models that control uses, as far as all ranks can time their passes."""
        found = [reader for reader, users in self.readers if ADAPTIVE in users]
        return found if self.ranks.alone else [reader for reader in found if reader is self.model]

    def take_draft_seconds(self) -> float:
        """Return the time of the draft model's passes since this was last asked."""
        seconds = sum(drafter.seconds for drafter in self.models)
        for drafter in self.models:
            drafter.seconds = 0.0
        return seconds

    def who(self, requests: Sequence[Any], proposal: Proposal) -> list[str]:
        """Return who drafted for each request in the last step, which had this proposal."""
        names = [_chosen(request) for request in requests]
        if self.control is not None and ADAPTIVE in names:
            has_drafts = proposal.num_rows > len(requests)
            used = self.control.used_by(requests) if has_drafts else [""] * len(requests)
            for r, name in enumerate(names):
                if name == ADAPTIVE:
                    names[r] = used[r] or "none"
        return names

    def totals(self) -> Counter[str]:
        """Return how many requests went without drafts, by reason."""
        total = Counter(self.fallbacks)
        for guard in self.guards.values():
            total.update(guard.fallbacks)
        if waited := sum(drafter.waited for drafter in self.models):
            total["catching_up"] = waited
        return total

    def foreseen(self) -> Counter[str]:
        """Return how often a draft server had drafts for a request, or why it had none."""
        return sum((drafter.counts for drafter in self.ahead), Counter[str]())

    def found(self) -> dict[int, str]:
        """Return what a draft server had in the last proposal, by the request's id.

        It may have been asked for a request without being the one who drafted.
        """
        return {id_: kind for drafter in self.ahead for id_, kind in drafter.found.items()}


def _needed(model: SglangDraftModel | None) -> SglangDraftModel:
    if model is None:
        raise ValueError("add --speculative-draft-model-path")
    return model


def _chosen(request: Any) -> str:
    return str(request.drafter)


def make_draft_worker(target_worker: Any, server_args: Any, **options: Any) -> Any:
    """Load the draft model into a worker of SGLang's, beside the target; None if there is none."""
    if draft_kind(host().arguments(server_args)) != MODEL:
        return None
    worker = host().draft_worker(target_worker, server_args, **options)
    bits = load_profile().draft_bits
    if bits is not None:
        quantize(worker.model_runner.model, bits)
    return worker
