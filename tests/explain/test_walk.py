"""The walk says what happened, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from recordings import AHEAD, PROMPT, TREE, letters, recording, step

from outrider.explain import in_process
from outrider.explain.recording import ExplainOptions
from outrider.explain.walk import Walk, make_walk


@pytest.fixture(scope="module")
def tiny():
    """Return recordings of the tiny pair, by drafter."""
    made = {}

    def record(drafter: str, **more):
        key = (drafter, *more.items())
        if key not in made:
            options = ExplainOptions(PROMPT, drafter=drafter, max_tokens=60, max_drafts=5, **more)
            made[key] = in_process.record(options, lambda _: None)
        return made[key]

    return record


@pytest.mark.parametrize("drafter", ["model", "suffix", "adaptive", "none"])
def test_replay_gives_the_output(tiny, tokenizer, drafter):
    found, decode = tiny(drafter, temperature=0.7)
    walk = make_walk(found, decode, {})
    replayed = []
    for now in walk.steps:
        path = [now.drafts[token.draft] for token in now.emitted if token.draft is not None]
        replayed += [draft.id for draft in path]
        assert [draft.fate for draft in path] == ["accepted"] * len(path)
        if now.own is not None:
            replayed.append(now.own.id)
    assert replayed == walk.output_ids == found.output_ids
    assert walk.text == tokenizer("tiny-target").decode(found.output_ids)
    if drafter in ("model", "none"):  # the others may find nothing to say
        assert any(one.drafts for one in walk.steps) == (drafter == "model")


def test_totals_are_those_of_the_engine(tiny, load, tokenizer):
    import outrider

    walk = make_walk(*tiny("model"), {})
    ids = tokenizer("tiny-target").encode(PROMPT)
    done = outrider.generate(
        load("tiny-target"),
        ids,
        drafter=load("tiny-draft"),
        sampling={"max_tokens": 60},
        max_drafts=5,
    )
    totals, stats = walk.totals, done.stats
    assert (totals.drafted, totals.accepted) == (stats.drafted, stats.accepted)
    assert totals.passes == stats.steps + 1
    assert totals.tokens_per_pass == pytest.approx(stats.accept_length)
    assert f"{stats.accept_length:.2f} tokens a pass" in walk.equation
    # the numbers on show divide
    tokens, passes = map(int, re.search(r"(\d+) tokens? in (\d+) pass", walk.counted).groups())
    assert f"{tokens / passes:.2f} tokens a pass" in walk.equation
    assert (tokens, passes) == (totals.tokens - 1, totals.passes - 1)


def test_comparison_with_plain_decoding(tiny):
    found, decode = tiny("model", compare=True)
    assert make_walk(found, decode, {}).plain.equal
    wrong = [*found.plain_ids[:-1], found.plain_ids[-1] + 1]
    compared = make_walk(replace(found, plain_ids=wrong), decode, {}).plain
    assert not compared.equal
    assert compared.same == compared.total - 1


def test_probabilities_belong_to_their_tokens(tiny):
    walk = make_walk(*tiny("model"), {})
    for now in walk.steps:
        for token in now.emitted:
            best = token.alternatives[0]
            assert (best.id, best.text) == (token.id, token.text), "greedy takes the most likely"
            assert best.probability == pytest.approx(token.probability)


def test_fates_of_a_tree():
    (_, found) = make_walk(recording(TREE), letters, {}).steps
    # 12 stands behind the rejected 11: the target never came there
    assert [one.fate for one in found.drafts] == [
        *("accepted", "rejected", "unreached", "accepted", "rejected")
    ]
    assert found.ending == "bonus"
    assert found.branches
    assert [[found.drafts[i].id for i in run] for run in found.lost()] == [[11, 12], [14]]


@pytest.mark.parametrize(
    ("now", "ending", "fates"),
    [
        (step(emitted=(9,)), "plain", []),
        (step((7, 8), (-1, 0), (0, 1), (7, 8, 9)), "bonus", ["accepted"] * 2),
        (step((7, 8), (-1, 0), (0,), (7, 9)), "recovered", ["accepted", "rejected"]),
        (step((7, 8), (-1, 0), (), (9,)), "recovered", ["rejected", "unreached"]),
        # the text ends with draft 7: nobody asked what the target thinks of 8
        (step((7, 8), (-1, 0), (0,), (7,)), "ended", ["accepted", "unreached"]),
    ],
)
def test_endings(now, ending, fates):
    found = make_walk(recording(now), letters, {}).steps[1]
    assert found.ending == ending
    assert [one.fate for one in found.drafts] == fates


@pytest.mark.parametrize(
    "wrong",
    [
        step((7, 8), (-1, 0), (1,), (8, 9)),  # 8 without its parent
        step((7, 8), (-1, 0), (0,), (8, 9)),  # kept 7, emitted 8
        step((7,), (-1,), (0,), (7, 8, 9)),  # two tokens of the target's own
    ],
)
def test_twin_a_step_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="step 1"):
        make_walk(recording(wrong), letters, {})


def test_twin_steps_that_are_not_the_output_are_refused():
    found = recording(TREE)
    found.output_ids.insert(1, 99)  # as if the request had been begun anew in between
    with pytest.raises(ValueError, match="not the 5 of the output"):
        make_walk(found, letters, {})


def test_characters_of_several_tokens(tokenizer):
    """A character appears with its last byte, also in drafts that go another way."""
    tiny = tokenizer("tiny-target")
    bytes_of = [tiny.encode(text)[-3:] for text in ("€", "⏎")]
    euro, enter = bytes_of
    assert len(euro) == 3
    assert euro[0] == enter[0]
    now = step((*euro[1:], *enter[1:]), (-1, 0, -1, 2), (0, 1), (*euro[1:], 65))
    found = recording(now)
    found.output_ids[0] = euro[0]
    found.steps[0] = step(emitted=euro[:1], drafter="")
    walk = make_walk(found, in_process.local_decode(tiny), {})
    assert walk.text.startswith("€")
    assert [one.text for one in walk.steps[1].drafts] == ["", "€", "", "⏎"]


def test_tokenizers_that_tidy_up():
    """The text of a token is its own if what stands before changes with it."""

    def tidy(lists):
        return [text.replace(" t10", "t10") for text in letters(lists)]

    found = make_walk(recording(TREE), tidy, {}).steps[1]
    assert found.emitted[0].text == "t10"
    assert found.emitted[1].text == " t13"


def test_json_round_trip(tiny):
    walk = make_walk(*tiny("model"), {"date": "today"})
    text = json.dumps(walk.as_json())
    assert json.loads(text)["totals"]["tokens"] == 60
    assert Walk.model_validate_json(text) == walk


def test_hits_and_misses_of_a_draft_server():
    walk = make_walk(recording(*AHEAD), letters, {})
    assert walk.foreseen == "drafts made ahead: 2 of 4 steps, 1 miss, 1 none"
    assert [step.tally for step in walk.steps] == ["", "1/2 hit", "miss", "none", "1/1 hit"]
    assert [step.drafter for step in walk.steps] == ["", *["ahead"] * 4]
    assert make_walk(recording(TREE), letters, {}).foreseen == ""
