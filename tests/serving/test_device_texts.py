"""Texts on the device: what is decoded there by steps with drafts is plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from outrider.control.decision import DeviceDrafts
from outrider.core import SamplingParams
from outrider.serving import device
from outrider.serving.device import (
    DeviceTexts,
    Layout,
    accept,
    draft_rows,
    look_up,
    unpack,
)
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.head_steps import unread_rows
from outrider.serving.values import Columns, ServedRequest


def next_token(text):
    """Return what follows a text, by a rule that repeats itself and now and then does not."""
    return (sum(text[-2:]) + len(text) // 60) % 4


def decode(widths, steps, more=0):
    """Decode on the device by steps with drafts. Return the texts, and how many were accepted.

    widths: [B] drafts of each request
    more: added to the lengths after each step: a fault
    """
    size, room = len(widths), 600
    table = torch.arange(8 * room).view(8, room)
    index, lines = torch.tensor([5, 2, 7][:size]), torch.tensor([1, 3, 0][:size])
    texts = torch.zeros(4, room, dtype=torch.int32)
    known = [[1, 2, 3, 1, 2], [4], [2, 2, 2]][:size]
    for line, text in zip(lines.tolist(), known, strict=True):
        texts[line, : len(text)] = torch.tensor(text)
    lens = torch.tensor([len(text) - 1 for text in known])
    layout, most, accepted = Layout.of(np.array(widths), "cpu"), max(widths), 0
    last_tokens = torch.full((8,), -9)
    last_tokens[index] = torch.tensor([text[-1] for text in known])
    for _ in range(steps):
        drafts = look_up(texts, lines, lens, most, 1, 4)
        given = last_tokens, lens, index, table, layout.owner, layout.place, drafts
        tokens, pool_index, seq_lens, slots = draft_rows(*given)
        assert (pool_index == index[layout.owner]).all()
        assert (slots == table[pool_index, seq_lens - 1]).all()
        before = [texts[line, : n + 1].tolist() for line, n in zip(lines, lens, strict=True)]
        emitted, rows = [], zip(layout.owner.tolist(), layout.place.tolist(), strict=True)
        for row, (owner, place) in enumerate(rows):
            path = tokens[row - place + 1 : row + 1].tolist()
            emitted.append(next_token([*before[owner], *path]))
        after, last_tokens[index], fetched = accept(
            torch.tensor(emitted), drafts, lens, texts, lines, layout.owner, layout.place
        )
        found, proposal, made = unpack(fetched, np.array(widths), None)
        assert found.tolist() == emitted
        assert made.tolist() == drafts.tolist()
        assert proposal.num_drafts.tolist() == list(widths)
        accepted += int((after - lens - 1).sum())
        lens = after + more
    return [texts[line, : n + 1].tolist() for line, n in zip(lines, lens, strict=True)], accepted


def is_plain(text, start):
    return all(text[n] == next_token(text[:n]) for n in range(start, len(text)))


@pytest.mark.parametrize("widths", [[4], [3, 0, 6], [1, 1, 1], [0, 0, 2]])
def test_what_is_decoded_on_the_device_is_plain_decoding(widths):
    texts, accepted = decode(widths, 40)
    starts = [5, 1, 3]
    assert all(is_plain(text, start) for text, start in zip(texts, starts, strict=False))
    assert accepted > 10
    assert len(texts[0]) >= 5 + 40


def test_and_a_length_that_is_wrong_is_not():
    texts, _ = decode([4], 40, more=1)
    assert not is_plain(texts[0], 5)


def test_requests_that_have_left_are_left_out():
    widths = np.array([2, 0, 1])
    fetched = torch.tensor([10, 11, 12, 20, 30, 31, *(1, 2), *(3, 4), *(5, 6)])
    emitted, proposal, made = unpack(fetched, widths, np.array([0, 2]))
    assert emitted.tolist() == [10, 11, 12, 30, 31]
    assert proposal.tokens.tolist() == [1, 2, 5]
    assert proposal.num_drafts.tolist() == [2, 1]
    assert made.tolist() == [[1, 2], [5, 6]]


def test_drafts_without_rows_are_fetched_too():
    """The CPU compares them with what is emitted."""
    fetched = torch.tensor([10, 20, *(1, 2), *(3, 4)])
    emitted, proposal, made = unpack(fetched, np.array([0, 0]), None)
    assert emitted.tolist() == [10, 20]
    assert proposal.num_drafts.tolist() == [0, 0]
    assert made.tolist() == [[1, 2], [3, 4]]


# -- the texts that steps draft from


@dataclass(eq=False)
class Req:
    """A request of an engine's. row: in its table"""

    row: int
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def rid(self):
        return str(self.row)

    def finished(self):
        return self.has_ended


