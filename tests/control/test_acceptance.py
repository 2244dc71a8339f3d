"""Chances that are learnt against the chances by which a made-up target accepts."""

from __future__ import annotations

import random

import pytest

from outrider.control.acceptance import LEAST, MOST, Acceptance, prior


def play(learner, rng, request, truth, steps, drafter="suffix", k=4):
    """Draft chains whose true chances are truth(confidence); tell what became of them."""
    for _ in range(steps):
        for _ in range(k):
            confidence = rng.random()
            hit = rng.random() < truth(confidence)
            learner.chances(drafter, request).observe(confidence, hit)
            if not hit:
                break


def chance(learner, drafter, request, confidence):
    return learner.chances(drafter, request).of(confidence)


def test_confidence_is_calibrated():
    """A drafter that is too sure of itself is seen through."""
    learner, rng = Acceptance(), random.Random(0)
    for request in range(40):
        play(learner, rng, request, lambda c: 0.6 * c, 60)
    for confidence in (0.25, 0.55, 0.95):
        assert chance(learner, "suffix", "new", confidence) == pytest.approx(
            0.6 * confidence, abs=0.08
        )


def test_requests_differ():
    learner, rng = Acceptance(), random.Random(1)
    for _ in range(30):
        for request, ease in (("easy", 0.9), ("hard", 0.3)):
            play(learner, rng, request, lambda c, ease=ease: ease, 5)
    easy, hard, new = (chance(learner, "suffix", r, 0.5) for r in ("easy", "hard", "new"))
    assert easy == pytest.approx(0.9, abs=0.12)
    assert hard == pytest.approx(0.3, abs=0.12)
    assert hard < new < easy
    learner.forget("hard")
    assert chance(learner, "suffix", "hard", 0.5) == chance(learner, "suffix", "new", 0.5)


def test_a_change_is_followed():
    """From prose to a copy of the prompt: within twenty steps the request is believed again."""
    learner, rng = Acceptance(), random.Random(2)
    play(learner, rng, 0, lambda c: 0.1, 100)
    before = chance(learner, "suffix", 0, 0.5)
    play(learner, rng, 0, lambda c: 0.95, 20)
    assert before < 0.25
    assert chance(learner, "suffix", 0, 0.5) > 0.75


def test_drafters_do_not_share():
    learner, rng = Acceptance(), random.Random(3)
    play(learner, rng, 0, lambda c: 0.9, 50, drafter="model")
    assert chance(learner, "suffix", 0, 0.5) == prior(5)


def test_chances_have_bounds():
    learner = Acceptance()
    for _ in range(200):
        learner.chances("model", 0).observe(1.0, True)
        learner.chances("other", 0).observe(0.0, False)
    assert chance(learner, "model", 0, 1.0) == MOST
    assert chance(learner, "other", 0, 0.0) == LEAST


def test_hope_is_for_what_is_not_known():
    learner, rng = Acceptance(), random.Random(4)
    early = learner.chances("model", "new").hope(0.5) - prior(5)
    for request in range(20):
        play(learner, rng, request, lambda c: 0.7, 60, drafter="model")
    new, old = learner.chances("model", "other"), learner.chances("model", 19)
    assert early > new.hope(0.5) - new.of(0.5) > old.hope(0.5) - old.of(0.5) > 0
    assert old.hope(0.5, 16) < old.hope(0.5, 64) < old.hope(0.5, 10_000) == MOST


def test_an_easy_text_makes_unsure_drafts_likely():
    """The shift is one of odds: it moves a chance of a half further than one of nine tenths."""
    learner, rng = Acceptance(), random.Random(5)
    for request in range(40):
        play(learner, rng, request, lambda c: c, 60)
    play(learner, rng, "easy", lambda c: 0.97, 15)
    for confidence, least in ((0.55, 0.75), (0.92, 0.93)):
        assert chance(learner, "suffix", "new", confidence) == pytest.approx(confidence, abs=0.06)
        assert chance(learner, "suffix", "easy", confidence) > least
