"""The device finds the drafts that `NgramDrafter` finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.drafters.lookup import Texts
from outrider.kernels import ngram_match as package
from outrider.kernels.ngram_match import reference
from outrider.kernels.ngram_match import triton as kernel


def histories(lengths, alphabet, seed=0, size=None, dtype=torch.int64):
    """Random histories; what lies beyond each is 99, a token of no history."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((len(lengths), size or max([*lengths, 1])), 99, dtype=dtype)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = torch.randint(0, alphabet, (length,), generator=generator)
    return tokens


def drafter(tokens, lengths, max_drafts, width, min_n, max_n):
    """What the drafter on the host proposes."""
    drafts, counts = torch.zeros(len(tokens), width, dtype=tokens.dtype), []
    for b, row in enumerate(tokens.tolist()):
        texts = Texts(min_n, max_n)
        text, most = np.array([texts.open()]), np.array([min(int(max_drafts[b]), width)])
        texts.extend(int(text[0]), row[: int(lengths[b])])
        _, (found, _, _) = texts.propose(text, most, width=1, min_vote=0.0, trees=False)
        drafts[b, : len(found)] = torch.from_numpy(found)
        counts.append(len(found))
    return drafts, torch.tensor(counts, dtype=torch.int32)


def check(tokens, lengths, max_drafts=None, width=5, min_n=2, max_n=4):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    max_drafts = torch.full_like(lengths, width) if max_drafts is None else max_drafts
    given = (tokens, lengths, max_drafts, width, min_n, max_n)
    expected = drafter(*given)
    for run in (reference.ngram_match, kernel.ngram_match):
        for ours, theirs in zip(run(*given), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    return expected


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (3, 3), (1, 6)])
@pytest.mark.parametrize("alphabet", [1, 2, 5])
def test_ragged_histories(alphabet, sizes, interpreted):
    lengths = [0, 1, 2, 3, 4, 5, 9, 17, 40, 63, 64]
    _, counts = check(histories(lengths, alphabet), lengths, min_n=sizes[0], max_n=sizes[1])
    assert counts[:2].tolist() == [0, 0]
    assert counts.max() == 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_many_blocks(dtype, interpreted, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 16)
    lengths = [100, 99, 33, 16, 15, 1]
    for seed in range(3):
        check(histories(lengths, 3, seed, size=120, dtype=dtype), lengths)


def test_the_longest_wins_then_the_latest(interpreted, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 16)
    far = [1, 2, 3, 4, 7] + [0] * 40
    #      4-gram at the front         3-gram       2-grams, the second later
    history = [*far, 9, 2, 3, 4, 8, *[0] * 20, 5, 3, 4, 6, 6, 3, 4, 5, 5, 1, 2, 3, 4]
    tokens = torch.tensor([history])
    for max_n, first in ((4, 7), (3, 8), (2, 5)):
        drafts, _ = check(tokens, [len(history)], max_n=max_n)
        assert drafts[0, 0] == first


def test_a_copy_that_reaches_the_end_goes_on_with_itself(interpreted):
    drafts, _ = check(torch.tensor([[8, 1, 2, 3, 1, 2, 3, 1, 2]]), [9], width=7)
    assert drafts.tolist() == [[3, 1, 2, 3, 1, 2, 3]]


def test_a_long_history(interpreted):
    """A history of 151,936 tokens whose only match is near its start."""
    tokens = torch.arange(151_936)[None]
    tokens[0, -3:] = torch.tensor([100, 101, 102])
    drafts, counts = check(tokens, [151_936], width=3)
    assert drafts.tolist() == [[103, 104, 105]]


def test_budgets_and_rows_apart(interpreted):
    tokens = histories([30] * 6, 2)[::2, :25]
    max_drafts = torch.tensor([0, 2, 50])
    _, counts = check(tokens, [25] * 3, max_drafts)
    assert counts.tolist() == [0, 2, 5]
    drafts, counts = check(tokens, [25] * 3, width=0)
    assert drafts.shape == (3, 0)
    assert check(tokens[:0], [])[0].shape == (0, 5)


def test_arguments():
    tokens, lengths = histories([9, 9], 2), torch.tensor([9, 9])
    with pytest.raises(ValueError, match="lengths must be"):
        package.ngram_match(tokens, lengths[:1], lengths, 3)
    with pytest.raises(ValueError, match="min_n"):
        package.ngram_match(tokens, lengths, lengths, 3, min_n=3, max_n=2)
    with pytest.raises(ValueError, match="tokens"):
        package.ngram_match(tokens.t(), lengths, lengths, 3)


def test_twin_an_earlier_match_is_caught(interpreted, monkeypatch):
    """With the two continuations swapped, the kernel finds what the earlier match would give."""
    monkeypatch.setattr(kernel, "BLOCK", 16)
    twice = [1, 2, 3, 4, 7] + [0] * 30 + [1, 2, 3, 4, 8] + [5] * 30 + [1, 2, 3, 4]
    check(torch.tensor([twice]), [len(twice)])
    swapped = torch.tensor([twice])
    swapped[0, [4, 39]] = swapped[0, [39, 4]]
    found = kernel.ngram_match
    monkeypatch.setattr(kernel, "ngram_match", lambda tokens, *rest: found(swapped, *rest))
    with pytest.raises(AssertionError):
        check(torch.tensor([twice]), [len(twice)])
