"""A drafter that asks for the target's hidden states gets those of the tokens that were kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from adversaries import OracleDrafter
from torch import Tensor

import outrider
from outrider.core import Budget, Outcome, Proposal, Request, chain
from outrider.drafters import NgramDrafter
from outrider.engines.transformers import host
from outrider.engines.transformers.passes import Segment
from outrider.engines.transformers.runner import Runner

GREEDY = {"max_tokens": 60}


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Return what plain decoding emits."""
    return outrider.generate(target, prompts, drafter=None, sampling=GREEDY).outputs


class Reader:
    """Keeps the states of every token, and compares what the target's head says with the tokens."""

    name = "reader"

    def __init__(self, drafter, model, *layers: int) -> None:
        self.drafter = drafter
        self.head = model.get_output_embeddings()
        self.hidden_layers = (*layers, model.config.num_hidden_layers)
        self.states: dict[int, Tensor] = {}
        self.compared = 0

    def start(self, requests: Sequence[Request]) -> None:
        self.states |= {request.id: torch.empty(0) for request in requests}

    def propose(self, requests: Sequence[Request], budget: Budget) -> Proposal:
        return self.drafter.propose(requests, budget)

    @torch.inference_mode()
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.hidden is not None
            last = outcome.hidden[-len(outcome.tokens) :, -1]
            assert self.head(last).argmax(-1).tolist() == list(outcome.tokens)
            self.compared += len(outcome.tokens)
            known = [*self.states[outcome.request.id], *outcome.hidden]
            self.states[outcome.request.id] = torch.stack(known)

    def stop(self, requests: Sequence[Request]) -> None:
        pass


@torch.inference_mode()
def all_states(model, tokens: list[int]) -> Tensor:
    """Return the states of every layer by Transformers' own pass, [L, layers + 1, H]."""
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([layer[0] for layer in out.hidden_states], dim=1)


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_states_are_those_of_the_kept_rows(target, prompts, plain, trees, exactness):
    """Three requests that accept unlike numbers of drafts: every token's states, in order."""
    layers = (0, 2)
    oracle = OracleDrafter(512, dict(enumerate(plain)), trees)
    drafter = Reader(oracle, target, *layers)
    run = outrider.stream(target, prompts, drafter=drafter, sampling=GREEDY, exactness=exactness)
    accepted = [[o.num_accepted_drafts for o in event.outcomes] for event in run]
    assert any(len(set(counts)) > 1 for counts in accepted)
    assert run.result.outputs == plain
    assert not run.result.stats.fallbacks
    assert drafter.compared == sum(map(len, plain))
    for i, sequence in enumerate(run.result.sequences):
        # the last token has been emitted, but never read
        expected = all_states(target, sequence[:-1])[:, [*layers, -1]]
        torch.testing.assert_close(drafter.states[i], expected, rtol=1e-4, atol=1e-4)


def test_twin_states_of_other_rows_are_seen(target, prompts, plain, monkeypatch):
    """The rows of a chain, taken for those of a tree, fail the head's test."""

    def first_rows(states, outcome):
        return states[: len(states) - outcome.num_drafts + len(outcome.rows) - 1]

    monkeypatch.setattr(host, "_kept", first_rows)
    drafter = Reader(OracleDrafter(512, dict(enumerate(plain)), trees=True), target)
    done = outrider.generate(target, prompts, drafter=drafter, sampling=GREEDY)
    assert done.stats.fallbacks["error"] > 0
    assert done.outputs == plain


class Nearest(Reader):
    """Drafts what followed the token whose state was most like that of the last one read."""

    name = "nearest"

    def propose(self, requests, budget):
        drafts = []
        for request, count in zip(requests, budget.max_drafts, strict=True):
            states, text = self.states[request.id][:, -1], request.tokens_from(0)
            assert len(states) == len(text) - 1
            like = torch.cosine_similarity(states[:-1], states[-1:], dim=-1).argmax().item()
            # state i led to token i + 1, which stands where the last token is now
            drafts.append(chain(text[like + 2 :][:count]))
        return Proposal.of(drafts)


def test_a_drafter_can_draft_from_them(target, prompts, plain):
    done = outrider.generate(target, prompts, drafter=Nearest(None, target), sampling=GREEDY)
    assert done.outputs == plain
    assert not done.stats.fallbacks
    assert done.stats.accepted > 0


def test_a_fault_leaves_a_gap_and_no_more(target, prompts, plain):
    """A drafter that is told its requests anew gets the states of what is read from then on."""

    class Forgetful(Reader):
        steps = 0

        def observe(self, outcomes):
            super().observe(outcomes)
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("out of memory")

    drafter = Forgetful(OracleDrafter(512, dict(enumerate(plain)), trees=False), target)
    done = outrider.generate(target, prompts, drafter=drafter, sampling=GREEDY)
    assert done.outputs == plain
    assert done.stats.fallbacks["error"] == 3
    for i, sequence in enumerate(done.sequences):
        states = drafter.states[i]
        assert 0 < len(states) < len(sequence) - 1 - len(prompts[i])
        expected = all_states(target, sequence[:-1])[-len(states) :, [-1]]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_captured_unless_asked_for(target, prompts, monkeypatch):
    asked, seen = [], []
    forward = type(target).forward
    monkeypatch.setattr(
        type(target),
        "forward",
        lambda self, *a, **kw: asked.append(kw["output_hidden_states"]) or forward(self, *a, **kw),
    )

    class Spy(NgramDrafter):
        def observe(self, outcomes):
            seen.extend(outcome.hidden for outcome in outcomes)
            super().observe(outcomes)

    # the class has another forward: the model is compared again before it is used
    outrider.generate(target, prompts, drafter="none", sampling=GREEDY)
    asked.clear()
    outrider.generate(target, prompts, drafter=Spy(), sampling=GREEDY)
    assert set(asked) == {False}
    assert set(seen) == {None}


def test_layers_that_do_not_exist_are_refused(target, prompts):
    drafter = NgramDrafter()
    drafter.hidden_layers = (99,)
    with pytest.raises(outrider.Unsupported, match=r"layers \(99,\)"):
        outrider.generate(target, prompts, drafter=drafter)


def test_one_run_gives_every_segment_its_states(target, prompts):
    """Also where prompts and other rows pass through the model apart."""
    for exactness in ("lossless", "bitwise"):
        runner = Runner(target, exactness)
        old, new = runner.open(), runner.open()
        runner.extend([(old, prompts[1][:2])])
        segments = [Segment(new, prompts[0]), Segment(old, prompts[1][2:])]
        logits, hidden = runner.run_with_hidden(segments, (1,))
        assert len(logits) == sum(map(len, hidden))
        expected = [all_states(target, prompts[0]), all_states(target, prompts[1])[2:]]
        for found, states in zip(hidden, expected, strict=True):
            torch.testing.assert_close(found, states[:, [1]], rtol=1e-4, atol=1e-4)
