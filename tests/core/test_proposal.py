"""Proposals: ragged, chain and tree in one type, and checked when made."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import (
    ROOT,
    Draft,
    DraftFault,
    PointMass,
    Proposal,
    Sampled,
    Siblings,
    Unsupported,
    chain,
    likeliest,
    survival,
    verify,
)


@st.composite
def trees(draw):
    size = draw(st.integers(0, 6))
    tokens = tuple(draw(st.integers(0, 9)) for _ in range(size))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    return Draft(tokens, parents, PointMass())


@given(st.lists(trees(), min_size=1, max_size=5))
def test_rows_lead_back_to_their_drafts(drafts):
    proposal = Proposal.of(drafts)
    assert proposal.num_rows == sum(len(d.tokens) + 1 for d in drafts)
    assert sorted([*proposal.root_rows, *proposal.draft_rows]) == list(range(proposal.num_rows))
    paths = proposal.paths()
    for r, draft in enumerate(drafts):
        assert paths[proposal.root_rows[r]] == ()
        for i, parent in enumerate(draft.parents):
            flat = proposal.starts[r] + i
            path, node = [], i
            while node != ROOT:
                path.insert(0, draft.tokens[node])
                node = draft.parents[node]
            row = proposal.draft_rows[flat]
            assert paths[row] == tuple(path)
            assert proposal.row_depths[row] == proposal.depths[flat] == len(path)
            assert proposal.row_owners[row] == proposal.owners[flat] == r
            elders = [j for j in range(i) if draft.parents[j] == parent]
            assert proposal.ranks[flat] == len(elders)
            above = proposal.root_rows[r] if parent == ROOT else row - i + parent
            assert proposal.parent_rows[flat] == above
    assert proposal.max_depth == max((len(p) for p in paths), default=0)


@given(st.lists(trees(), min_size=1, max_size=5), st.randoms())
def test_join_puts_parts_in_their_places(drafts, random):
    where: dict[int, list[int]] = {}
    for r in range(len(drafts)):
        where.setdefault(random.randrange(3), []).append(r)
    parts = [(rs, Proposal.of([drafts[r] for r in rs])) for rs in where.values()]
    joined, whole = Proposal.join(parts), Proposal.of(drafts)
    assert joined.tokens.tolist() == whole.tokens.tolist()
    assert joined.num_drafts.tolist() == whole.num_drafts.tolist()
    assert joined.parents.tolist() == whole.parents.tolist()
    assert joined.distributions == whole.distributions


def test_unclaimed():
    proposal = Proposal.unclaimed([4, 5, 6], [2, 0, 1], [ROOT, 0, ROOT])
    assert proposal.is_chain
    assert proposal.distributions == (PointMass(),) * 3
    assert proposal.paths() == ((), (4,), (4, 5), (), (), (6,))
    assert not Proposal.of([Draft((1, 2), (ROOT, ROOT), PointMass())]).is_chain


def test_confidences_travel_with_the_drafts():
    sure = Proposal.of([chain([4, 5], confidences=[0.9, 0.5]), chain([6])])
    assert sure.confidences.tolist() == [0.9, 0.5, 1.0]
    other = Proposal.of([chain([7], confidences=[0.25])])
    joined = Proposal.join([([0, 2], sure), ([1], other)])
    assert joined.confidences.tolist() == [0.9, 0.5, 0.25, 1.0]
    assert [draft.sure for draft in joined.drafts()] == [(0.9, 0.5), (0.25,), (1.0,)]
    claimed = chain([1], Sampled(torch.tensor([[0.0, 1.0]])))
    assert claimed.keep([0]) == Draft((1,), (ROOT,), PointMass(), (1.0,))


@given(st.lists(trees(), min_size=1, max_size=5))
def test_drafts_go_in_and_come_out(drafts):
    found = Proposal.of(drafts).drafts()
    assert [(d.tokens, d.parents, d.distribution) for d in found] == [
        (d.tokens, d.parents, d.distribution) for d in drafts
    ]


@given(trees(), st.integers(0, 6), st.data())
def test_the_likeliest_drafts_hang_together(draft, most, data):
    chances = [data.draw(st.floats(0, 1)) for _ in draft.tokens]
    worth = survival(draft.parents, chances)
    for i, (parent, chance) in enumerate(zip(draft.parents, chances, strict=True)):
        assert worth[i] == chance * (1.0 if parent == ROOT else worth[parent])
    nodes = likeliest(worth, most)
    assert len(nodes) == min(most, len(worth))
    assert all(draft.parents[node] in (ROOT, *nodes) for node in nodes)
    left = set(range(len(worth))) - set(nodes)
    assert all(worth[node] >= worth[other] for node in nodes for other in left)


@given(trees(), st.randoms())
def test_what_is_kept_keeps_its_path(draft, random):
    nodes: list[int] = []
    for node, parent in enumerate(draft.parents):
        if (parent == ROOT or parent in nodes) and random.random() < 0.7:
            nodes.append(node)
    before, after = (Proposal.of([d]).paths()[1:] for d in (draft, draft.keep(nodes)))
    assert after == tuple(before[node] for node in nodes)


@given(st.lists(trees(), min_size=1, max_size=4), st.randoms())
def test_some_drafts_of_a_batch(drafts, random):
    """What is taken is what each request's drafts keep."""
    kept: list[list[int]] = []
    for draft in drafts:
        nodes: list[int] = []
        for node, parent in enumerate(draft.parents):
            if (parent == ROOT or parent in nodes) and random.random() < 0.7:
                nodes.append(node)
        kept.append(nodes)
    whole = Proposal.of(drafts)
    flat = [int(whole.starts[r]) + node for r, nodes in enumerate(kept) for node in nodes]
    taken = whole.take(np.array(flat, np.int64))
    expected = [draft.keep(nodes) for draft, nodes in zip(drafts, kept, strict=True)]
    assert taken.drafts() == expected
    again = Proposal.found(taken.tokens.numpy(), taken.num_drafts, taken.parents, taken.confidences)
    assert again.drafts() == expected


