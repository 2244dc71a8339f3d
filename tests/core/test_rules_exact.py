"""Every rule with every kind of draft, enumerated: the emitted tokens have the target's
distribution, or the test fails. Each biased twin, a mistake seen in the wild, must fail the same
test."""

from __future__ import annotations

import pytest
import torch
from exact import (
    TOLERANCE,
    ScriptedCoins,
    assert_exact,
    greedy_chain,
    sampled_chains,
    sibling_trees,
    step_distribution,
    table,
)

from outrider.core import (
    ROOT,
    Draft,
    PointMass,
    Proposal,
    Sampled,
    Siblings,
    TargetDistribution,
    Verdict,
    chain,
    verify_block,
    verify_match,
    verify_residual,
)

SEEDS = range(4)
TREES = {
    "two children": (ROOT, ROOT),
    "three children": (ROOT, ROOT, ROOT),
    "child of the second": (ROOT, ROOT, 1),
    "children of both, interleaved": (ROOT, ROOT, 0, 1),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", [verify_residual, verify_block])
def test_sampled_chain(rule, k, seed):
    v = 6 if k < 3 else 4
    p, q = table(v, seed, zeros=seed % 2 == 1), table(v, seed + 100, zeros=seed % 2 == 0)
    assert_exact(rule, p, sampled_chains(q, v, k), v, k + 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", [verify_residual, verify_block])
def test_draft_equal_to_target_keeps_all(rule, seed):
    p = table(4, seed)
    drafts = sampled_chains(p, 4, 2)
    assert_exact(rule, p, drafts, 4, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", [verify_residual, verify_block])
def test_chain_that_stops_by_its_drafts(rule, seed):
    """K may depend on the drafts so far: ragged by confidence."""
    p, q = table(4, seed), table(4, seed + 100)

    def go_on(drafts):
        return len(drafts) < 3 and (not drafts or q(drafts[:-1])[drafts[-1]] > 0.2)

    assert_exact(rule, p, sampled_chains(q, 4, go_on), 4, 4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", [verify_match, verify_residual, verify_block])
def test_point_mass_chain(rule, k, seed):
    p, q = table(4, seed, zeros=True), table(4, seed + 100)
    assert_exact(rule, p, greedy_chain(q, k), 4, k + 1, all_rows=rule is verify_match)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("rule", [verify_match, verify_residual])
@pytest.mark.parametrize("tokens", [(0, 1, 2, 3), (1, 1, 0, 2)], ids=["distinct", "duplicate"])
def test_point_mass_tree(rule, shape, seed, tokens):
    parents = TREES[shape]
    p = table(4, seed)
    drafts = [(Draft(tokens[: len(parents)], parents, PointMass()), 1.0)]
    assert_exact(rule, p, drafts, 4, 3, all_rows=rule is verify_match)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("replacement", [True, False])
def test_sibling_tree(replacement, shape, seed):
    p, q = table(4, seed, zeros=seed % 2 == 1), table(4, seed + 100)
    drafts = sibling_trees(q, TREES[shape], replacement)
    assert_exact(verify_residual, p, drafts, 4, 3)


def test_sibling_chain_equals_sampled_chain():
    p, q = table(4, 1), table(4, 2)
    siblings = sibling_trees(q, (ROOT, 0), replacement=True)
    a = step_distribution(verify_residual, p, siblings, 4, 3)
    b = step_distribution(verify_residual, p, sampled_chains(q, 4, 2), 4, 3)
    assert (a - b).abs().max() < TOLERANCE


def expected_accepted(rule, p, drafts, v):
    expected = []

    def spy(target: TargetDistribution, proposal: Proposal, coins: ScriptedCoins) -> Verdict:
        verdict = rule(target, proposal, coins)
        mass = coins.mass * verdict.num_accepted_drafts
        weights = torch.tensor([weight for _, weight in drafts], dtype=torch.float64)
        expected.append((mass.reshape(len(drafts), -1).sum(-1) * weights).sum().item())
        return verdict

    step_distribution(spy, p, drafts, v, 1)
    return expected[0]


def test_block_keeps_more_than_residual():
    """The example of Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), K = 2 gives 10/9 and 11/9."""
    third = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    drafts = sampled_chains(lambda _: third.flip(0), 2, 2)
    residual, block = (
        expected_accepted(rule, lambda _: third, drafts, 2)
        for rule in (verify_residual, verify_block)
    )
    assert residual == pytest.approx(10 / 9, abs=1e-12)
    assert block == pytest.approx(11 / 9, abs=1e-12)


# Biased twins


def test_twin_argmax_draft_as_if_sampled():
    p, q = table(4, 0), table(4, 100)
    ((draft, _),) = greedy_chain(q, 2)
    lying = Draft(draft.tokens, draft.parents, Sampled(torch.stack([q(()), q(draft.tokens[:1])])))
    for rule in (verify_residual, verify_block):
        with pytest.raises(AssertionError, match="max"):
            assert_exact(rule, p, [(lying, 1.0)], 4, 3)


def test_twin_unlikely_draft_dropped():
    """A draft dropped for being what it is: the ones that stay are not drawn from q any more."""
    p, q = table(4, 0), table(4, 100)
    drafts = []
    for draft, weight in sampled_chains(q, 4, 1):
        keep = q(())[draft.tokens[0]] > 0.2
        drafts.append((draft if keep else chain(()), weight))
    with pytest.raises(AssertionError, match="max"):
        assert_exact(verify_residual, p, drafts, 4, 2)


def cumulative_walk(p: TargetDistribution, proposal: Proposal, coins: ScriptedCoins) -> Verdict:
    """Accept one of the siblings by the cumulated p of their tokens: right if they differ."""
    probs, batch = p.probs(), proposal.batch_size
    roots = list(proposal.root_rows)
    accepted = torch.full((batch, 1), -1)
    used = torch.zeros(batch, dtype=torch.float64)
    rows = torch.tensor(roots)
    left = probs[roots].clone()
    for j in range(proposal.num_drafts[0]):
        x = proposal.tokens[torch.tensor(proposal.starts[:-1]) + j]
        p_x = probs[roots].gather(-1, x[:, None]).squeeze(-1)
        ratio = torch.where(used < 1, p_x / (1 - used), 1.0).clamp(0, 1)
        yes = coins.accept(ratio, p.seeds[roots], p.positions[roots], torch.full((batch,), j))
        yes &= accepted[:, 0] < 0
        accepted[yes, 0] = j
        rows[yes] = torch.tensor(roots)[yes] + 1 + j
        used += p_x
        left[torch.arange(batch), x] = 0
    mass = left.sum(-1, keepdim=True)
    after = torch.where(accepted < 0, torch.where(mass > 0, left / mass, probs[roots]), probs[rows])
    return Verdict(accepted, coins.draw(after.log(), p.seeds[roots], p.positions[rows]))


def sibling_pair(*tokens):
    return [(Draft(tokens, (ROOT,) * len(tokens), PointMass()), 1.0)]


def test_twin_duplicate_siblings_in_a_cumulative_walk():
    p = table(4, 3)
    assert_exact(cumulative_walk, p, sibling_pair(0, 1), 4, 1)
    with pytest.raises(AssertionError, match="max"):
        assert_exact(cumulative_walk, p, sibling_pair(1, 1), 4, 1)


def test_twin_without_replacement_judged_as_with():
    p, q = table(4, 0), table(4, 100)
    honest = sibling_trees(q, (ROOT, ROOT), replacement=False)
    lying = [
        (Draft(d.tokens, d.parents, Siblings(d.distribution.q, replacement=True)), weight)
        for d, weight in honest
    ]
    assert_exact(verify_residual, p, honest, 4, 2)
    with pytest.raises(AssertionError, match="max"):
        assert_exact(verify_residual, p, lying, 4, 2)


def test_wrong_pairing_is_a_type_error():
    p, q = table(4, 0), table(4, 1)
    siblings = sibling_trees(q, (ROOT, ROOT), replacement=True)[:1]
    with pytest.raises(TypeError, match="chains"):
        step_distribution(verify_block, p, siblings, 4, 1)
    with pytest.raises(TypeError, match="branches"):
        step_distribution(verify_block, p, sibling_pair(0, 1), 4, 1)