def texts_of(room=64, rows=6):
    return DeviceTexts(torch.arange(rows * room).view(rows, room), {"min_n": 1, "max_n": 4})


def entered(texts, *prompts, first_row=1):
    """Return requests whose prompts were prefilled, each with the token that follows its prompt."""
    reqs = [Req(first_row + 2 * r, list(prompt)) for r, prompt in enumerate(prompts)]
    return [request_of(req, token) for req, token in zip(reqs, prefill(texts, *reqs), strict=True)]


def prefill(texts, *reqs, partial=()):
    """Let the device have these texts. Return the tokens that follow them."""
    known = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
    tokens = [next_token(text) for text in known]
    index, lens = index_of(reqs), torch.tensor([len(text) for text in known])
    partial = np.array(partial, np.int64)
    DeviceDrafters(texts).enter(reqs, index, lens, torch.tensor(tokens), partial)
    return tokens


def request_of(req, token):
    output = [*req.output_ids, token]
    return ServedRequest(
        req.row, tuple(req.origin_input_ids), SamplingParams(), 0, output=output, req=req
    )


def index_of(reqs):
    return torch.tensor([req.row for req in reqs])


def text_of(request):
    return [*request.prompt, *request.output]


def on_device(texts, request):
    """Return what the device has of a text."""
    line = texts._lines[request.req.rid].number
    return texts._tokens[line, : request.length].tolist()


def plain_step(texts, requests):
    """Run a plain step of the engine's. Extend the requests."""
    tokens = [next_token(text_of(request)) for request in requests]
    lens = torch.tensor([request.length for request in requests])
    texts.append(index_of([request.req for request in requests]), lens, torch.tensor(tokens))
    for request, token in zip(requests, tokens, strict=True):
        request.extend((token,), None)
    texts.note_written(requests, np.ones(len(requests), np.int64))


def device_step(texts, requests, num_drafts, width=1, shift=0):
    """Run a step with drafts of the device. Extend the requests. Return its rows, and accepted.

    shift: added to the lengths that the device is given: a fault
    """
    index = index_of([request.req for request in requests])
    longest = np.array([request.length for request in requests]) - 1
    lens = torch.from_numpy(longest + shift)
    decision = DeviceDrafts("device", np.array(num_drafts), max(width, *num_drafts))
    ends = texts.ends(requests, decision, index, lens, longest + shift)
    rows = texts.rows(ends, texts.look_up(ends))
    emitted, owner = [], rows.layout.owner.tolist()
    for row, place in enumerate(rows.layout.place.tolist()):
        cached = int(rows.lens[owner[row]])
        path = rows.tokens[row - place : row + 1].tolist()
        emitted.append(next_token([*text_of(requests[owner[row]])[:cached], *path]))
    after, fetched = texts.advance(rows, torch.tensor(emitted))
    found, proposal, made = unpack(fetched, np.array(num_drafts), None)
    assert made.shape == (len(requests), decision.width)
    counts = (after - rows.lens).numpy()
    for r, start in enumerate(proposal.root_rows.tolist()):
        requests[r].extend(tuple(found[start : start + counts[r]].tolist()), None)
    texts.note_written(requests, counts)
    return rows, int(counts.sum()) - len(requests)


def served(count=25, shift=0):
    """Serve two requests by steps of `DeviceTexts`. Return their texts, and the drafts accepted."""
    texts, accepted = texts_of(), 0
    requests = entered(texts, [1, 2, 3, 1, 2], [4, 4])
    for step in range(count):
        accepted += device_step(texts, requests, [1 + step % 2, 0], 1 + step % 4, shift)[1]
    return [text_of(request) for request in requests], accepted


def test_steps_over_device_texts_are_plain_decoding():
    texts, accepted = served()
    assert is_plain(texts[0], 5)
    assert is_plain(texts[1], 2)
    assert len(texts[1]) == 2 + 1 + 25, "one token a step without drafts"
    assert accepted > 5
    assert len(texts[0]) == 5 + 1 + 25 + accepted


def test_twin_steps_at_wrong_lengths_are_not():
    """Each row reads what is behind the end as if it were text."""
    texts, _ = served(shift=1)
    assert not is_plain(texts[0], 5)


def test_rows_name_the_slots_of_their_positions():
    table = torch.arange(6 * 64).view(6, 64) + 1000
    texts = DeviceTexts(table, {"min_n": 1, "max_n": 4})
    requests = entered(texts, [1, 2], [3])
    texts.last_tokens[1] = 1
    requests[0].output[:] = [1]
    rows, _ = device_step(texts, requests, [2, 0])
    assert rows.index.tolist() == [1, 3]
    assert rows.owner_index.tolist() == [1, 1, 1, 3]
    assert rows.seq_lens.tolist() == [3, 4, 5, 2]
    assert rows.longest.tolist() == [3, 4, 5, 2]
    assert rows.slots.tolist() == table[rows.owner_index, rows.seq_lens - 1].tolist()
    assert rows.slots.tolist() == [1066, 1067, 1068, 1193]
    assert rows.tokens.tolist()[::3] == [1, requests[1].output[0]]


