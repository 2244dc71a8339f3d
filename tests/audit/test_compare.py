"""Two answers: where they part, and whether rounding explains it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider.audit import Comparison, compare, depart, tolerance
from outrider.audit.compare import LEAST, MOST
from outrider.clients import Answer, Token

FAR = (("x", -6.0), ("y", -7.1), ("z", -8.3))


def token(text, logprob=-0.1, other=("b", -3.0)):
    return Token(text, logprob, tuple(sorted([(text, logprob), other, *FAR], key=lambda t: -t[1])))


def answer(tokens, reason="length", text=None, count=None):
    text = "".join(t.text for t in tokens) if text is None else text
    count = len(tokens) if count is None else count
    return Answer(text, tuple(tokens), count, reason, ((0.0, 0.0), (1.0, 1.0)))


SAME = [token("a"), token("b", other=("a", -3.0)), token("c")]


def parted(ours, theirs):
    """Two answers that agree on one token, part at the second, and never meet again."""
    end = token(" and", -0.2)
    return compare(answer([token("a"), ours, end]), answer([token("a"), theirs, token("!", -9.0)]))


def test_the_same():
    found = compare(answer(SAME), answer(SAME))
    assert found.identical
    assert (found.agreed, found.total) == (3, 3)
    assert found.drifts == found.noise == (0.0, 0.0, 0.0)


def test_a_tie():
    found = parted(token("A", -0.69, ("B", -0.70)), token("B", -0.69, ("A", -0.70)))
    one = found.divergence
    assert (found.agreed, one.position, one.before) == (1, 1, "a")
    assert (one.plain.text, one.speculative.text) == ("A", "B")
    assert one.margin == pytest.approx(0.01)
    assert one.own_margin == pytest.approx(0.01)
    assert one.verdict(0.05) == "numerical tie"
    assert one.verdict(0.005) == "wrong"
    # what comes after the first difference says nothing
    assert len(found.drifts) == len(found.noise) == 1


def test_wrong():
    """The engine itself finds plain's token likelier, and writes the other one."""
    found = parted(token("A", -0.2, ("B", -2.0)), token("B", -2.0, ("A", -0.2)))
    assert found.divergence.margin == pytest.approx(1.8)
    assert found.divergence.own_margin == pytest.approx(-1.8)
    assert found.divergence.verdict(MOST) == "wrong"


def test_wrong_by_its_own_word():
    """Plain sees a tie, but the engine is sure of plain's token and writes the other."""
    found = parted(token("A", -0.69, ("B", -0.70)), token("B", -2.0, ("A", -0.2)))
    assert found.divergence.verdict(0.1) == "wrong"


def test_a_token_that_plain_does_not_list():
    found = parted(token("A", -0.2, ("B", -2.0)), token("Q", -0.2, ("A", -2.0)))
    assert found.divergence.at_least
    assert found.divergence.margin == pytest.approx(8.1)
    assert found.divergence.verdict(MOST) == "wrong"


@pytest.mark.parametrize(
    "silent",
    [Token("A"), Token("A", -0.1), Token("A", 0.0, (("A", 0.0), ("B", -math.inf))),
     Token("A", 0.0, (("A", 0.0), ("B", -9999.0)))],
)  # fmt: skip
def test_without_logprobs_nothing_is_known(silent):
    found = parted(silent, token("B"))
    assert found.divergence.margin is None
    assert found.divergence.verdict(MOST) == "unknown"


def test_without_tokens_texts_are_compared():
    ours = Answer("the red fox", (), 3, "length", ())
    found = compare(ours, replace(ours, text="the red hen"))
    assert found.divergence.before == "the red "
    assert found.divergence.position is None
    assert found.agreed == 2
    assert found.divergence.verdict(MOST) == "unknown"
    assert compare(ours, ours).identical


