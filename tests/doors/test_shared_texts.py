"""What tenants share: names and texts that others choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import texts

from outrider.drafters.lookup import Texts
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.shared import LEAST, PARTS, SharedTexts

MOST = PARTS * LEAST
OUTPUTS = st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), max_size=600)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile the loops before an input is timed."""
    NgramDrafter()
    shared = SharedTexts(MOST, Texts())
    shared.add("", [1, 2, 3, 4])
    shared.draft("", (shared.texts, shared.of("")[0]), 1, 1, 0.0, True)


@given(st.lists(st.tuples(texts(), OUTPUTS), max_size=12), st.booleans())
def test_texts_are_bounded_and_stay_with_their_tenant(added, trees):
    shared, ending = SharedTexts(MOST, Texts()), Texts()
    mine: dict[str, list[list[int]]] = {}
    for tenant, text in added:
        shared.add(tenant, text)
        mine.setdefault(tenant, []).append(text)
    # a row has a separator behind each text
    assert sum(shared.texts.lengths) <= MOST + len(added)
    for tenant, text in added:
        row = ending.open()
        ending.extend(row, text[:5])
        draft = shared.draft(tenant, (ending, row), 4, 8, 0.0, trees)
        assert set(draft.tokens) <= {token for one in mine[tenant] for token in one}
        ending.close(row)
