"""Drafts that the device makes: launched before the last step is known, and the same answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parity
import pytest
import torch
from outrider_test_site import no_repeat_processor

from outrider.core import Unsupported
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.on_device import Layout, accept, draft_rows, look_up, told_drafts
from outrider.hosts.sglang.profile import Profile
from outrider.hosts.sglang.settings import _check_drafters

TARGET = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny" / "target"
NEEDS_TEXT = ("repetition", "frequency", "presence", "penalties", "min_new_tokens", "top_k, top_p")
"""Kinds of requests that penalties of some kind belong to: the host has to know their text."""
APT = ("plain", "stream", "n", "chat")
"""Forms without logprobs and processors."""


def phases(is_apt, count):
    """Return requests by their path through the sampler: those that it drafts for, or all."""
    made = 4 * count if is_apt else count
    found = parity.seeded_phases("stories260k", made, 40, no_repeat_processor())
    if not is_apt:
        return found
    apt = [
        [w for w in phase if w.form in APT and not any(name in w.kind for name in NEEDS_TEXT)]
        for phase in found
    ]
    return [phase[: count // 3] for phase in apt]


CASES = [(1, "")]
if host().contract.VERSION != "0.5.11":  # whose pages on CPU take the Triton interpreter
    CASES.append((16, "device"))


@pytest.mark.parametrize(("page", "fault"), CASES)
def test_the_answers_are_those_of_bare_sglang(
    launch, deterministic, tmp_path, page, fault, record_property
):
    """Requests of every kind, retraction, clients that hang up: first those that it drafts for.

    After a fault the host drafts, and the answers are the same.
    """
    drafters = {"device": {}}
    environment = parity.profile(tmp_path, drafters, max_drafts=5)
    environment |= parity.RETRACTING | {"OUTRIDER_TEST_FAULT": fault}
    bare = deterministic("device", TARGET)
    ours = [*parity.TIGHT, *parity.OUTRIDER, *parity.DETERMINISTIC, "--page-size", str(page)]
    ours = launch(f"device-{page}", TARGET, *ours, **environment)
    with bare, ours:
        for is_apt in (True, False):
            concurrencies = (1, 12, 12) if is_apt else (12,)
            asked = phases(is_apt, 60 if page == 1 else 24)
            found = parity.compare_seeded(bare, ours, asked, concurrencies, drafters)
            found.conclude(0.0)
            record_property("tokens compared", found.tokens)
        counters = ours.metrics()
        assert counters["outrider:device_steps_total"] > 30, counters
        parity.check_traffic(ours)
        assert parity.faults(ours) == ({fault} if fault else set())


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
        told = accept(torch.tensor(emitted), drafts, lens, texts, lines, layout.owner, layout.place)
        found, proposal = told_drafts(told[1], np.array(widths), None)
        assert found.tolist() == emitted
        assert proposal.num_drafts.tolist() == list(widths)
        accepted += int((told[0] - lens - 1).sum())
        lens = told[0] + more
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


def test_one_option_is_checked_beside_the_defaults_of_the_other():
    for options in ({"min_n": 6}, {"max_n": 1}):
        _check_drafters(Profile(drafter="device", drafters={"device": options}), None)
    with pytest.raises(Unsupported, match="min_n <= max_n"):
        _check_drafters(Profile(drafter="device", drafters={"device": {"min_n": 9}}), None)


def test_who_has_left_is_not_asked_about():
    widths = np.array([2, 0, 1])
    told = torch.tensor([10, 11, 12, 20, 30, 31, *(1, 2), *(3, 4), *(5, 6)])
    emitted, proposal = told_drafts(told, widths, np.array([0, 2]))
    assert emitted.tolist() == [10, 11, 12, 30, 31]
    assert proposal.tokens.tolist() == [1, 2, 5]
    assert proposal.num_drafts.tolist() == [2, 1]
