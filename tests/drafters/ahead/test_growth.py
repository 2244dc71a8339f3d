"""Trees grow best first, follow the text, keep their caches, and foresee what the coins decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core import AheadTree, KeyedCoins, Request, SamplingParams
from outrider.drafters.ahead import Growth
from outrider.engines.transformers.runner import Runner

PROMPT = (1, 40, 7, 22, 9)


@pytest.fixture(scope="module")
def runner(load):
    return Runner(load("tiny-target"))


def request(seed=3, **sampling):
    return Request(0, PROMPT, SamplingParams(**sampling), seed)


def plain(runner, asked, count):
    """Return what plain decoding emits."""
    from outrider.core import Rows, target_distribution

    sequence, made = runner.open(), Request(1, asked.prompt, asked.sampling, asked.seed)
    unread = list(made.prompt)
    for _ in range(count):
        logits = runner.extend([(sequence, unread)])
        rows = Rows([made], [0], [0], lambda: [()])
        unread = target_distribution(logits, rows).draw(KeyedCoins()).tolist()
        made.extend(unread, None)
    runner.close(sequence)
    return made.output


def keys(grown):
    return {one.key for one in grown}


def tokens(growth, key="a"):
    """Return all tokens that may come, in the order of their tree."""
    root = growth._texts[key].root
    return [token for node in (root, *root.below()) for token in node.tokens]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}])
def test_the_target_itself_as_draft_foresees_every_token(runner, sampling):
    """Caches stay right through commits of any length: the likeliest path is plain decoding."""
    growth = Growth(runner, KeyedCoins(), width=4, max_nodes=512, min_chance=0.0)
    before = runner.pool.used_pages
    growth.open("a", request(**sampling))
    expected, at = plain(runner, request(**sampling), 40), 0
    for count in (1, 3, 2, 1, 4, 2, 3):
        while not any(len(p) > count for p in _first_paths(growth)):
            assert keys(growth.grow()) == {"a"}
        path = _first_paths(growth)[0][: count + 1]
        assert path == expected[at : at + len(path)]
        growth.commit("a", expected[at : at + count])
        at += count
        assert growth.length("a") == len(PROMPT) + at
    growth.close("a")
    assert runner.pool.used_pages == before  # no page is lost


def test_twin_other_coins_do_not_foresee_it(runner):
    growth = Growth(runner, KeyedCoins(), width=4)
    growth.open("a", request(seed=4, temperature=1.0))
    for _ in range(8):
        growth.grow()
    expected = plain(runner, request(seed=3, temperature=1.0), 8)
    assert _first_paths(growth)[0][:8] != expected
    growth.close("a")


def _first_paths(growth):
    """Return the path of first children."""
    path, node = [], growth._texts["a"].root
    while node is not None and node.tokens:
        path.append(node.tokens[0])
        node = node.read.get(0)
    return [path]


def test_a_text_that_goes_another_way_begins_anew(runner):
    growth = Growth(runner, KeyedCoins())
    growth.open("a", request())
    for _ in range(4):
        growth.grow()
    known = growth._texts["a"].root.tokens
    other = next(token for token in range(50) if token not in known)
    growth.commit("a", [other])
    assert tokens(growth) == []
    growth.grow()
    fresh = Growth(runner, KeyedCoins())
    fresh.open("a", Request(0, (*PROMPT, other), SamplingParams(), 3))
    fresh.grow()
    assert tokens(growth) == tokens(fresh) != []
    growth.close("a"), fresh.close("a")


def test_trees_grow_best_first(runner):
    growth = Growth(runner, KeyedCoins(), width=2, max_nodes=24)
    growth.open("a", request())
    for _ in range(20):
        growth.grow()
    text = growth._texts["a"]
    nodes = text.root.below()
    read = [node.score for node in nodes]
    assert len(read) == 24
    # what is left unread is less likely than most of what was read
    left = [
        score
        for node in (text.root, *nodes)
        for place, score in enumerate(node.scores)
        if place not in node.read
    ]
    assert np.median(read) > np.median(left)
    assert not growth.grow()  # it has its most nodes
    growth.close("a")


def test_texts_share_a_pass_and_owners_take_turns(runner):
    growth = Growth(runner, KeyedCoins(), width=4)
    for key in ((1, "a"), (1, "b"), (1, "c"), (2, "d")):
        growth.open(key, request())
    assert keys(growth.grow(owner=lambda key: key[0])) == set(growth.names)
    for _ in range(3):
        owners = [one.key[0] for one in growth.grow(owner=lambda key: key[0])]
        assert sorted(owners) == [1, 1, 2, 2]  # half of the pass is the second owner's
    for key in growth.names:
        growth.close(key)


def test_a_long_prompt_is_read_in_pieces(runner, monkeypatch):
    monkeypatch.setattr("outrider.drafters.ahead.growth.MAX_CHUNK", 4)
    growth = Growth(runner, KeyedCoins())
    growth.open("a", request())
    assert growth.grow() == []
    assert growth.passes == 1
    assert keys(growth.grow()) == {"a"}
    whole = Growth(runner, KeyedCoins())
    whole.open("a", request())
    whole.passes = monkeypatch.undo() or 0
    whole.grow()
    assert tokens(growth) == tokens(whole) != []
    growth.close("a"), whole.close("a")


def test_what_cannot_be_read_is_left_alone(runner):
    growth = Growth(runner, KeyedCoins())
    growth.open("odd", Request(0, (1, 10**6), SamplingParams(), 0))
    growth.open("long", Request(0, (1,) * (runner.max_length + 1), SamplingParams(), 0))
    assert growth.grow() == []
    assert growth.passes == 0
    growth.close("odd"), growth.close("long")


def test_nothing_follows_an_end_token(runner):
    growth = Growth(runner, KeyedCoins())
    ends = frozenset(range(runner.vocab_size))
    growth.open("a", Request(0, PROMPT, SamplingParams(), 3, eos_token_ids=ends))
    growth.grow()
    assert growth.grow() == []
    growth.close("a")


class Faulty:
    """A model that has nothing to say to some prompts, or fails at them."""

    def __init__(self, runner, first, how):
        self.vocab_size, self.max_length = runner.vocab_size, runner.max_length
        self.open, self.close, self.fork = runner.open, runner.close, runner.fork
        self.adopt, self.runner, self.first, self.how = runner.adopt, runner, first, how

    def extend(self, segments):
        bad = [tokens[0] == self.first for _, tokens in segments]
        if self.how == "raises" and any(bad):
            raise MemoryError("no room for it")
        logits = self.runner.extend(segments).clone()
        logits[bad] = torch.nan
        return logits


@pytest.mark.parametrize("how", ["raises", "says NaN"])
def test_a_text_that_the_model_fails_at_is_forgotten_alone(runner, how):
    """The others of the same pass go on as if it had not been there."""
    growth, alone = Growth(Faulty(runner, 9, how), KeyedCoins()), Growth(runner, KeyedCoins())
    before = runner.pool.used_pages
    for key, prompt in {"a": PROMPT, "bad": (9, 3), "b": (1, 2, 3)}.items():
        growth.open(key, Request(0, prompt, SamplingParams(), 3))
        if key != "bad":
            alone.open(key, Request(0, prompt, SamplingParams(), 3))
    faulty = {}
    for _ in range(6):
        growth.grow()
        faulty |= growth.faulty
        alone.grow()
    assert faulty.keys() == {"bad"}
    assert growth.names == alone.names == ["a", "b"]
    assert all(set(tokens(growth, key)) & set(tokens(alone, key)) for key in ("a", "b"))
    for key in ("a", "b"):
        growth.close(key), alone.close(key)
    assert runner.pool.used_pages == before


def test_calibration_learns_who_is_right(runner):
    calibration = Growth(runner, KeyedCoins()).calibration

    def of(greedy):
        return calibration.of(np.full((1, 3), 0.95), np.array([greedy]))[0].tolist()

    assert of(True) == [0.95] * 3
    for _ in range(200):
        calibration.observe(0, 0.95, True, False)
    first, *others = of(True)
    assert first < 0.1
    assert others == [0.95] * 2  # of another rank, or drawn, nothing is known
    assert of(False) == pytest.approx([0.8, 0.16, 0.032])


@pytest.mark.parametrize("wrong", [{"width": 0}, {"fan_out": 0}, {"min_chance": 2.0}])
def test_options_are_checked(runner, wrong):
    with pytest.raises(ValueError, match="need"):
        Growth(runner, KeyedCoins(), **wrong)


def test_who_is_told_what_grows_has_the_same_tree(runner):
    growth, told, at = Growth(runner, KeyedCoins(), width=4), None, 0
    growth.open("a", request())
    expected = plain(runner, request(), 30)
    for count in (1, 2, 3, 0, 2):
        for _ in range(5):
            for _, began, parent, *nodes in growth.grow():
                told = AheadTree(began) if parent == 0 else told
                told.add(parent, *nodes)
        emitted = expected[at : at + count] or [next(iter(set(range(9)) - set(tokens(growth))))]
        at += count
        assert told.follow(emitted) == bool(count)
        growth.commit("a", emitted)
        if count:
            assert sorted(told.best(999, trees=True).tokens) == sorted(tokens(growth))
        else:  # the text went another way, and plain decoding goes on from there
            text = growth._texts["a"].request
            expected, at = (
                plain(runner, Request(0, (*text.prompt, *text.output), SamplingParams(), 3), 30),
                0,
            )
    growth.close("a")
