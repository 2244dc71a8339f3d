"""What a tree of drafts is verified into follows the target's distribution, in Triton too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from scipy.stats import chisquare

from outrider.kernels import tree_sampling
from outrider.kernels.tree_sampling import reference
from outrider.kernels.tree_sampling import triton as kernel

#        0
#      / | \
#     1  2  3       candidates below; node 4 continues 1, 5 and 6 continue 2, 7 continues 6
#     |  |\
#     4  5 6 - 7
TREE = (-1, 0, 0, 0, 1, 2, 2, 6)
CHAIN = (-1, 0, 1, 2)


def pointers(parents, batch_size):
    """First child and next sibling of each node, and its place: requests in reverse order."""
    size = len(parents)
    child, sibling = [-1] * size, [-1] * size
    for node in reversed(range(1, size)):
        sibling[node], child[parents[node]] = child[parents[node]], node
    places = torch.arange(batch_size * size).view(batch_size, size).flip(0)
    return {
        "retrive_index": places.contiguous(),
        "retrive_next_token": torch.tensor([child] * batch_size),
        "retrive_next_sibling": torch.tensor([sibling] * batch_size),
    }


def problem(parents, vocab_size, batch_size, seed=0, spread=1.5, steps=None, like_target=False):
    """Random distributions and coins, and drafts whose siblings differ."""
    generator = torch.Generator().manual_seed(seed)
    size = len(parents)
    logits = torch.randn((batch_size, size, vocab_size), generator=generator) * spread
    target = logits.softmax(-1)
    candidates = torch.zeros((batch_size, size), dtype=torch.int64)
    for b in range(batch_size):
        taken: dict[int, list[int]] = {}
        for node in range(1, size):
            p = target[b, parents[node]] if like_target else torch.ones(vocab_size)
            p = p.clone()
            p[taken.setdefault(parents[node], [])] = 0
            candidates[b, node] = torch.multinomial(p, 1, generator=generator)[0]
            taken[parents[node]].append(int(candidates[b, node]))
    return {
        **pointers(parents, batch_size),
        "candidates": candidates,
        "uniform_samples": torch.rand((batch_size, size), generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch_size, generator=generator),
        "target_probs": target,
        "draft_probs": torch.zeros_like(target),
        "steps": (max(_depths(parents)) if steps is None else steps) + 1,
    }


def _depths(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def run(module, given, **options):
    """Return what was written: tokens, path and number of accepted drafts, and what is left."""
    given = {**given, **options}
    batch_size, size = given["candidates"].shape
    predicts = torch.full((batch_size * size + 1,), -1, dtype=torch.int32)
    index = torch.full((batch_size, given.pop("steps")), -1, dtype=torch.int32)
    count = torch.full((batch_size,), -1, dtype=torch.int32)
    given["draft_probs"] = given["draft_probs"].clone()
    module.tree_speculative_sampling_target_only(
        predicts=predicts, accept_index=index, accept_token_num=count, **given
    )
    return predicts, index, count, given["draft_probs"]


def emitted(predicts, index, count):
    """Return the tokens of each request."""
    return [
        [int(predicts[place]) for place in path[: int(n) + 1]]
        for path, n in zip(index, count, strict=True)
    ]


def check(given, **options):
    ours, theirs = run(kernel, given, **options), run(reference, given, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))
    return theirs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parents", [TREE, CHAIN, (-1,)], ids=["tree", "chain", "K = 0"])
@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_equals_the_reference(vocab_size, parents, seed, interpreted):
    given = problem(parents, vocab_size, 6, seed, spread=4.0, like_target=True)
    _, _, count, _ = check(given)
    assert len(parents) == 1 or vocab_size > 7 or count.max() > 0


@pytest.mark.parametrize(
    "options",
    [
        {"threshold_acc": 0.3},
        {"threshold_single": 0.1},
        {"threshold_acc": 0.0},
        {"threshold_single": 0.0},
        {"steps": 2},
        {"steps": 1},
    ],
)
def test_thresholds_and_fewer_steps_than_the_tree_is_deep(options, interpreted):
    steps = {k: options.pop(k) for k in ("steps",) if k in options}
    given = problem(TREE, 9, 8, 5, **{k: v - 1 for k, v in steps.items()})
    _, index, count, _ = check(given, **options)
    assert (count < index.shape[1]).all()


def test_a_large_vocabulary(interpreted):
    check(problem(CHAIN, 151_936, 1, spread=6.0, like_target=True))


def test_given_draft_probs_are_taken_away_but_not_from_the_deepest_row(interpreted):
    given = problem(CHAIN, 50, 8, 3, like_target=True, spread=4.0)
    given["draft_probs"] = given["target_probs"].clone()
    spare = next(token for token in range(50) if token not in given["candidates"])
    given["draft_probs"][..., spare] = 0  # all but this token is taken away
    predicts, index, count, _ = check(given)
    for tokens in emitted(predicts, index, count):
        assert (tokens[-1] == spare) == (len(tokens) < 4)
    assert count.max() == 3
    assert count.min() < 3


@pytest.mark.parametrize("coin", [0.0, 1 - 2.0**-24, 1.0])
def test_a_token_without_probability_is_never_emitted(coin, interpreted):
    """At coin 0 too, where `coin <= p` would accept it; and if nothing is left to draw from."""
    given = problem(TREE, 6, 4)
    given["target_probs"].zero_()
    for b, likely in enumerate(([0], [2, 5], [5], [1, 2, 3])):
        given["target_probs"][b, :, likely] = 1 / len(likely)
    given["candidates"][:] = torch.tensor([0, 4, 0, 1, 3, 3, 2, 4])
    given["uniform_samples"].fill_(coin)
    given["uniform_samples_for_final_sampling"].fill_(coin)
    for options in ({}, {"threshold_single": 0.0}):
        predicts, index, count, _ = check(given, **options)
        for b, tokens in enumerate(emitted(predicts, index, count)):
            assert all(given["target_probs"][b, 0, token] > 0 for token in tokens)


def test_a_rest_that_rounds_away_draws_the_most_likely(interpreted):
    given = problem((-1, 0), 5, 1)
    given["target_probs"][0] = torch.tensor([0, 0, 1 - 2.0**-24, 0, 0])
    given["candidates"][0, 1] = 2
    given["uniform_samples"].fill_(1 - 2.0**-24)
    predicts, index, count, _ = check(given)
    assert emitted(predicts, index, count) == [[2]]
    assert count.tolist() == [0]


def test_nan_draws_an_id_of_the_vocabulary(interpreted):
    given = problem(TREE, 6, 2)
    given["target_probs"][0] = torch.nan
    predicts, index, count, _ = check(given)
    assert emitted(predicts, index, count)[0] == [0]


def test_no_requests(interpreted):
    assert run(kernel, problem(TREE, 5, 0))[1].shape == (0, 4)


def test_arguments():
    given = problem(TREE, 5, 2)
    for name, wrong, error in (
        ("candidates", torch.zeros(2, 3, dtype=torch.int64), ValueError),
        ("candidates", torch.zeros(2, 8), TypeError),
        ("target_probs", given["target_probs"].double(), TypeError),
        ("uniform_samples", torch.zeros(8, 2).t(), ValueError),
    ):
        with pytest.raises(error, match=name):
            run(tree_sampling, {**given, name: wrong})


# -- the distribution

PROBS = torch.tensor(
    [[0.4, 0.3, 0.2, 0.1, 0.0], [0.1, 0.1, 0.1, 0.1, 0.6], [0.0, 0.5, 0.25, 0.25, 0.0]]
)
"""The distribution after the root, after token 0 and after any other first token."""


def small_tree():
    """Two drafts after the root, 0 and 2; then 4 after the 0, and 1 and 3 after the 2."""
    parents, tokens = (-1, 0, 0, 1, 2, 2), (9, 0, 2, 4, 1, 3)
    rows = torch.stack([PROBS[i] for i in (0, 1, 2, 2, 2, 2)])
    return parents, torch.tensor(tokens), rows


def first_two(module, coins, finals):
    """Return how often each first token, and each second token after an accepted 0 or 2, came."""
    parents, tokens, rows = small_tree()
    batch_size = len(coins)
    given = {
        **pointers(parents, batch_size),
        "candidates": tokens.expand(batch_size, -1).contiguous(),
        "uniform_samples": coins,
        "uniform_samples_for_final_sampling": finals,
        "target_probs": rows.expand(batch_size, -1, -1).contiguous(),
        "draft_probs": torch.zeros(batch_size, *rows.shape),
        "steps": 3,
    }
    first, second = torch.zeros(5), {0: torch.zeros(5), 2: torch.zeros(5)}
    for y in emitted(*run(module, given)[:3]):
        first[y[0]] += 1
        if len(y) > 1:
            second[y[0]][y[1]] += 1
    return first, second


def pvalues(first, second):
    """Chi-square of what came against what should; 0 if something impossible came, or nothing."""
    found = []
    for counts, p in ((first, PROBS[0]), (second[0], PROBS[1]), (second[2], PROBS[2])):
        if counts[p == 0].any() or not counts.any():
            return [0.0]
        counts, p = counts[p > 0].double(), p[p > 0].double()
        found.append(float(chisquare(counts, p / p.sum() * counts.sum()).pvalue))
    return found


def coins_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((count, 6), generator=generator), torch.rand(count, generator=generator)


def test_distribution_by_enumeration():
    """Coins on a grid of 20 x 20 x 20, probabilities in steps of 1/20: every frequency is exact."""
    grid = (torch.arange(20) + 0.5) / 20
    root, node, final = (c.reshape(-1) for c in torch.meshgrid(grid, grid, grid, indexing="ij"))
    coins = torch.zeros(len(root), 6)
    coins[:, 0], coins[:, 1:] = root, node[:, None]
    first, second = first_two(reference, coins, final)
    # 0 and 2 are the root's drafts: accepted with their own probability
    assert second[0].sum() == 0.4 * 8000
    assert second[2].sum() == 0.2 * 8000
    # the final coin chooses among the rest, in sevenths or ninths of a grid of 20: to 1 / 20
    torch.testing.assert_close(first / 8000, PROBS[0], atol=0.4 / 20, rtol=0)
    torch.testing.assert_close(second[0] / second[0].sum(), PROBS[1], atol=0.4 / 20, rtol=0)
    assert second[2][0] == second[2][4] == 0


def test_distribution_of_the_reference():
    assert min(pvalues(*first_two(reference, *coins_of(5_000, 0)))) > 1e-3


def test_distribution_of_the_kernel_is_the_references(interpreted):
    (first, second), (same, also) = (first_two(m, *coins_of(60, 1)) for m in (kernel, reference))
    assert torch.equal(first, same)
    assert all(torch.equal(second[y], also[y]) for y in (0, 2))
    assert (first[:4] > 0).all()


class Biased:
    """Compares the coin with each sibling's own probability, not with the mass walked so far."""

    @staticmethod
    def tree_speculative_sampling_target_only(target_probs, draft_probs, candidates, **given):
        first = target_probs.clone()
        # a coin past the first sibling accepts the second only if it lies below its probability
        first[:, 0, 2] = (first[:, 0, 2] - first[:, 0, 0]).clamp(min=0)
        reference.tree_speculative_sampling_target_only(
            target_probs=first, draft_probs=draft_probs, candidates=candidates, **given
        )


def test_twin_a_biased_walk_has_another_distribution():
    assert min(pvalues(*first_two(Biased, *coins_of(5_000, 0)))) < 1e-6


@triton.jit
def _forgets_drafts(p_target, p_draft, o_v, V, has_drafts):
    # the rejected drafts stay in the draw
    b_target = tl.load(p_target + o_v, mask=o_v < V, other=0.0)
    return (b_target * (2.0**48)).to(tl.int64), b_target


def test_twin_a_draw_that_forgets_the_rejected_is_caught(interpreted, monkeypatch):
    monkeypatch.setattr(kernel, "_rest", _forgets_drafts)
    with pytest.raises(AssertionError):
        check(problem(TREE, 7, 12))
