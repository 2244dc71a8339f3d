"""What a drafter writes into its requests changes nothing, and no copy outlives its request."""

import threading

from outrider.core import Budget, KeyedCoins, Outcome, Proposal, Request, SamplingParams, chain
from outrider.drafters import GuardedDrafter, NgramDrafter, OwnRequests


class Writing:
    """Writes into all that it is given, and remembers what it was given."""

    name, hidden_layers = "writing", (0, 2)

    def __init__(self):
        self.seen, self.worked = [], 0

    def start(self, requests):
        self.write(requests)

    def propose(self, requests, budget):
        self.seen.append([(r.id, tuple(r.output)) for r in requests])
        return Proposal.of([chain([1]) for _ in requests])

    def observe(self, outcomes):
        outcomes.tokens[:] = 9

    def stop(self, requests):
        self.write(requests)

    def meanwhile(self):
        self.worked += 1

    @staticmethod
    def write(requests):
        for request in requests:
            request.output.append(7)
            request.sampling.logit_bias[3] = 100.0


def requests(count=2):
    return [Request(i, (1,), SamplingParams(logit_bias={}), 0) for i in range(count)]


def budget():
    return Budget((3, 3), "match", KeyedCoins())


def outcomes(made):
    return [Outcome(request, (4, 5), (0, 1), 1, 1, None) for request in made]


def test_what_it_writes_stays_with_it():
    made, drafter = requests(), Writing()
    own = OwnRequests(drafter)
    own.start(made)
    own.propose(made, budget())
    found = outcomes(made)
    own.observe(found)
    assert [o.tokens for o in found] == [(4, 5)] * 2
    assert [r.output for r in made] == [[], []]
    own.stop(made)
    assert [dict(r.sampling.logit_bias) for r in made] == [{}, {}]


def test_its_copies_are_extended_and_dropped():
    made, drafter = requests(), Writing()
    own = OwnRequests(drafter)
    own.start(made)
    own.observe(outcomes(made))
    own.propose(made, budget())
    assert [output[-2:] for _, output in drafter.seen[-1]] == [(4, 5)] * 2
    own.stop(made)
    assert not own._copies


def test_a_request_that_is_started_again_is_as_it_is_now():
    made, drafter = requests(), Writing()
    own = OwnRequests(drafter)
    own.start(made)
    for outcome in outcomes(made):
        outcome.apply()
    own.start(made)
    own.propose(made, budget())
    assert [output for _, output in drafter.seen[-1]] == [(4, 5, 7)] * 2


def test_what_else_a_drafter_has_can_be_seen():
    drafter = Writing()
    own = OwnRequests(drafter)
    own.meanwhile()
    assert drafter.worked == 1
    assert own.hidden_layers == (0, 2)


def test_a_drafter_without_deferred_work_gets_no_call():
    assert not hasattr(OwnRequests(NgramDrafter()), "meanwhile")


def test_a_drafter_that_hung_keeps_no_request_that_has_ended():
    """It is told of them when its call has returned."""
    release, made = threading.Event(), requests()

    class Hanging(Writing):
        def propose(self, requests, budget):
            release.wait()
            return super().propose(requests, budget)

    own = OwnRequests(Hanging())
    guard = GuardedDrafter(own, 10, timeout=0.05)
    guard.start(made)
    assert not guard.propose(made, budget()).num_drafts.any()
    guard.stop(made)
    assert own._copies
    release.set()
    guard._stuck.result(5)
    guard.propose(made, budget())
    assert not own._copies
    guard.close()
