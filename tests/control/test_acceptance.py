"""Chances that are learnt against the chances by which a made-up target accepts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.control.acceptance import MAX_CHANCE, MIN_CHANCE, Acceptance, prior


def new_learner():
    """Knows five drafters, and nothing about their drafts."""
    learner = Acceptance()
    for drafter in ("suffix", "model", "other", "a", "x"):
        learner.add(drafter)
    return learner


def play(learner, rng, request, truth, steps, drafter="suffix", k=4):
    """Draft chains whose true chances are truth(confidence); tell what became of them."""
    for _ in range(steps):
        for _ in range(k):
            confidence = rng.random()
            hit = rng.random() < truth(confidence)
            observe(learner, drafter, request, confidence, hit)
            if not hit:
                break


def observe(learner, drafter, request, confidence, hit):
    given = learner.rows([request]), np.array([confidence]), np.array([hit])
    learner[drafter].first.observe(*given)


def chance(learner, drafter, request, confidence):
    return learner[drafter].first.of(learner.rows([request]), np.array([confidence]))[0]


def optimistic(learner, drafter, request, confidence, idle=0):
    given = learner.rows([request]), np.array([confidence]), np.array([idle])
    return learner[drafter].first.optimistic(*given)[0]


def test_confidence_is_calibrated():
    """A drafter that is too sure of itself is seen through."""
    learner, rng = new_learner(), random.Random(0)
    for request in range(40):
        play(learner, rng, request, lambda c: 0.6 * c, 60)
    for confidence in (0.25, 0.55, 0.95):
        assert chance(learner, "suffix", "new", confidence) == pytest.approx(
            0.6 * confidence, abs=0.08
        )


def test_requests_differ():
    learner, rng = new_learner(), random.Random(1)
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
    learner, rng = new_learner(), random.Random(2)
    play(learner, rng, 0, lambda c: 0.1, 100)
    before = chance(learner, "suffix", 0, 0.5)
    play(learner, rng, 0, lambda c: 0.95, 20)
    assert before < 0.25
    assert chance(learner, "suffix", 0, 0.5) > 0.75


def test_drafters_do_not_share():
    learner, rng = new_learner(), random.Random(3)
    play(learner, rng, 0, lambda c: 0.9, 50, drafter="model")
    assert chance(learner, "suffix", 0, 0.5) == prior(5)


def test_chances_have_bounds():
    learner = new_learner()
    for _ in range(200):
        observe(learner, "model", 0, 1.0, True)
        observe(learner, "other", 0, 0.0, False)
    assert chance(learner, "model", 0, 1.0) == MAX_CHANCE
    assert chance(learner, "other", 0, 0.0) == MIN_CHANCE


def test_many_at_once_are_learnt_as_one_by_one():
    """But for the buckets, which older drafts of the same moment do not age."""
    together, alone = new_learner(), new_learner()
    rng = np.random.default_rng(6)
    for _ in range(30):
        sure, hits = rng.random(8), rng.random(8) < 0.6
        together["a"].first.observe(together.rows(range(8)), sure, hits)
        for request in range(8):
            observe(alone, "a", request, sure[request], hits[request])
    for request in range(8):
        pair = (chance(learner, "a", request, 0.5) for learner in (together, alone))
        assert next(pair) == pytest.approx(next(pair), abs=0.02)


def test_rows_are_used_again_and_know_nothing_of_before():
    learner = new_learner()
    assert learner.rows(["a", "b"]).tolist() == [0, 1]
    for _ in range(20):
        observe(learner, "x", "a", 0.5, True)
        observe(learner, "x", "b", 0.5, False)
    learner.forget("a")
    assert learner.rows(["b", "c", "d"]).tolist() == [1, 0, 2]
    assert chance(learner, "x", "c", 0.5) == chance(learner, "x", "d", 0.5)


def test_the_optimistic_estimate_is_for_what_is_not_known():
    learner, rng = new_learner(), random.Random(4)
    early = optimistic(learner, "model", "new", 0.5) - prior(5)
    for request in range(20):
        play(learner, rng, request, lambda c: 0.7, 60, drafter="model")
    new, old = (
        optimistic(learner, "model", who, 0.5) - chance(learner, "model", who, 0.5)
        for who in ("other", 19)
    )
    assert early > new > old > 0
    later = [optimistic(learner, "model", 19, 0.5, idle) for idle in (16, 64, 10_000)]
    assert later[0] < later[1] < later[2] == MAX_CHANCE


def test_an_easy_text_makes_unsure_drafts_likely():
    """The shift is one of odds: it moves a chance of a half further than one of nine tenths."""
    learner, rng = new_learner(), random.Random(5)
    for request in range(40):
        play(learner, rng, request, lambda c: c, 60)
    play(learner, rng, "easy", lambda c: 0.97, 15)
    for confidence, least in ((0.55, 0.75), (0.92, 0.93)):
        assert chance(learner, "suffix", "new", confidence) == pytest.approx(confidence, abs=0.06)
        assert chance(learner, "suffix", "easy", confidence) > least