def test_the_device_has_each_text_after_every_kind_of_step():
    texts = texts_of()
    requests = entered(texts, [1, 2, 3, 1, 2], [4, 4])
    for kind in "PDDPPDCPCDPCCD":
        if kind == "P":
            plain_step(texts, requests)
        elif kind == "D":
            device_step(texts, requests, [2, 0], width=3)
        else:  # drafts of the CPU: the device does not write what is emitted
            for r, request in enumerate(requests):
                request.extend(tuple([3, 1, 0][: 1 + r]), None)
            assert [on_device(texts, request) for request in requests] != [*map(text_of, requests)]
            texts.last_tokens[index_of([r.req for r in requests])] = torch.tensor([3, 1])
            texts.catch_up(requests)
        assert [on_device(texts, request) for request in requests] == [*map(text_of, requests)]


def test_only_what_the_device_lacks_is_sent():
    texts = texts_of()
    (request,) = entered(texts, [1, 2, 3])
    line = texts._lines[request.req.rid]
    texts._tokens[line.number, 0] = 9
    request.extend((1, 2), None)
    texts.catch_up([request])
    assert on_device(texts, request) == [9, *text_of(request)[1:]]
    texts._tokens[line.number] = 8
    texts.catch_up([request])
    assert on_device(texts, request) == [8] * request.length


def test_a_text_with_a_gap_is_not_taken_for_a_whole_one():
    """A step of the CPU, and one of the device behind it: the device lacks the first one's."""
    texts = texts_of()
    (request,) = entered(texts, [1, 2, 3])
    request.extend((7, 7), None)
    plain_step(texts, [request])
    assert texts._lines[request.req.rid].written == 4
    texts.catch_up([request])
    assert on_device(texts, request) == text_of(request)


# -- lines


@pytest.fixture
def two_lines(monkeypatch):
    """Return texts with room for two requests."""
    monkeypatch.setattr(device, "MAX_TEXT_BYTES", 2 * 4 * 64)
    return texts_of()


def test_more_requests_than_lines(two_lines):
    requests = entered(two_lines, [1, 2, 1], [3, 3], [2, 1])
    assert two_lines.holds(requests[:2])
    assert not two_lines.holds(requests)
    assert not two_lines.holds(requests[2:])
    drafters = DeviceDrafters(two_lines)
    for part, names in ((requests[:2], {"device"}), (requests, set())):
        assert drafters.names(Columns.of(part), 5, part) == names
    for _ in range(4):
        plain_step(two_lines, requests)
        two_lines.catch_up(requests)
    assert is_plain(text_of(requests[2]), 2)
    device_step(two_lines, requests[:2], [3, 3])
    for request in requests[:2]:
        assert on_device(two_lines, request) == text_of(request)


def test_twin_without_a_spare_line_another_text_is_damaged(two_lines):
    requests = entered(two_lines, [1, 2, 1], [3, 3], [2, 1])
    two_lines._line_of[requests[2].req.row] = two_lines._lines[requests[0].req.rid].number
    plain_step(two_lines, requests)
    assert on_device(two_lines, requests[0]) != text_of(requests[0])


def test_lines_of_requests_that_have_ended_are_used_again(two_lines):
    ended, goes_on = entered(two_lines, [1, 2, 1], [3, 3])
    ended.req.has_ended = True
    (new,) = entered(two_lines, [2, 1, 2, 2], first_row=0)
    assert two_lines.holds([goes_on, new])
    assert not two_lines.holds([ended])
    (too_many,) = entered(two_lines, [3], first_row=2)
    assert not two_lines.holds([too_many])
    device_step(two_lines, [goes_on, new], [1, 2])
    for request in (goes_on, new):
        assert on_device(two_lines, request) == text_of(request)
    # what a step in flight emitted for the ended one is settled later
    two_lines.note_written([ended], np.array([1]))
    two_lines.catch_up([ended])
    assert on_device(two_lines, new) == text_of(new)