def test_what_is_worked_out_is_kept():
    proposal = Proposal.of([chain((1, 2))])
    assert proposal.starts is proposal.starts
    assert "where each request's drafts begin" in Proposal.starts.__doc__


@pytest.mark.parametrize("confidences", [(0.5,), (0.5, 1.5), (0.5, float("nan")), (-0.1, 0.5)])
def test_confidences_that_are_none_are_faults(confidences):
    with pytest.raises(DraftFault, match="from 0 to 1"):
        Proposal.of([chain([4, 5], confidences=confidences)])


def test_empty():
    proposal = Proposal.empty(3)
    assert (proposal.batch_size, proposal.num_rows, proposal.max_depth) == (3, 3, 0)
    assert proposal.dense_q(torch.zeros(1, 5)).shape == (0, 5)


def test_to_another_device():
    proposal = Proposal.of([chain((1, 2))])
    assert proposal.to(torch.device("cpu")) is proposal
    moved = proposal.to(torch.device("meta"))
    assert moved.tokens.device.type == "meta"
    assert moved.parents.tolist() == proposal.parents.tolist()


def ids(*tokens):
    return torch.tensor(tokens, dtype=torch.int64)


Q = torch.full((2, 5), 0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Proposal(ids(1), (2,), (ROOT, 0), (PointMass(),)),
        lambda: Proposal(ids(1, 2), (2,), (ROOT,), (PointMass(),)),
        lambda: Proposal(ids(1), (1,), (ROOT,), ()),
        lambda: Proposal(ids(), (-1, 1), (), (PointMass(), PointMass())),
        lambda: Proposal(ids(1, 2), (2,), (ROOT, 1), (PointMass(),)),
        lambda: Proposal(ids(1, 2), (2,), (-2, 0), (PointMass(),)),
        lambda: Proposal(ids(1, 2), (2,), (ROOT, ROOT), (Sampled(Q),)),
        lambda: Proposal(ids(1), (1,), (ROOT,), (Sampled(Q),)),
        lambda: Proposal(ids(1), (1,), (ROOT,), (Siblings(Q, True),)),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(DraftFault):
        make()


def test_dense_q_without_replacement_drops_elders():
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    draft = Draft((0, 2, 1), (ROOT, ROOT, 0), Siblings(q.expand(3, 3), replacement=False))
    found = Proposal.of([chain(()), draft]).dense_q(q)
    expected = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.6, 0.4], [0.5, 0.3, 0.2]]).double()
    torch.testing.assert_close(found, expected)


def test_unknown_rule():
    with pytest.raises(Unsupported, match="choose one of match, residual, block"):
        verify("typical", None, Proposal.empty(1), None)


PAIRINGS = """
from outrider.core import Coins, PointMass, Proposal, Sampled, Siblings, TargetDistribution
from outrider.core import verify_block, verify_match, verify_residual

def ok(p: TargetDistribution, coins: Coins, a: Proposal[Sampled], b: Proposal[PointMass],
       c: Proposal[Siblings]) -> None:
    verify_block(p, a, coins)
    verify_block(p, b, coins)
    verify_match(p, c, coins)
    verify_residual(p, c, coins)

def wrong(p: TargetDistribution, coins: Coins, c: Proposal[Siblings]) -> None:
    verify_block(p, c, coins)
"""


def test_wrong_pairing_is_found_by_the_type_checker(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "pairing.py"
    file.write_text(PAIRINGS)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(file)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    errors = [line for line in found.splitlines() if "error:" in line]
    assert len(errors) == 1, found
    assert 'Argument 2 to "verify_block"' in errors[0]
    assert "Siblings" in errors[0]


def test_a_lookup_without_branches_is_told_to_be_a_chain():
    parts = np.array([7, 8, 9]), np.array([2, 1]), np.array([-1, 0, -1]), np.ones(3)
    assert Proposal.found(*parts, trees=False).is_chain
    assert "is_chain" not in vars(Proposal.found(*parts))  # it has to look


def test_drafts_on_a_device_are_taken_there():
    whole = Proposal.unclaimed([7, 8, 9], [2, 1], [-1, 0, -1])
    taken = whole.to(torch.device("meta")).take(np.array([0, 2]))
    assert taken.tokens.is_meta
    assert taken.num_drafts.tolist() == [1, 1]
