"""The draft model's chain and its siblings, with a model whose opinions are known."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from outrider.core import ROOT, Budget, DraftFault, KeyedCoins, Outcome, Request, SamplingParams
from outrider.drafters import GuardedDrafter, ModelDrafter

V = 16
ALLOWED = torch.ones(V, dtype=torch.bool)


@dataclass
class Sequence:
    length: int = 0


class Counting:
    """Says that n + 1 follows n, n + 2 is the next best, and how sure it is of each."""

    vocab_size, max_length = V, 100_000
    max_unread, max_catch_up = 8, 512

    def __init__(self, first=0.7, second=0.2):
        self.passes, self.chances = 0, (first, second)
        self.read, self.caught_up = [], []  # tokens of each pass

    def open(self, request):
        return Sequence()

    def extend(self, segments):
        self.passes += 1
        self.read.append(sum(len(tokens) for _, tokens in segments))
        logits = torch.full((len(segments), V), -20.0)
        for row, (sequence, tokens) in zip(logits, segments, strict=True):
            sequence.length += len(tokens)
            for ahead, chance in enumerate(self.chances, 1):
                row[(tokens[-1] + ahead) % V] = math.log(chance)
        return logits

    def catch_up(self, segments):
        self.caught_up.append(sum(len(tokens) for _, tokens in segments))
        for sequence, tokens in segments:
            sequence.length += len(tokens)

    def truncate(self, sequence, length):
        sequence.length = min(sequence.length, length)

    def close(self, sequence):
        pass


class Keeping(Counting):
    """Keeps what it has read of a request, as a host does whose slots are the target's."""

    def __init__(self, prefilled=0):
        super().__init__()
        self.kept, self.prefilled, self.fault = {}, prefilled, None

    def open(self, request):
        return self.kept.setdefault(request.id, Sequence(self.prefilled))

    def extend(self, segments):
        logits = super().extend(segments)
        if self.fault == len(self.read):
            raise RuntimeError("no room")
        return logits


class Unrolling(Counting):
    """Can read on from tokens that nobody has seen yet."""

    def unroll(self, sequences, limits):
        def read(tokens):
            return self.extend([(Sequence(), [token]) for token in tokens.tolist()])

        self.limits = limits
        return SimpleNamespace(read=read)