def test_a_retracted_request_keeps_its_line_and_is_written_anew():
    texts = texts_of()
    a, b = entered(texts, [1, 2, 1], [3, 3])
    plain_step(texts, [a, b])
    line = texts._lines[a.req.rid].number
    # a step of the CPU follows; then it loses its slots, and comes back in another row
    again = Req(a.req.row, a.req.origin_input_ids, [*a.output, 2, 3])
    index = torch.tensor([4])
    known = np.array([*again.origin_input_ids, *again.output_ids])
    texts.enter([again], index, [known])
    texts.append(index, torch.tensor([len(known)]), torch.tensor([1]))
    assert texts._lines[a.req.rid].number == line
    assert texts._lines[a.req.rid].req is again
    assert texts._line_of[4] == line
    request = request_of(again, 1)
    assert on_device(texts, request) == text_of(request)
    texts.catch_up([request])
    assert on_device(texts, request) == text_of(request)
    assert on_device(texts, b) == text_of(b)


def test_a_prompt_in_chunks_has_no_line_before_its_last_one():
    texts = texts_of()
    (a,) = entered(texts, [1, 2, 1])
    long = Req(3, [2, 1, 2, 3, 3, 1])
    prefill(texts, long, partial=[0])
    request = request_of(long, next_token(long.origin_input_ids))
    assert not texts.holds([request])
    assert texts._line_of[3] == texts.max_requests, "its tokens go to the spare line"
    assert on_device(texts, a) == text_of(a)
    assert (texts._tokens[: texts.max_requests].count_nonzero(1) > 0).sum() == 1
    prefill(texts, long)
    assert texts.holds([request])
    assert on_device(texts, request) == text_of(request)


def test_a_text_that_is_too_long_for_the_device_breaks_nothing():
    texts = texts_of(room=16)
    a, long = entered(texts, [1, 2, 1], [1, 2] * 10)
    drafters, both = DeviceDrafters(texts), [a, long]
    assert drafters.names(Columns.of([a]), a.length - 1, [a])
    assert not drafters.names(Columns.of(both), long.length - 1, both)
    for _ in range(16):  # the other one grows beyond the width too
        plain_step(texts, both)
        texts.catch_up(both)
    a.extend((1, 2), None)
    texts.catch_up(both)
    assert [on_device(texts, request)[:15] for request in both] == [text_of(r)[:15] for r in both]
    (b,) = entered(texts, [3, 3, 3], first_row=2)
    assert on_device(texts, b) == text_of(b)


def test_after_a_fault_no_texts_are_kept():
    texts = texts_of()
    requests = entered(texts, [1, 2, 1], [3, 3])
    drafters = DeviceDrafters(texts)
    columns = Columns.of(requests)
    assert drafters.names(columns, 5, requests)
    drafters.disable("device", RuntimeError("out of memory"))
    assert not drafters.names(columns, 5, requests)
    plain_step(texts, requests)
    texts.catch_up(requests)
    assert [int(texts.last_tokens[r.req.row]) for r in requests] == [r.output[-1] for r in requests]
    (new,) = entered(texts, [2, 2], first_row=0)
    assert not texts.holds([new])
    assert int(texts.last_tokens[0]) == new.output[-1]


def test_without_drafts_there_are_last_tokens_only():
    texts = DeviceTexts(torch.zeros(6, 64, dtype=torch.int32), drafts=False)
    requests = entered(texts, [1, 2, 1], [3, 3])
    plain_step(texts, requests)
    assert texts._tokens is None
    assert not texts.holds(requests)
    assert [int(texts.last_tokens[r.req.row]) for r in requests] == [r.output[-1] for r in requests]


def test_a_head_follows_itself_only_and_for_requests_that_the_device_knows_it_has_read():
    class Head:
        def has_entered(self, requests):
            return requests == ["a"]

    drafters = DeviceDrafters(texts_of(), {"head": Head(), "other": Head()})
    assert drafters.follows("device", "", ["new"])
    assert drafters.follows("device", "head", ["new"])
    assert drafters.follows("head", "head", ["a"])
    assert not drafters.follows("head", "head", ["a", "new"])
    assert not drafters.follows("head", "device", ["a"])
    assert not drafters.follows("head", "other", ["a"])


# -- the rows that a head reads first


def unread(read, lens):
    """Return the tokens and positions of unread rows, and the row of each last token."""
    texts = torch.arange(40, dtype=torch.int32).view(2, 20)
    layout = Layout.of(np.array([2, 1]), "cpu")
    read, lens = torch.tensor(read), torch.tensor(lens)
    found = unread_rows(texts, torch.tensor([1, 0]), lens, read, layout.owner, layout.place)
    return [each.tolist() for each in found]


def test_a_head_reads_up_to_the_last_token_and_parks_the_other_rows():
    tokens, positions, last = unread(read=[5, 9], lens=[6, 10])
    assert positions == [5, 6, 0, 9, 10]
    assert tokens == [25, 26, 20, 9, 10]
    assert last == [1, 4]


def test_twin_a_length_that_is_too_large_reads_what_is_not_there():
    _, positions, last = unread(read=[5, 9], lens=[7, 10])
    assert positions != [5, 6, 0, 9, 10]
    assert last != [1, 4]
