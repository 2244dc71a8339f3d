"""Options of a request, in `custom_params`, as SGLang's HTTP server parses them."""

from __future__ import annotations

import json

from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import refusal, written

from outrider.serving.profile import RequestOptions, request_options

USUAL = {"max_drafts": 3, "drafter": "ngram", "explain": False}
DRAFTERS = ["adaptive", "ngram", "none"]
WITHIN = written(USUAL).map(lambda text: f'{{"outrider": {text}}}')


def parsed(text):
    """Return what the server's parser makes of a body; what it refuses is not our door."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        assume(False)


@given(WITHIN | written({"outrider": USUAL, "a": 1}, USUAL), st.booleans())
def test_options_are_taken_or_refused(text, reports):
    with refusal(ValueError):
        found = request_options(parsed(text), DRAFTERS, reports)
        assert isinstance(found, RequestOptions)
        assert found.max_drafts is None or (type(found.max_drafts) is int and found.max_drafts >= 0)
        assert found.drafter is None or found.drafter in DRAFTERS
        assert type(found.explain) is bool
        assert reports or not found.explain
