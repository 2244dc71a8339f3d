"""A tree of what may come: it grows, is walked, and drafts are chosen from it."""

from __future__ import annotations

import pytest

from outrider.core import AheadTree, DraftFault
from outrider.core.ahead import ENOUGH, MAX_NODES

#        1 ------- 2 --- 4
# text <    \        \-- 5
#        3   6 --- 7
ADDED = [
    (0, 1, [1, 3], [0.8, 0.1]),
    (1, 3, [2, 6], [0.5, 0.4]),
    (3, 5, [4, 5], [0.6, 0.3]),
    (4, 7, [7], [0.9]),
]
PATHS = {(1,), (3,), (1, 2), (1, 6), (1, 2, 4), (1, 2, 5), (1, 6, 7)}


def tree(added=ADDED):
    found = AheadTree(5)
    for one in added:
        found.add(*one)
    return found


def paths(draft):
    found = []
    for node in range(len(draft.tokens)):
        path, at = [], node
        while at != -1:
            path.insert(0, draft.tokens[at])
            at = draft.parents[at]
        found.append(tuple(path))
    return set(found)


@pytest.mark.parametrize("walked", [(), (1,), (1, 2), (1, 6), (3,), (1, 2, 4)])
def test_what_follows_is_every_path_that_goes_on_and_no_other(walked):
    found = tree()
    assert found.follow(walked)
    assert found.length == 5 + len(walked)
    expected = {p[len(walked) :] for p in PATHS if p[: len(walked)] == walked} - {()}
    assert paths(found.best(99, trees=True)) == expected
    assert found.is_leaf == (not expected)


@pytest.mark.parametrize("walked", [(2,), (1, 3), (1, 2, 4, 9), (9,)])
def test_a_text_that_went_another_way(walked):
    assert not tree().follow(walked)


def test_nodes_that_come_late_are_walked_too():
    found = tree(ADDED[:2])
    assert not found.follow((1, 6, 7, 8))
    assert found.length == 7
    found.add(*ADDED[3])
    found.add(7, 8, [8], [0.5])
    assert found.follow((7, 8))
    assert found.is_leaf
    found.add(8, 9, [9], [0.5])
    assert found.best(3, trees=False).tokens == (9,)


def test_the_best_part_is_the_likeliest():
    # chances: 1 .8, 3 .1, 2 .4, 6 .32, 4 .24, 5 .12, 7 .288
    found = tree()
    assert paths(found.best(3, trees=True)) == {(1,), (1, 2), (1, 6)}
    assert found.best(3, trees=True).confidences == (0.8, 0.5, 0.4)
    assert found.best(9, trees=False).tokens == (1, 2, 4)
    assert found.best(9, trees=False).confidences == (0.8, 0.5, 0.6)
    assert found.best(2, trees=False).tokens == (1, 2)
    assert found.best(0, trees=False).tokens == found.best(0, trees=True).tokens == ()


def test_nodes_out_of_reach_are_forgotten():
    found, at, number = AheadTree(0), 0, 1
    for step in range(ENOUGH):
        found.add(at, number, [step, -1, -2], [0.5, 0.3, 0.2])
        at, number = number, number + 3
        assert found.follow((step,))
        assert len(found._nodes) <= ENOUGH + 3
    found.add(2, number, [7], [1.0])  # of a sibling long ago
    assert found.is_leaf


def test_a_tree_without_end_is_not_taken():
    found = AheadTree(0)
    for number in range(2 * MAX_NODES):
        found.add(number, number + 1, [1], [1.0])
    assert len(found._nodes) == MAX_NODES


def test_what_follows_a_node_is_said_once():
    found = tree()
    for _ in range(3):
        found.add(1, 3, [8, 9], [0.9, 0.05])
    assert paths(found.best(99, trees=True)) == PATHS


@pytest.mark.parametrize("first", [0, 1, 2])
def test_two_nodes_with_one_number_are_a_fault(first):
    """Else chances that are equal would compare nodes, which have no order."""
    found = tree(ADDED[:1])
    with pytest.raises(DraftFault, match="one number"):
        found.add(2, first, [9, 8], [0.5, 0.5])
    assert found.best(9, trees=True).tokens == (1, 3)


def test_tokens_beyond_the_vocabulary_are_left_out_with_what_follows_them():
    found = AheadTree(5, vocab_size=10)
    found.add(0, 1, [3, 10, 2**62], [0.1, 0.8, 0.1])
    found.add(2, 4, [5], [1.0])
    found.add(1, 5, [9], [1.0])
    assert found.best(9, trees=True).tokens == (3, 9)
