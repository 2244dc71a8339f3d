"""A tree of what may come: walking it, and choosing from it."""

from __future__ import annotations

import pytest

from outrider.core import AheadTree, Draft, PointMass, best_part

#        1 ------- 2 --- 4
# text <    \        \-- 5
#        3   6 --- 7
TREE = Draft(
    tokens=(1, 3, 2, 6, 4, 5, 7),
    parents=(-1, -1, 0, 0, 2, 2, 3),
    distribution=PointMass(),
    confidences=(0.8, 0.1, 0.5, 0.4, 0.6, 0.3, 0.9),
)


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
def test_below_has_every_path_that_goes_on_and_no_other(walked):
    expected = {p[len(walked) :] for p in paths(TREE) if p[: len(walked)] == walked} - {()}
    assert paths(AheadTree(5, TREE).below(walked)) == expected


@pytest.mark.parametrize("walked", [(2,), (1, 3), (1, 2, 4, 9), (9,)])
def test_a_text_that_went_another_way(walked):
    assert AheadTree(5, TREE).below(walked) is None


def test_below_keeps_how_sure_each_is():
    assert AheadTree(5, TREE).below((1,)).confidences == (0.5, 0.4, 0.6, 0.3, 0.9)


def test_the_best_part_is_the_likeliest():
    # chances: 1 .8, 3 .1, 2 .4, 6 .32, 4 .24, 5 .12, 7 .288
    assert paths(best_part(TREE, 3, trees=True)) == {(1,), (1, 2), (1, 6)}
    assert best_part(TREE, 9, trees=False).tokens == (1, 2, 4)
    assert best_part(TREE, 2, trees=False).tokens == (1, 2)
    assert best_part(TREE, 0, trees=False).tokens == ()
