"""A recording of a generation, as `explain` gets it from an engine."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from strategies import refusal, texts, values

from outrider.explain.recording import Logprobs, Recording, StepRecord
from outrider.explain.walk import make_walk

IDS = st.integers(-2, 5) | st.integers()
LISTS = st.lists(IDS, max_size=5)
LOGPROBS = st.floats() | st.sampled_from((-0.1, 0.0, 1000.0))


def chains(drafts):
    """Return a step whose drafts are a chain, of which some are kept."""
    return st.integers(0, len(drafts)).map(
        lambda kept: (
            drafts, range(-1, len(drafts) - 1), range(kept), [*drafts[:kept], 7][: kept + 1],
        )
    )  # fmt: skip


SHAPES = st.lists(st.integers(0, 5), max_size=4).flatmap(chains) | st.tuples(
    LISTS, LISTS, LISTS, LISTS
)
STEPS = st.builds(
    lambda name, shape, seconds, foreseen: StepRecord(
        drafter=name, drafts=shape[0], parents=shape[1], kept=shape[2], emitted=shape[3],
        seconds=seconds, foreseen=foreseen,
    ),
    texts(), SHAPES, st.none() | st.floats(),
    st.sampled_from((None, "hit", "miss", "end", "none")),
)  # fmt: skip


@st.composite
def recordings(draw):
    steps = draw(st.lists(STEPS, max_size=5))
    output = [token for step in steps for token in step.emitted] + draw(LISTS | st.just([]))
    places = st.builds(
        Logprobs, LOGPROBS, st.lists(st.tuples(IDS, LOGPROBS), max_size=3).map(tuple)
    )
    size = draw(st.sampled_from((0, len(output), 2)))
    logprobs = draw(st.lists(places, min_size=size, max_size=size))
    settings = draw(st.dictionaries(texts(), values(), max_size=3))
    return Recording(
        draw(texts()), draw(LISTS), output, steps, logprobs, draw(texts()),
        draw(st.none() | st.floats()), draw(st.none() | LISTS), settings,
    )  # fmt: skip


@given(recordings(), texts())
def test_a_recording_is_a_walk_or_refused(recording, word):
    with refusal(ValueError, LookupError):
        walk = make_walk(recording, lambda lists: [word * min(len(ids), 3) for ids in lists], {})
        assert walk.output_ids == recording.output_ids
        json.dumps(walk.as_json())
