"""Drafters that are wrong on purpose, in every way that must not matter, and ways to sample."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from outrider.core import ROOT, Budget, Draft, Outcome, PointMass, Proposal, Request, chain

SAMPLING = {
    "greedy": {},
    "T=0.7": {"temperature": 0.7},
    "T=1, top-p, penalties": {
        "temperature": 1.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
}


class Adversary:
    """Base: knows nothing of its requests."""

    name = "adversary"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.random = vocab_size, random.Random(seed)

    def start(self, requests: Sequence[Request]) -> None:
        pass

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def stop(self, requests: Sequence[Request]) -> None:
        pass

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        pairs = zip(requests, budget.max_drafts, strict=True)
        return Proposal.of([self.draft(request, k) for request, k in pairs])

    def draft(self, request: Request, k: int) -> Draft:
        raise NotImplementedError

    def token(self) -> int:
        return self.random.randrange(self.vocab_size)


class RandomDrafter(Adversary):
    """Drafts as much as it may, at random."""

    def draft(self, request, k):
        return chain([self.token() for _ in range(k)])


class RaggedDrafter(Adversary):
    """Drafts nothing, a little or all that it may, some of it copied from the text so far."""

    def draft(self, request, k):
        count = self.random.choice([0, 0, 1, k, self.random.randint(0, k)])
        tokens = request.tokens_from(0)
        return chain(
            [self.random.choice([self.token(), *tokens[-8:]]) for _ in range(min(count, k))]
        )


class OracleDrafter(Adversary):
    """Knows the answer, and hides it in a random tree, or spoils it from some place on."""

    def __init__(self, vocab_size: int, answers: dict[int, list[int]], trees: bool) -> None:
        super().__init__(vocab_size)
        self.answers, self.trees = answers, trees

    def draft(self, request, k):
        known = self.answers[request.id][len(request.output) :][:k]
        if not self.trees:
            spoiled = self.random.randint(0, len(known))
            return chain([*known[:spoiled], *([self.token()] if spoiled < len(known) else [])])
        # the right path, with wrong siblings before and after each of its nodes
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for right in known:
            siblings = [self.token() for _ in range(self.random.randint(0, 2))]
            siblings.insert(self.random.randint(0, len(siblings)), right)
            if len(tokens) + len(siblings) > k:
                break
            first = len(tokens)
            tokens += siblings
            parents += [parent] * len(siblings)
            parent = first + siblings.index(right)
        return Draft(tuple(tokens), tuple(parents), PointMass())


def shallow(model, layers: int):
    """Return a draft model made of a model's first layers: same tokenizer, other opinions."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    small = type(model)(config).to(model.dtype).eval()
    missing = small.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing
    for parameter in small.parameters():
        parameter.requires_grad_(False)
    return small
