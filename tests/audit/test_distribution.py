"""Do two engines sample from one distribution? Biased twins are told apart, true ones are not."""

from __future__ import annotations

import random

import pytest
from toy import Toy, argmax_as_sampled, exact, greedy, no_top_p

from outrider.audit.distribution import SIGNIFICANT, compare_distributions, detectable
from outrider.clients import Answer, Query, Token

PROMPTS = ["pick", "choose", "name", "take"]


def answers(toy, count, seed, **more):
    coins = random.Random(seed)
    sampling = {"temperature": 1.0, "logprobs": 1, "max_tokens": 4, **more}
    return {
        n: [
            toy.answer(Query(prompt, seed=coins.randrange(2**31), **sampling)) for _ in range(count)
        ]
        for n, prompt in enumerate(PROMPTS)
    }


def found(rule, count=200, seed=0, **more):
    return compare_distributions(
        answers(Toy(), count, 2 * seed, **more), answers(Toy(rule), count, 2 * seed + 1, **more)
    )


def test_the_same_distribution():
    """No false alarm, and p-values as they should be: the smallest of many is not small."""
    results = [found(exact, count=100, seed=seed) for seed in range(8)]
    assert not any(result.differs for result in results)
    singles = [t.p_value for result in results for t in result.tests if t.way == "first 2 tokens"]
    assert len(singles) == 8 * (len(PROMPTS) + 1)
    # uniform, but for the tests' dependence: half of them lie below a half, roughly
    assert 0.25 < sum(p < 0.5 for p in singles) / len(singles) < 0.75


@pytest.mark.parametrize(
    ("rule", "more"),
    [(greedy, {}), (argmax_as_sampled, {}), (no_top_p, {"top_p": 0.7})],
)
def test_twins(rule, more):
    result = found(rule, **more)
    assert result.differs
    assert result.worst.corrected < 1e-9
    # the first token needs no draft: every one of them draws it as it should
    assert not any(test.differs for test in result.tests if test.way == "first token")


def test_top_p_is_kept_by_the_true_one():
    assert not found(exact, top_p=0.7).differs


def test_all_prompts_together_find_what_none_finds_alone():
    """A bias of 8 % in each of 40 prompts."""
    coins = random.Random(0)

    def sample(heads, count=150):
        words = ["a" if coins.random() < heads else "b" for _ in range(count)]
        return [Answer(w, (Token(w),), 1, "length", ((0.0, 0.0), (1.0, 1.0))) for w in words]

    result = compare_distributions(
        {n: sample(0.5) for n in range(40)}, {n: sample(0.58) for n in range(40)}
    )
    assert result.differs
    assert {test.prompt for test in result.tests if test.differs} == {None}


def test_rare_outcomes_are_counted_together():
    result = found(exact, count=60)
    for test in result.tests:
        if test.prompt is not None:
            sums = [(cell.plain, cell.speculative) for cell in test.cells]
            assert all(a + b >= 10 for a, b in sums)
            assert sum(a for a, _ in sums) == sum(b for _, b in sums) == 60
            assert test.freedom == len(test.cells) - 1


def test_one_outcome_is_no_test():
    one = {0: [Answer("a", (Token("a"),), 1, "stop", ())] * 50}
    result = compare_distributions(one, one)
    assert result.tests == ()
    assert not result.differs


def test_an_engine_that_tells_no_tokens():
    """It is judged by words."""
    plain, other, wrong = (
        answers(toy, 100, seed, logprobs=None)
        for seed, toy in enumerate((Toy(), Toy(), Toy(greedy)))
    )
    result = compare_distributions(plain, other)
    assert {test.way for test in result.tests} == {"first word", "first 2 words"}
    assert not result.differs
    assert compare_distributions(plain, wrong).differs


def test_engines_that_gave_different_numbers_of_answers():
    """A sampling test that was cut short."""
    plain, other = answers(Toy(), 200, 0), answers(Toy(), 50, 1)
    assert not compare_distributions(plain, other).differs
    assert compare_distributions(plain, answers(Toy(greedy), 50, 1)).differs


@pytest.mark.parametrize(("freedom", "count"), [(1, 200), (7, 400)])
def test_detectable(freedom, count):
    """The distance that is stated is found with a chance of 0.9, in the worst direction."""
    from scipy import stats

    d = detectable(freedom, [(count, count)], SIGNIFICANT)
    assert 0.05 < d < 0.5
    cells = freedom + 1
    p = [1 / cells] * cells
    q = [x + d * (2 / cells) * (1 if i < cells / 2 else -1) for i, x in enumerate(p)]
    coins = random.Random(0)
    hits, rounds = 0, 300
    for _ in range(rounds):
        a, b = (coins.choices(range(cells), weights, k=count) for weights in (p, q))
        rows = [[side.count(i) for i in range(cells)] for side in (a, b)]
        hits += stats.chi2_contingency(rows, correction=False).pvalue < SIGNIFICANT
    assert 0.83 < hits / rounds < 0.97


def test_more_answers_find_smaller_distances():
    few, many = (detectable(8, [(n, n)], 1e-4) for n in (100, 400))
    assert many == pytest.approx(few / 2)
