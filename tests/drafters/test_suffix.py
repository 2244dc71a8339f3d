"""Suffix lookup against a search written out, over texts that grow in any pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time
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
    assert len(found) == min(len(expected), WIDTH)
    assert found[:1] == expected[:1]  # the longest, however long ago
    assert len(index) == len(text)
    assert index.tokens_from(5) == text[5:]


@settings(deadline=None, max_examples=100)
@given(TEXTS, TEXTS, st.integers(1, 60))
def test_the_end_of_another_text_is_found(text, other, spare):
    before, suffix.SPARE = suffix.SPARE, spare
    try:
        index, ending = grow(text, [7]), grow(other, [7], salt=3)
    finally:
        suffix.SPARE = before
    found = index.matches(of=ending)
    expected = [
        (length, end)
        for length, end in occurrences([*text, *[9] * 64, *other])
        if end < len(text)  # where nothing follows is no match
    ]
    assert found[:1] == expected[:1]
    assert set(found) <= set(expected)


def test_long_matches_are_told_apart_up_to_a_limit():
    text = [7, *range(30), 8, *range(30), 9, *range(30)]
    lengths = [match.length for match in grow(text, [5]).matches()]
    assert lengths == [30, 30]
    assert [m.length for m in grow(text, [5], max_match=10).matches()] == [10, 10]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    index = grow([5, 1, 2, 3, 1, 2, 3], [7])
    [match] = index.matches()
    assert (match.end, match.length) == (4, 3)
    assert index.following(match, 7) == (1, 2, 3, 1, 2, 3, 1)


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


def test_who_disagrees_first_is_a_branch():
    text = [9, 1, 2, 3, 4, 4, 1, 2, 3, 5, 5, 0, 9, 1, 2, 3]  # followed by 4 4, and by 5 5
    drafter = SuffixDrafter(min_vote=0.0)
    drafter.start([request(text)])
    chains = Budget((4,), "match", KeyedCoins(), trees=False)
    assert drafter.propose([request(text)], chains).drafts()[0].tokens == (4, 4, 1, 2)
    tree = drafter.propose([request(text)], Budget((4,), "match", KeyedCoins()))
    assert set(tree.paths()) == {(), (4,), (4, 4), (5,), (5, 5)}  # the likeliest four
    [draft] = tree.drafts()
    trust = 4 / 8
    assert draft.sure[draft.tokens.index(5)] == pytest.approx(trust * 3 / 7)
    assert draft.sure[0] == pytest.approx(trust * 4 / 7)
    sure = SuffixDrafter(min_vote=0.5)
    sure.start([request(text)])
    assert sure.propose([request(text)], Budget((4,), "match", KeyedCoins())).is_chain


@pytest.mark.parametrize(
    "options",
    [{"min_vote": 2}, {"min_vote": -1}, {"max_match": 1}, {"min_match": 0}, {"width": 0}],
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="min_vote"):
        SuffixDrafter(**options)


@pytest.mark.parametrize("tokens", [range(32_768), [7] * 32_768])
def test_memory_is_what_is_said(tokens):
    index = SuffixIndex()
    index.extend(tokens)
    assert index.nbytes <= 12 * len(index) + 200
    most = 0.0
    for i in range(5000):
        index.extend([i, i, i])
        most = max(most, index.nbytes / len(index))
    assert most <= 13
    drafter = SuffixDrafter()
    drafter.start([request(tokens)])
    assert drafter.nbytes <= 13 * len(tokens)
    drafter.stop([request(tokens)])
    assert drafter.nbytes == 0


def test_texts_do_not_merge_all_in_the_same_step(monkeypatch):
    merged = []
    monkeypatch.setattr(SuffixIndex, "_merge", lambda index: merged.append(index))
    indices = [SuffixIndex(salt=i) for i in range(256)]
    counts = []
    for _ in range(suffix.SPARE // 4):
        for index in indices:
            before = len(index) + index._salt
            index._merged = len(index)  # as if each had been done in its turn
            index.extend([1, 2, 3, 4])
            assert (index in merged[-1:]) == (before // 512 < (before + 4) // 512)
        counts.append(len(merged))
        merged.clear()
    assert sum(counts) == 256
    assert max(counts) <= 4


class Steps:
    """Times the steps of some requests whose texts are made of a few phrases."""

    def __init__(self, context, count=8):
        self.random = Random(0)
        self.phrases = [[self.random.randrange(20_000) for _ in range(6)] for _ in range(40)]
        text = [token for _ in range(context // 6) for token in self.random.choice(self.phrases)]
        self.requests = [SimpleNamespace(id=i, prompt=text, output=[]) for i in range(count)]
        self.budget = Budget((8,) * count, "match", KeyedCoins())
        self.drafter = SuffixDrafter()
        self.drafter.start(self.requests)

    def seconds(self):
        new = self.random.choice(self.phrases)[: self.random.randrange(3, 7)]
        start = thread_time()
        self.drafter.propose(self.requests, self.budget)
        self.drafter.observe([SimpleNamespace(request=r, tokens=new) for r in self.requests])
        return thread_time() - start


def test_time_does_not_grow_with_the_text():
    short, long = Steps(2048), Steps(32_768)
    times = [(short.seconds(), long.seconds()) for _ in range(80)]  # a busy machine slows both
    assert median(b for _, b in times) <= 3 * median(a for a, _ in times)


def test_the_benchmark_runs(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "deciding.py"
    out = tmp_path / "deciding.json"
    subprocess.run([sys.executable, script, "--quick", "--out", out], check=True)
    rows = json.loads(out.read_text())["figures"]
    assert [row["drafter"] for row in rows] == ["suffix", "ngram", "adaptive"]
    assert all(row["step_us"]["median"] > 0 for row in rows)
