"""The verdict: true engines pass, ties are called ties, and planted faults are called wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy import Toy, argmax_as_sampled, exact, greedy, no_top_p, top_two

from outrider.audit.result import CHANGED, OPEN, SAME, TIES, wilson


def test_a_true_engine(audit):
    result = audit(Toy(), samples=100)
    assert result.verdict == SAME
    assert result.exit_code == 0
    assert result.greedy.identical == result.control.identical == 12
    assert not result.sampling.differs
    assert result.notes == []


def test_a_planted_rule_is_wrong(audit):
    """It takes what the draft says if that is among the target's two best."""
    result = audit(Toy(top_two))
    assert result.verdict == CHANGED
    assert result.exit_code == 1
    assert "where it is sure" in result.headline
    assert result.count("wrong") > 6
    for n, one in result.greedy.divergences.items():
        assert one.position >= 1
        if result.verdicts[n] == "wrong":
            assert one.margin > result.tolerance.value
            # by its own logprobs it knows better
            assert one.own_margin == pytest.approx(-one.margin)


def test_noise_makes_ties(audit):
    """The same rule on logits that are off by up to 0.05, as in half precision."""
    result = audit(Toy(noise=0.05), max_tokens=60)
    assert result.verdict == TIES
    assert result.exit_code == 0
    assert result.count("numerical tie") == len(result.greedy.divergences) > 2
    assert 0.1 < result.tolerance.value <= 0.2
    assert max(result.greedy.noise) <= 0.1


def test_noise_does_not_hide_a_wrong_rule(audit):
    result = audit(Toy(top_two, noise=0.05))
    assert result.verdict == CHANGED
    assert result.tolerance.value <= 0.2


def test_logits_on_a_coarse_grid_tie(audit):
    """One spacing of noise on a grid, as bfloat16 has it."""
    result = audit(Toy(noise=0.07, grid=0.125), Toy(grid=0.125, drafts=False), max_tokens=60)
    assert result.verdict == TIES
    margins = [one.margin for one in result.greedy.divergences.values()]
    assert all(min(margin, abs(margin - 0.125)) < 1e-6 for margin in margins)


@pytest.mark.parametrize(
    ("rule", "top_p"), [(greedy, 1.0), (argmax_as_sampled, 1.0), (no_top_p, 0.7)]
)
def test_a_biased_distribution_is_wrong(audit, rule, top_p):
    """These are right when greedy: only sampling shows them."""

    def biased(p, q, query, coins):
        return (rule if query.temperature else exact)(p, q, query, coins)

    result = audit(Toy(biased), samples=150, top_p=top_p)
    assert result.greedy.identical == 12
    assert result.verdict == CHANGED
    assert "another distribution" in result.headline


def test_no_seed_comes_twice(audit, engines):
    audit(Toy(), samples=20)
    seeds = [w.seed for e in engines.values() for w in e.asked if w.seed is not None]
    assert len(seeds) == 2 * 20 * 3
    assert len(set(seeds)) == len(seeds)
    assert {w.max_tokens for w in engines["plain"].asked if w.seed is not None} == {4}


def test_tolerance_can_be_given(audit):
    assert audit(Toy(noise=0.05), max_tokens=60, tolerance=0.0).verdict == CHANGED


class Restless(Toy):
    """Answers otherwise each time, as an engine does that samples when asked to be greedy."""

    def answer(self, query):
        return super().answer(replace(query, prompt=f"{query.prompt} {len(self.asked)}"))


def test_plain_that_does_not_agree_with_itself(audit):
    result = audit(Toy(), Restless(drafts=False))
    assert result.verdict == OPEN
    assert result.exit_code == 4
    assert "does not agree with itself" in result.headline


def test_plain_that_ties_with_itself_is_noted(audit):
    class Batchy(Toy):
        def answer(self, query):
            self.noise = 0.0 if len(self.asked) <= 12 else 0.05
            return super().answer(query)

    result = audit(Toy(), Batchy(drafts=False), max_tokens=60)
    assert result.verdict == SAME
    assert any("agrees with itself on" in note for note in result.notes)


def test_without_logprobs_a_difference_is_not_decided(audit):
    result = audit(Toy(top_two, tell=False), Toy(tell=False, drafts=False))
    assert result.verdict == OPEN
    assert "cannot be judged" in result.headline
    assert audit(Toy(tell=False), Toy(tell=False, drafts=False)).verdict == SAME


def test_an_engine_that_refuses_logprobs_is_asked_without(audit):
    plain = Toy(drafts=False)
    result = audit(Toy(refuse=True), plain, samples=60)
    assert {query.logprobs for query in plain.asked} == {5, 1}
    assert result.verdict == SAME
    assert result.sampling.tests
    assert not result.greedy.drifts
    result = audit(Toy(top_two, refuse=True))
    assert result.verdict == OPEN
    assert "cannot be judged" in result.headline


def test_speculation_must_take_part(audit):
    result = audit(Toy(drafts=False))
    assert result.verdict == OPEN
    assert "drafted nothing" in result.headline
    result = audit(Toy(), Toy(drafts=True))
    assert result.verdict == OPEN
    assert "plain engine drafted" in result.headline


def test_what_is_kept_beside_the_tokens(audit):
    class Miscounting(Toy):
        def answer(self, query):
            told = super().answer(query)
            return replace(told, count=told.count + (query.prompt == "prompt 3"))

    result = audit(Miscounting())
    assert result.verdict == CHANGED
    assert "prompt 4: number of tokens: 40 against 41" in result.headline


def test_a_wrong_cache_shows_in_the_noise(audit):
    """Logits far off, and yet no answer differs: the verdict is about answers, a note says more."""

    class WrongCache(Toy):
        def answer(self, query):
            told = super().answer(query)
            shifted = tuple(
                replace(t, top=(t.top[0], *((w, v - 1) for w, v in t.top[1:]))) for t in told.tokens
            )
            return replace(told, tokens=shifted)

    result = audit(WrongCache())
    assert result.verdict == SAME
    assert any("wrong cache" in note for note in result.notes)


@pytest.mark.parametrize("good", [0, 1, 12, 23, 24])
def test_wilson(good):
    from scipy.stats import binomtest

    expected = binomtest(good, 24).proportion_ci(method="wilson")
    assert wilson(good, 24) == pytest.approx((expected.low, expected.high), abs=1e-4)
