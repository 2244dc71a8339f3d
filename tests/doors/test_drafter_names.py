"""Drafters by name, with options: of a profile, a command, a program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers, refusal, texts, values

from outrider.core import Unsupported
from outrider.drafters.registry import OURS, make_drafter

OPTIONS = {
    "ngram": ("min_n", "max_n"),
    "suffix": ("min_vote", "min_match", "max_match", "width", "shared_tokens"),
    "ahead": ("socket", "wait"),
    "none": (),
}


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile the loops before an input is timed."""
    make_drafter("ngram", {})


@given(texts(), st.dictionaries(texts(), values(), max_size=2))
def test_an_unknown_name_is_refused(name, options):
    with refusal(Unsupported):
        make_drafter(name, options)
        assert name in OURS


@given(st.data())
def test_options_are_taken_or_refused(data):
    name = data.draw(st.sampled_from(sorted(OURS)))
    known = st.sampled_from(OPTIONS[name]) if OPTIONS[name] else st.nothing()
    options = data.draw(st.dictionaries(known | texts(), numbers() | values(), max_size=4))
    with refusal(Unsupported):
        make_drafter(name, options)
