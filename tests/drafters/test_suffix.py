"""Suffix lookup against a search written out, over texts that grow in any pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Budget, KeyedCoins, Outcome
from outrider.drafters import lookup
from outrider.drafters.compiled import IS_COMPILED
from outrider.drafters.lookup import ANCHOR, WIDTH, Texts
from outrider.drafters.suffix import SuffixDrafter

TEXTS = st.lists(st.integers(0, 2), max_size=120)
PIECES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def grow(text, pieces, salt=0, **options):
    """Texts of which one has been read in pieces, beside another, and its row."""
    texts, start = Texts(**options), 0
    texts.extend(texts.open(salt + 1), [1, 2, 0] * 20)
    row = texts.open(salt)
    while start < len(text):
        size = pieces[start % len(pieces)]
        texts.extend(row, text[start : start + size])
        start += size
    return texts, row


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
@given(TEXTS, PIECES)
def test_matches_are_those_of_a_search(text, pieces):
    texts, row = grow(text, pieces)
    assert texts.matches(row) == occurrences(text)[:WIDTH]
    assert texts.lengths[row] == len(text)
    assert texts.tokens_from(row, 5) == text[5:]


@settings(deadline=None, max_examples=100)
@given(TEXTS, TEXTS)
def test_the_end_of_another_text_is_found(text, other):
    (texts, row), ending = grow(text, [7]), grow(other, [7], salt=3)
    expected = [
        (length, end)
        for length, end in occurrences([*text, *[9] * 64, *other])
        if end < len(text)  # where nothing follows is no match
    ]
    assert texts.matches(row, of=ending) == expected[:WIDTH]


def test_no_more_occurrences_are_looked_at_than_there_is_time_for():
    """An old long match beyond so many younger ones is passed over; what is found is a match."""
    text = [5, 6, 1, 2, 3, 4, *[t for i in range(lookup.PROBES) for t in (1, 2, 3, 100 + i)]]
    texts, row = grow([*text, 5, 6, 1, 2, 3], [50])
    assert [match.length for match in texts.matches(row)] == [3] * WIDTH
    texts, row = grow([*text[:-80], 5, 6, 1, 2, 3], [50])
    assert texts.matches(row)[0] == (5, 5)


def test_rows_are_used_again_and_know_nothing_of_before():
    texts, row = grow([1, 2, 3, 1, 2, 3], [6])
    texts.close(row)
    again = texts.open()
    texts.extend(again, [1, 2, 3])
    assert (again, texts.matches(again)) == (row, [])


def test_long_matches_are_told_apart_up_to_a_limit():
    text = [7, *range(30), 8, *range(30), 9, *range(30)]

    def lengths(**options):
        texts, row = grow(text, [5], **options)
        return [match.length for match in texts.matches(row)]

    assert lengths() == [30, 30]
    assert lengths(max_match=10) == [10, 10]


def say(text, count, trees=False):
    """What a lookup proposes after a text: tokens and confidences."""
    texts, row = grow(text, [4])
    _, drafts = texts.propose(np.array([row]), np.array([count]), WIDTH, 0.0, trees)
    return drafts.tokens.tolist(), drafts.sure.tolist()


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert say([5, 1, 2, 3, 1, 2, 3], 7)[0] == [1, 2, 3, 1, 2, 3, 1]


def test_occurrences_vote_and_the_longer_match_counts_more():
    a, b = [9, 1, 2, 3, 4, 4], [1, 2, 3, 5, 5]
    tokens, sure = say([*a, *b, 0, 9, 1, 2, 3], 2)
    assert tokens == [4, 4]  # 9 1 2 3 has been followed by 4, 1 2 3 also by 5
    assert sure == [4 / 8 * 4 / 7, 4 / 8]
    tokens, sure = say([*a, *b, 0, *b, 0, *b, 0, 9, 1, 2, 3], 1)
    assert tokens == [5]
    assert sure == [4 / 8 * 9 / 13]
    assert say([1, 2], 3) == ([], [])


def request(prompt, output=()):
    return SimpleNamespace(id=3, prompt=list(prompt), output=list(output))


def outcome(made, tokens):
    return Outcome(made, tuple(tokens), tuple(range(len(tokens))), len(tokens), len(tokens), None)


def test_drafts_end_where_votes_run_out():
    budget = Budget((4,), "match", KeyedCoins())
    text = [1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 7, 0, 1, 2, 3, 4, 8, 0, 1, 2, 3]
    for least, drafts in ((0.0, 4), (0.5, 1), (1.0, 1)):
        drafter = SuffixDrafter(min_vote=least)
        drafter.start([request(text)])
        proposal = drafter.propose([request(text)], budget)
        assert proposal.num_drafts.tolist() == [drafts]
        assert proposal.tokens[0] == 4
    one = request(text)
    drafter.observe([outcome(one, (4, 9, 1, 2, 3, 4))])
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
    with pytest.raises(ValueError, match=next(iter(options))):
        SuffixDrafter(**options)


@pytest.mark.parametrize("tokens", [range(32_768), [7] * 32_768])
def test_memory_is_what_is_said(tokens):
    texts = Texts()
    row = texts.open()
    texts.extend(row, tokens)
    assert texts.nbytes <= 12 * len(tokens)
    most = 0.0
    for i in range(5000):
        texts.extend(row, [i, i, i])
        most = max(most, texts.nbytes / texts.lengths[row])
    assert most <= 16
    drafter = SuffixDrafter()
    drafter.start([request(tokens)])
    assert drafter.nbytes <= 16 * len(tokens)
    drafter.stop([request(tokens)])
    assert drafter.nbytes == 0


PLAIN = """
import json, sys
from random import Random
import numpy as np
from outrider.drafters.compiled import IS_COMPILED
from outrider.drafters.lookup import Texts

random, said = Random(0), []
for trees in (False, True):
    texts = Texts(2)
    rows = np.array([texts.open(i) for i in range(12)])
    for step in range(60):
        counts = np.array([random.randrange(6) for _ in rows])
        tokens = np.array([random.randrange(4) for _ in range(counts.sum())], np.int64)
        texts.extend_all(rows, tokens, counts)
        most = np.array([random.randrange(8) for _ in rows])
        counts, drafts = texts.propose(rows, most, 8, random.choice([0.0, 0.3]), trees)
        said.append([array.tolist() for array in (counts, *drafts)])
print(json.dumps([IS_COMPILED, said]))
"""


def test_compiled_loops_say_what_plain_ones_say():
    def run(numba):
        env = {**os.environ, "OUTRIDER_NUMBA": numba}
        out = subprocess.run(
            [sys.executable, "-c", PLAIN], env=env, capture_output=True, text=True, check=True
        )
        return json.loads(out.stdout)

    (plain, said), (compiled, said_too) = run("0"), run("1")
    assert (plain, compiled) == (False, IS_COMPILED)
    assert said == said_too
    assert any(counts and max(counts) > 4 for counts, *_ in said)


def test_another_value_of_the_switch_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import outrider.drafters.compiled"],
        env={**os.environ, "OUTRIDER_NUMBA": "off"},
        capture_output=True,
        text=True,
    )
    assert "Unsupported: OUTRIDER_NUMBA='off'; choose one of 0, 1" in done.stderr


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
        self.drafter.observe([outcome(r, new) for r in self.requests])
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
