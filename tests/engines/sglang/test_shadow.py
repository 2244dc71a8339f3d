"""What the KV sanitizer knows of slots: names of texts, who wrote them, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.sglang.plugin import installed_hooks
from outrider.engines.sglang.sanitizer import pass_rows, sanitizer
from outrider.engines.sglang.sanitizer.shadow import Shadow, Violation, Write, text_hashes

tokens = st.lists(st.integers(0, 151_935), max_size=20)


@given(tokens, tokens)
def test_a_text_is_named_by_its_tokens_and_their_places(a, b):
    together, first = text_hashes(a + b), text_hashes(a)
    assert (together[: len(a)] == first).all()
    before = first[-1] if a else 0
    assert (together[len(a) :] == text_hashes(b, len(a), before)).all()
    if a != b:
        assert len(a) != len(b) or text_hashes(a)[-1] != text_hashes(b)[-1]


def slots(*numbers):
    return np.array(numbers, np.int64)


def written(text):
    """Return a shadow in which request a has written a text to slots 1, 2, 3."""
    shadow, at = Shadow("target", 8), slots(1, 2, 3)
    shadow.take(at)
    shadow.write(at, text_hashes(text), [Write("a", i, 7) for i in range(len(text))])
    return shadow


def test_a_text_is_read_where_it_was_written():
    shadow = written([5, 6, 7])
    shadow.read(slots(1, 2, 3), text_hashes([5, 6, 7]), "reader")
    assert shadow.num_read == 3
    shadow.read_own(slots(2, 3), "a", "reader", 1)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ([5, 6, 8], slots(1, 2, 3)),  # another token
        ([6, 7], slots(2, 3)),  # other positions
        ([5, 6, 7], slots(1, 3, 2)),  # another order
        ([5, 6, 7, 8], slots(1, 2, 3, 4)),  # more than was written
    ],
)
def test_another_text_is_refused(text, where):
    with pytest.raises(Violation, match="reader reads position"):
        written([5, 6, 7]).read(where, text_hashes(text), "reader")


def test_a_violation_says_who_wrote_and_who_reads():
    said = r"target: x reads position 2 in slot 3, .* request a at position 2 in pass 7 \(1 of 3"
    with pytest.raises(Violation, match=said):
        written([5, 6, 7]).read(slots(1, 2, 3), text_hashes([5, 6, 9]), "x")


def test_behind_the_known_text_a_slot_is_its_writers():
    shadow = written([5, 6, 7])
    assert shadow.is_written_by(3, "a")
    assert not shadow.is_written_by(4, "a")
    for request, start in (("b", 2), ("a", 1)):
        with pytest.raises(Violation):
            shadow.read_own(slots(3), request, "x", start)


def test_a_free_slot_is_not_written():
    with pytest.raises(Violation, match="writes position 3 to slot 4, which is free"):
        written([5, 6, 7]).write(slots(4), text_hashes([8], 3), [Write("b", 3, 8)])


def test_slots_are_given_once_and_freed_once():
    shadow = Shadow("target", 16, page_size=4)
    shadow.take(np.arange(4, 12))
    with pytest.raises(Violation, match="slot 8 is given out"):
        shadow.take(np.arange(8, 16))
    shadow.free(slots(8, 9))  # its whole page
    with pytest.raises(Violation, match="slot 8 is freed"):
        shadow.free(slots(8))
    shadow.take(np.arange(8, 12))
    with pytest.raises(Violation, match="free"):
        shadow.free(slots(0))
    shadow.clear()
    shadow.take(np.arange(4, 12))


def test_a_page_is_given_whole_and_its_tail_again():
    """A text of 6 tokens in pages of 4 has the rest of its second page."""
    shadow = Shadow("target", 16, page_size=4)
    shadow.take(slots(4, 5, 6, 7, 8, 9))
    shadow.write(slots(10), text_hashes([1], 6), [Write("a", 6, 1)])
    shadow.take(slots(10, 11, 12), tails=slots(10, 11))
    assert not shadow.is_written(10)
    with pytest.raises(Violation, match="slot 8 is given out"):
        shadow.take(slots(11), tails=slots(13, 14, 15))


class Key(SimpleNamespace):
    """A key of the prefix cache."""

    def __len__(self):
        return len(self.token_ids)


def test_what_the_prefix_cache_has_already_does_not_enter_it(monkeypatch):
    """SGLang 0.5.23 inserts a prompt again, to split its node: its slots may be free by then."""
    checks = sanitizer.Sanitizer(installed_hooks().version)
    pool = SimpleNamespace(size=8, page_size=1)
    monkeypatch.setattr(checks, "_allocator", pool)
    monkeypatch.setattr(sanitizer.os, "kill", lambda *_: None)
    cache, key = SimpleNamespace(token_to_kv_pool_allocator=pool), Key(token_ids=[5, 6, 7])
    for prefix in (0, 2):
        with pytest.raises(Violation, match="the prefix cache reads position 0 in slot 1"):
            checks._insert(
                cache, SimpleNamespace(key=key, value=slots(1, 2, 3), prev_prefix_len=prefix)
            )
    checks._insert(cache, SimpleNamespace(key=key, value=slots(1, 2, 3), prev_prefix_len=3))


def test_rows_of_a_tree_have_the_names_of_their_paths():
    rows = pass_rows.split_rows(
        *(np.array(x) for x in ([3] * 4, [7, 8, 9, 10], [2, 3, 3, 4], [11, 12, 13, 14], [4])),
        parents=[-1, 0, 0, 2],
    )
    (only,) = rows
    base = text_hashes([1, 2])[-1]
    names = sanitizer.Sanitizer._names_of(only, base)
    for row, path in enumerate([[7], [7, 8], [7, 9], [7, 9, 10]]):
        assert names[row] == text_hashes([1, 2, *path])[-1]


def test_rows_in_padding_are_not_checked():
    columns = [np.array(x) for x in ([3, 3, 4], [7, 8, 9], [5, 6, 2], [11, 0, 0], [2, 1])]
    (only,) = pass_rows.split_rows(*columns)
    assert (only.line, only.slots.tolist()) == (3, [11])


def test_a_broken_profile_asks_for_nothing(tmp_path, monkeypatch):
    path = tmp_path / "profile.yaml"
    monkeypatch.setenv("OUTRIDER_CONFIG", str(path))
    assert not sanitizer.is_wanted()
    path.write_text("sanitize: true")
    assert sanitizer.is_wanted()


def test_a_text_grows_with_its_request():
    req = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3])
    text = sanitizer.Text(req)
    assert (text.hashes() == text_hashes([1, 2, 3])).all()
    req.output_ids += [4, 5]
    assert (text.hashes() == text_hashes([1, 2, 3, 4, 5])).all()
    req.output_ids = [6]
    assert len(text.hashes()) == 3, "a request that starts over is read again"


def test_other_algorithms_are_refused():
    with pytest.raises(SystemExit, match="sanitize with --speculative-algorithm EAGLE"):
        sanitizer._check_algorithm(SimpleNamespace(speculative_algorithm="EAGLE"))
    for ours in ("outrider", None):
        sanitizer._check_algorithm(SimpleNamespace(speculative_algorithm=ours))