def drafter(*prompts, model=None, sampling=None, **options):
    """A drafter that knows requests with these prompts, its model, and the requests."""
    model = model or Counting()
    found = ModelDrafter(model, V, **{"min_survival": 0.0, **options})
    requests = [
        Request(id=i, prompt=prompt, sampling=sampling or SamplingParams(), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    found.start(requests)
    return found, model, requests


def budget(*most, **more):
    return Budget(most, "match", KeyedCoins(), **more)


def test_siblings_are_leaves_beside_the_chain():
    found, model, requests = drafter((3,), siblings=1)
    [draft] = found.propose(requests, budget(5, min_gain=0.4)).drafts()
    # the fourth pass promises 0.47, the fifth 0.37: a chain of four, and the likeliest leaf
    assert draft.tokens[:4] == (4, 5, 6, 7)
    assert draft.parents[:4] == (ROOT, 0, 1, 2)
    assert (draft.tokens[4:], draft.parents[4:]) == ((5,), (ROOT,))
    assert draft.sure == pytest.approx((0.78, 0.78, 0.78, 0.78, 0.22), abs=0.01)
    assert model.passes == 4


def test_siblings_need_trees_and_room():
    found, _, requests = drafter((3,), siblings=2)
    chain = found.propose(requests, budget(3, trees=False)).drafts()[0]
    assert (chain.tokens, chain.parents) == ((4, 5, 6), (ROOT, 0, 1))
    found, _, requests = drafter((3,), siblings=2)
    full = found.propose(requests, budget(3)).drafts()[0]
    assert full.tokens == (4, 5, 6)


def test_a_pass_must_be_worth_its_time_for_all_requests_together():
    found, model, requests = drafter((3,), (9,))
    drafts = found.propose(requests, budget(8, 8, trees=False, min_gain=1.0)).drafts()
    assert [len(d.tokens) for d in drafts] == [3, 3]  # 2 * 0.78^2 = 1.2, 2 * 0.78^3 = 0.95
    assert model.passes == 3


def test_who_knows_better_is_believed():
    """Calibration says that this model is always right, or never."""
    for chance, passes in ((1.0, 8), (0.0, 1)):
        found, model, requests = drafter((3,))
        found.propose(
            requests, budget(8, min_gain=0.5, chances=lambda r, c, known=chance: [known] * len(r))
        )
        assert model.passes == passes


def test_a_sibling_that_was_kept_is_read_next():
    """Its cache entry was never written: the chain went another way."""
    found, _, requests = drafter((3,), siblings=1)
    found.propose(requests, budget(4, min_gain=0.5))
    outcome = Outcome(requests[0], (4, 6, 7), (0, 1, 4), 4, 2, None)
    found.observe([outcome])
    outcome.apply()
    state = found._states[0]
    assert state.sequence.length == 2  # the prompt and 4
    assert found._unread(requests[0], type(state)(state.sequence)) == [6, 7]


LONG = (3,) * 32_000


def step(drafter, requests, most=4):
    """Let one step propose, and emit one token that nobody drafted."""
    proposal = drafter.propose(requests, budget(*[most] * len(requests), trees=False))
    pairs = zip(requests, proposal.num_drafts, strict=True)
    kept = [Outcome(request, (1,), (0,), k, 0, None) for request, k in pairs]
    drafter.observe(kept)
    for outcome in kept:
        outcome.apply()
    return proposal.num_drafts


def test_after_a_fault_only_what_is_new_is_read():
    """8 requests of 32,000 tokens: a pass that read them anew would have 256,008 rows."""
    model = Keeping(prefilled=len(LONG) - 1)
    inner, _, requests = drafter(*[LONG] * 8, model=model)
    guarded = GuardedDrafter(inner, V)
    guarded.start(requests)
    model.fault = 3
    drafted = [step(guarded, requests) for _ in range(6)]
    assert [sum(k) > 0 for k in drafted] == [False, False, True, True, True, True]
    assert guarded.fallbacks == {"error": 8, "resting": 8}
    assert max(model.read) <= 3 * 8
    assert not model.caught_up
    # what was drafted before the fault was not taken for text
    assert all(s.length <= r.length for r, s in zip(requests, model.kept.values(), strict=True))


def test_what_was_drafted_before_a_fault_is_forgotten():
    model = Keeping()
    found, _, requests = drafter((3,), model=model)
    found.propose(requests, budget(4))
    assert model.kept[0].length == 4  # the prompt and three drafts
    found.stop(requests)
    assert model.kept[0].length == 1


def test_unread_requests_are_caught_up_in_bounded_passes():
    """A request has drafts when it is caught up, and those that are ready have them at once."""
    model = Counting()
    found, _, requests = drafter((3,) * 700, (3,) * 700, (3,), model=model)
    drafted = [step(found, requests, most=2) for _ in range(4)]
    assert [[k > 0 for k in step] for step in drafted] == [
        [False, False, True],
        [True, False, True],
        [True, True, True],
        [True, True, True],
    ]
    assert model.caught_up == [512, 512, 377]
    assert max(model.read) <= 3 * model.max_unread
    assert found.waited == 2 + 1


def test_requests_without_drafts_are_not_caught_up():
    model = Counting()
    found, _, requests = drafter((3,) * 700, (3,), model=model)
    found.propose(requests, budget(0, 2))
    assert not model.caught_up
    assert found.waited == 0


def test_requests_that_the_model_cannot_read_do_not_stop_the_others():
    model = Counting()
    model.max_length = 800
    found, _, requests = drafter((3,) * 801, (V,) * 20, (3,) * 20, model=model)
    assert [k > 0 for k in step(found, requests)] == [False, False, True]
    assert model.caught_up == [19]
    assert found.waited == 1  # the one with an id that the model does not have


class Later(torch.Tensor):
    """Logits of a device that is not done yet: reading what was made of them takes a while."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            time.sleep(0.02)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_pass_takes_until_its_drafts_are_read():
    class Device(Counting):
        def extend(self, segments):
            return super().extend(segments).as_subclass(Later)

    found, _, requests = drafter((3,), model=Device())
    found.propose(requests, budget(3, trees=False))
    assert found.seconds > 3 * 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("siblings", [0, 2])
@pytest.mark.parametrize("min_survival", [0.0, 0.5])
def test_unrolled_drafts_are_those_of_the_loop(temperature, siblings, min_survival):
    """The second of the requests may have one draft, the third none, the fourth most."""
    asked = {"siblings": siblings, "min_survival": min_survival}
    asked["sampling"] = SamplingParams(temperature=temperature, top_p=0.9, seed=3)
    proposals, models = [], [Counting(), Unrolling()]
    for model in models:
        found, _, requests = drafter((3,), (9, 4), (5,), (1, 2, 8), model=model, **asked)
        proposals.append(found.propose(requests, budget(5, 1, 0, 7)).drafts())
    assert proposals[0] == proposals[1]
    assert models[0].passes <= models[1].passes <= models[0].passes + 1
    assert models[1].limits == [4, 0, 6]


def test_an_unrolled_pass_is_launched_before_the_drafts_before_it_are_read():
    order = []

    class Device(Unrolling):
        def extend(self, segments):
            order.append("pass")
            return super().extend(segments)

    found, _, requests = drafter((3,), model=Device())

    def chances(_, confidences):
        order.append("read")
        return confidences

    found.propose(requests, budget(3, trees=False, chances=chances))
    assert order == ["pass", "pass", "read", "pass", "read", "read"]


def test_an_unrolled_pass_may_be_of_no_use():
    """The second pass is under way when it is seen that it does not pay."""
    found, model, requests = drafter((3,), model=Unrolling())
    [draft] = found.propose(requests, budget(8, min_gain=0.8)).drafts()
    assert (len(draft.tokens), model.passes) == (2, 2)  # 0.78 after the first


@pytest.mark.parametrize("sampling", [{"presence_penalty": 0.5}, {"grammar": lambda _: ALLOWED}])
def test_who_looks_back_must_see_the_drafts(sampling):
    """The tokens that drafts lead to depend on them: nothing is unrolled."""
    params, drafts = SamplingParams(**sampling), []
    for model in (Counting(), Unrolling()):
        found, _, requests = drafter((3,), model=model, sampling=params)
        drafts.append(found.propose(requests, budget(4)).drafts())
    assert drafts[0] == drafts[1]
    assert not hasattr(model, "limits")


def test_logits_that_are_no_numbers_are_a_fault_unrolled_too():
    found, _, requests = drafter((3,), model=Unrolling(first=1.0, second=math.nan))
    with pytest.raises(DraftFault, match="not numbers"):
        found.propose(requests, budget(4))
