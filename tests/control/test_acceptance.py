"""Chances that are learnt against the chances by which a made-up target accepts."""

from __future__ import annotations

import random

import pytest

from outrider.control.acceptance import LEAST, MOST, PRIOR, Acceptance


def play(learner, rng, request, truth, steps, drafter="suffix", k=4):
    """Draft chains whose true chances are truth(confidence); tell what became of them."""
    for _ in range(steps):
        confidences = [rng.random() for _ in range(k)]
        accepted = 0
        while accepted < k and rng.random() < truth(confidences[accepted]):
            accepted += 1
        learner.observe(drafter, request, confidences, accepted)


def test_confidence_is_calibrated():
    """A drafter that is too sure of itself is seen through."""
    learner, rng = Acceptance(), random.Random(0)
    for request in range(40):
        play(learner, rng, request, lambda c: 0.6 * c, 60)
    for confidence in (0.25, 0.55, 0.95):
        [chance] = learner.chances("suffix", "new", [confidence])
        assert chance == pytest.approx(0.6 * confidence, abs=0.08)


def test_requests_differ():
    learner, rng = Acceptance(), random.Random(1)
    for _ in range(30):
        for request, ease in (("easy", 0.9), ("hard", 0.3)):
            play(learner, rng, request, lambda c, ease=ease: ease, 5)
    easy, hard, new = (learner.chances("suffix", r, [0.5])[0] for r in ("easy", "hard", "new"))
    assert easy == pytest.approx(0.9, abs=0.12)
    assert hard == pytest.approx(0.3, abs=0.12)
    assert hard < new < easy
    learner.forget("hard")
    assert learner.chances("suffix", "hard", [0.5]) == learner.chances("suffix", "new", [0.5])


def test_a_change_is_followed():
    """From prose to a copy of the prompt: within twenty steps the request is believed again."""
    learner, rng = Acceptance(), random.Random(2)
    play(learner, rng, 0, lambda c: 0.1, 100)
    before = learner.chances("suffix", 0, [0.5])[0]
    play(learner, rng, 0, lambda c: 0.95, 20)
    assert before < 0.25
    assert learner.chances("suffix", 0, [0.5])[0] > 0.75


def test_drafters_do_not_share():
    learner, rng = Acceptance(), random.Random(3)
    play(learner, rng, 0, lambda c: 0.9, 50, drafter="model")
    assert learner.chances("suffix", 0, [0.5]) == [PRIOR]


def test_survival_is_a_product_and_chances_have_bounds():
    learner = Acceptance()
    chances = learner.chances("model", 0, [0.1, 0.9, 0.9])
    assert learner.survival("model", 0, [0.1, 0.9, 0.9]) == [
        chances[0],
        chances[0] * chances[1],
        chances[0] * chances[1] * chances[2],
    ]
    for _ in range(200):
        learner.observe("model", 0, [1.0], 1)
        learner.observe("other", 0, [0.0], 0)
    assert learner.chances("model", 0, [1.0]) == [MOST]
    assert learner.chances("other", 0, [0.0]) == [LEAST]


def test_drafts_behind_a_rejected_one_say_nothing():
    learner = Acceptance()
    learner.observe("model", 0, [0.5, 0.95], 0)
    assert learner.chances("model", 1, [0.95]) == [PRIOR]
    assert learner.chances("model", 1, [0.55])[0] < PRIOR