def test_logits_on_a_grid_may_be_off_by_one_spacing():
    """bfloat16 between 16 and 32: a margin of 0.125 is the smallest there is."""
    top = tuple(zip("ABCDE", (-0.6, -0.725, -2.6, -3.475, -4.1), strict=True))
    flipped = tuple(zip("BACDE", (-0.66, -0.66, -2.66, -3.535, -4.16), strict=True))
    one = parted(Token("A", -0.6, top), Token("B", -0.66, flipped)).divergence
    assert one.spacing == 0.125
    assert one.verdict(0.01) == "numerical tie"
    # two spacings are more than that
    top = (*top[:1], ("B", -0.85), *top[2:])
    two = parted(Token("A", -0.6, top), Token("B", -0.66, flipped)).divergence
    assert two.verdict(0.01) == "wrong"
    assert two.verdict(0.25) == "numerical tie"
    # off the grid, nothing is given
    top = (*top[:1], ("B", -0.70), *top[2:])
    off = parted(Token("A", -0.6, top), Token("B", -0.66, flipped)).divergence
    assert off.spacing == 0
    assert off.verdict(0.01) == "wrong"


def test_one_ends_and_the_other_goes_on():
    found = compare(answer(SAME[:2], "stop"), answer(SAME))
    assert found.divergence.position == 2
    assert found.divergence.plain is None
    assert found.divergence.verdict(MOST) == "unknown"


def test_the_token_that_ends_an_answer_may_be_listed_or_not():
    end = token("</s>")
    found = compare(answer([*SAME, end], "stop", text="abc"), answer(SAME, "stop", count=4))
    assert found.identical


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"text": "abc!"}, "text: 'abc' against 'abc!'"),
        ({"finish_reason": "stop"}, "finish reason: 'length' against 'stop'"),
        ({"count": 4}, "number of tokens: 3 against 4"),
    ],
)
def test_the_same_tokens_otherwise_kept(changed, says):
    found = compare(answer(SAME), replace(answer(SAME), **changed))
    assert not found.identical
    assert found.divergence is None
    assert found.faults == (says,)


# -- tolerance


def noisy(noise, count=300):
    return Comparison(count, count, None, noise=(noise / 2,) * (count - 1) + (noise,))


def test_tolerance_is_read_from_the_noise():
    assert tolerance([noisy(0.1), noisy(0.08)]).value == pytest.approx(0.2)
    assert "600 agreeing tokens" in tolerance([noisy(0.1), noisy(0.08)]).why
    assert tolerance([noisy(1e-5)]).value == LEAST
    assert tolerance([noisy(0.1, count=20)]).value == MOST


def test_noise_does_not_excuse_what_it_causes():
    """An engine with a wrong cache is off by a lot on agreeing tokens: that is not rounding."""
    assert tolerance([noisy(4.0)]).value == MOST


def test_noise_is_that_of_the_margin():
    """A sure token's logprob hides how far the logits are off; its margin does not."""
    found = compare(
        answer([token("a", -1e-6, ("b", -5.0))]), answer([token("a", -1e-6, ("b", -5.4))])
    )
    assert found.drifts == (0.0,)
    assert found.noise == (pytest.approx(0.4),)


def test_a_runner_up_that_is_not_listed_says_nothing():
    found = compare(answer([token("a")]), answer([token("a", other=("c", -3.0))]))
    assert found.noise == ()
    assert found.drifts == (0.0,)


def test_a_logprob_that_is_made_up_says_nothing():
    """llama.cpp's of accepted drafts."""
    found = compare(answer(SAME[:2]), answer([SAME[0], Token("b", 0.0)]))
    assert found.identical
    assert found.drifts == found.noise == (0.0,)


@pytest.mark.parametrize(
    ("text", "margin", "verdict"),
    [
        ("aB and", 0.01, "numerical tie"),
        ("aQ", 7.61, "wrong"),  # at least: plain does not list it
        ("a", None, "unknown"),  # it ended there
        ("aA and more", None, "unknown"),  # it goes on where plain ended
    ],
)
def test_a_text_leaves_an_answer(text, margin, verdict):
    plain = answer([token("a"), token("A", -0.69, ("B", -0.70)), token(" and", -0.2)])
    found = depart(plain, text)
    assert found.margin == (None if margin is None else pytest.approx(margin))
    assert found.verdict(0.05) == verdict


def test_the_longest_alternative_is_the_one_that_was_written():
    place = Token("A", -0.6, (("A", -0.6), ("Be", -0.62), ("B", -3.0)))
    assert depart(answer([place]), "Bet").speculative.text == "Be"
    assert depart(answer([place]), "But").margin == pytest.approx(2.4)
