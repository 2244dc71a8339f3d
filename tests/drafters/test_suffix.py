"""Suffix lookup against a search written out, over texts that grow in any pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Budget, KeyedCoins
from outrider.drafters import suffix
from outrider.drafters.suffix import ANCHOR, WIDTH, SuffixDrafter, SuffixIndex, vote

TEXTS = st.lists(st.integers(0, 2), max_size=120)
PIECES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def grow(text, pieces, **options):
    """An index that has read the text in pieces."""
    index, start = SuffixIndex(**options), 0
    while start < len(text):
        size = pieces[start % len(pieces)]
        index.extend(text[start : start + size])
        start += size
    return index


def occurrences(text, max_match=64):
    """Every earlier occurrence of the text's end, as (length, end)."""
    found = []
    for end in range(ANCHOR, len(text)):
        length = 0
        while length < min(end, max_match) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= ANCHOR:
            found.append((length, end))
    return sorted(found, reverse=True)


@settings(deadline=None, max_examples=150)
@given(TEXTS, PIECES, st.integers(1, 60))
def test_matches_are_those_of_a_search(text, pieces, spare):
    before, suffix.SPARE = suffix.SPARE, spare  # merges at every occasion
    try:
        index = grow(text, pieces)
    finally:
        suffix.SPARE = before
    found = [(match.length, match.end) for match in index.matches()]
    expected = occurrences(text)
    assert set(found) <= set(expected)
    assert found == sorted(found, reverse=True)
    if len(expected) <= WIDTH:
        assert found == expected
    elif expected:
        latest = sorted(expected, key=lambda match: match[1])[-WIDTH:]
        assert found[0] >= max(latest)
    assert len(index) == len(text)


def test_long_matches_are_told_apart_up_to_a_limit():
    text = [7, *range(30), 8, *range(30), 9, *range(30)]
    lengths = [match.length for match in grow(text, [5]).matches()]
    assert lengths == [30, 30]
    assert [m.length for m in grow(text, [5], max_match=10).matches()] == [10, 10]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    index = grow([5, 1, 2, 3, 1, 2, 3], [7])
    [match] = index.matches()
    assert (match.end, match.length) == (4, 3)
    assert index.following(match, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_occurrences_vote_and_the_longer_match_counts_more():
    a, b = [9, 1, 2, 3, 4, 4], [1, 2, 3, 5, 5]
    once = vote(grow([*a, *b, 0, 9, 1, 2, 3], [4]), 2)
    assert once.tokens == (4, 4)  # 9 1 2 3 has been followed by 4, 1 2 3 also by 5
    assert once.votes == (4 / 7, 4 / 7)
    assert once.length == 4
    twice = vote(grow([*a, *b, 0, *b, 0, *b, 0, 9, 1, 2, 3], [4]), 1)
    assert twice.tokens == (5,)
    assert twice.votes == (9 / 13,)
    assert vote(grow([1, 2], [1]), 3).tokens == ()


def request(prompt, output=()):
    return SimpleNamespace(id=3, prompt=list(prompt), output=list(output))


def test_drafts_end_where_votes_run_out():
    budget = Budget((4,), "match", KeyedCoins())
    text = [1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 7, 0, 1, 2, 3, 4, 8, 0, 1, 2, 3]
    for least, drafts in ((0.0, 4), (0.5, 1), (1.0, 1)):
        drafter = SuffixDrafter(min_vote=least)
        drafter.start([request(text)])
        proposal = drafter.propose([request(text)], budget)
        assert proposal.num_drafts == (drafts,)
        assert proposal.tokens[0] == 4
    one = request(text)
    drafter.observe([SimpleNamespace(request=one, tokens=(4, 9, 1, 2, 3, 4))])
    assert drafter.propose([one], budget).num_drafts[0] >= 0
    drafter.stop([one])
    with pytest.raises(KeyError):
        drafter.propose([one], budget)


@pytest.mark.parametrize("options", [{"min_vote": 2}, {"min_vote": -1}, {"max_match": 1}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="min_vote"):
        SuffixDrafter(**options)


def test_memory_is_what_is_said():
    index = SuffixIndex()
    index.extend(range(32_768))
    for i in range(100):
        index.extend(range(100 * i, 100 * i + 100))
    assert index.nbytes <= 17.1 * len(index) + 1000
    assert len(index._recent) <= suffix.SPARE
