"""Texts on the device: what is decoded there by steps with drafts is plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core import Request, SamplingParams
from outrider.serving.device import (
    DeviceTexts,
    Layout,
    accept,
    draft_rows,
    look_up,
    unpack,
)
from outrider.serving.head_steps import unread_rows


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
    for _ in range(steps):
        drafts = look_up(texts, lines, lens, most, 1, 4)
        given = texts, lines, lens, index, table, layout.owner, layout.place, drafts
        tokens, pool_index, seq_lens, slots = draft_rows(*given)
        assert (pool_index == index[layout.owner]).all()
        assert (slots == table[pool_index, seq_lens - 1]).all()
        before = [texts[line, : n + 1].tolist() for line, n in zip(lines, lens, strict=True)]
        emitted, rows = [], zip(layout.owner.tolist(), layout.place.tolist(), strict=True)
        for row, (owner, place) in enumerate(rows):
            path = tokens[row - place + 1 : row + 1].tolist()
            emitted.append(next_token([*before[owner], *path]))
        after, fetched = accept(
            torch.tensor(emitted), drafts, lens, texts, lines, layout.owner, layout.place
        )
        found, proposal = unpack(fetched, np.array(widths), None)
        assert found.tolist() == emitted
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
    emitted, proposal = unpack(fetched, widths, np.array([0, 2]))
    assert emitted.tolist() == [10, 11, 12, 30, 31]
    assert proposal.tokens.tolist() == [1, 2, 5]
    assert proposal.num_drafts.tolist() == [2, 1]


# -- the texts that steps draft from


def request(number, text, output=()):
    return Request(number, tuple(text), SamplingParams(), seed=0, output=list(output))


def plain_step(texts, requests, widths, shift=0):
    """Run a step with drafts over the table's slots. Return its rows and what the CPU fetches.

    shift: added to the lengths that the device is given: a fault
    """
    index = torch.tensor([2 * request.id + 1 for request in requests])
    longest = np.array([request.length for request in requests]) - 1
    lens = torch.from_numpy(longest + shift)
    ends = texts.ends(requests, np.array(widths), index, lens, longest + shift)
    rows = texts.rows(ends, texts.look_up(ends))
    emitted, owner = [], rows.layout.owner.tolist()
    for row, place in enumerate(rows.layout.place.tolist()):
        known, cached = requests[owner[row]], int(rows.lens[owner[row]])
        path = rows.tokens[row - place : row + 1].tolist()
        emitted.append(next_token([*[*known.prompt, *known.output][:cached], *path]))
    return rows, *texts.advance(rows, torch.tensor(emitted))


def served(count=25, room=64, shift=0):
    """Serve two requests by steps of `DeviceTexts`. Return their texts, and the drafts accepted."""
    texts = DeviceTexts(torch.arange(6 * room).view(6, room), 1, 4)
    requests, accepted = [request(0, [1, 2, 3, 1, 2]), request(1, [4, 4])], 0
    texts.write(requests)
    for step in range(count):
        widths = np.array([1 + step % 2, 0])
        rows, lens, fetched = plain_step(texts, requests, widths, shift)
        found, proposal = unpack(fetched, widths, None)
        for r, start in enumerate(proposal.root_rows.tolist()):
            kept = int(lens[r] - rows.lens[r])
            requests[r].extend(tuple(found[start : start + kept].tolist()), None)
            accepted += kept - 1
        texts.note_written(requests)
    return [[*r.prompt, *r.output] for r in requests], accepted


def test_steps_over_device_texts_are_plain_decoding():
    texts, accepted = served()
    assert is_plain(texts[0], 5)
    assert is_plain(texts[1], 2)
    assert len(texts[1]) == 2 + 25, "one token a step without drafts"
    assert accepted > 5
    assert len(texts[0]) == 5 + 25 + accepted


def test_twin_steps_at_wrong_lengths_are_not():
    """The device takes what is behind the end for the last token."""
    texts, _ = served(shift=1)
    assert not is_plain(texts[0], 5)


def test_rows_name_the_slots_of_their_positions():
    table = torch.arange(6 * 64).view(6, 64) + 1000
    texts, requests = DeviceTexts(table, 1, 4), [request(0, [1, 2, 1]), request(1, [3])]
    texts.write(requests)
    rows, lens, _ = plain_step(texts, requests, [2, 0])
    assert rows.index.tolist() == [1, 1, 1, 3]
    assert rows.seq_lens.tolist() == [3, 4, 5, 1]
    assert rows.longest.tolist() == [3, 4, 5, 1]
    assert rows.slots.tolist() == table[rows.index, rows.seq_lens - 1].tolist()
    assert rows.slots.tolist() == [1066, 1067, 1068, 1192]
    assert rows.tokens.tolist() == [1, 2, 1, 3]
    assert lens[1] == 1


def test_what_was_not_written_is_written_before_the_next_step():
    """A request that another step has extended: its text is completed, and only that."""
    texts = DeviceTexts(torch.arange(6 * 64).view(6, 64), 1, 4)
    requests = [request(0, [1, 2, 3]), request(1, [4, 5])]
    texts.write(requests)
    requests[0].extend((1, 2), None)
    texts.write(requests)
    line = texts._lines[0]
    assert texts._tokens[line, :5].tolist() == [1, 2, 3, 1, 2]
    texts._tokens[line, 0] = 9
    requests[0].extend((3,), None)
    texts.write(requests)
    assert texts._tokens[line, :6].tolist() == [9, 2, 3, 1, 2, 3], "what it has is not sent again"


def test_a_line_is_taken_from_requests_that_are_not_in_the_batch():
    texts = DeviceTexts(torch.arange(2 * 64).view(2, 64), 1, 4)
    a, b, c = (request(n, [n + 1, 7]) for n in range(3))
    texts.write([a, b])
    texts.write([b, c])
    assert set(texts._lines) == {1, 2}
    assert texts._tokens[texts._lines[2], :2].tolist() == [3, 7]
    assert texts._tokens[texts._lines[1], :2].tolist() == [2, 7]
    texts.write([a, c])  # b loses its own: it is written anew when it returns
    texts.write([a, b])
    assert texts._tokens[texts._lines[1], :2].tolist() == [2, 7]


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
