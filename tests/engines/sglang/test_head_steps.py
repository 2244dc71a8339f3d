"""Steps that a head drafts for before the last one is known: the same drafts, the same answers."""

from __future__ import annotations

import random

import numpy as np
import parity
import pytest
import torch
from test_heads import HEAD, TARGET, Told, random_head, tiny_head, tiny_runner
from test_on_device import phases

from outrider.core import Budget, KeyedCoins, SamplingParams
from outrider.engines.sglang.drafts.slot_heads import SglangHeadDrafter
from outrider.serving.device import Layouts, TextEnds
from outrider.serving.head_steps import HeadSteps
from outrider.serving.values import ServedRequest

STARTS = {"a": 20, "b": 9}
"""Two requests, and how much of them is cached."""


def told_of(lens):
    """Return both requests, with so much of each in the cache."""
    told = Told(tiny_head(HEAD), tiny_runner())
    told.prefill(**{name: (0, length) for name, length in lens.items()})
    return told


def requests_of(told, lens, sampling):
    """Return both requests as they are when so much of them is cached."""
    return [
        ServedRequest(
            id=line, prompt=tuple(told.tokens[line, : lens[name] + 1].tolist()),
            sampling=sampling, seed=7 + line, req=told.reqs[name], max_drafts=4,
        )
        for name, line in told.lines.items()
    ]  # fmt: skip


def drafts_of_the_cpu(lens, widths, sampling):
    """Return the drafts of a head that has read nothing but the text."""
    told = told_of(lens)
    drafter = SglangHeadDrafter(told.slot, told.slot.vocab_size, min_survival=0.0)
    requests = requests_of(told, lens, sampling)
    drafter.start(requests)
    found = drafter.propose(requests, Budget(np.array(widths), "match", KeyedCoins()))
    return [list(draft.tokens) for draft in found.drafts()]


def decode(sampling, fault=0, steps=12):
    """Let a head draft on the device, step after step; the text is what it is.

    fault: added to what the head is taken to have read, after the first step
    -> of each step, the drafts on the device and those of the CPU
    """
    told, rng, found = told_of(STARTS), random.Random(3), []
    ahead = HeadSteps("eagle3", told.slot, told.table, told.slot.vocab_size, KeyedCoins())
    lens, lines = dict(STARTS), torch.tensor([*told.lines.values()])
    requests = requests_of(told, lens, sampling)
    assert ahead.is_ready(requests)
    ahead.enter(requests, lines)
    longest = np.array([*lens.values()])
    layouts = Layouts("cpu")

    for step in range(steps):
        widths = [rng.randint(0, 4), rng.randint(1, 4)]
        at = torch.tensor([*lens.values()])
        where = told.tokens.int(), lines, at, longest, lines
        num_drafts = np.array(widths)
        width, layout = max(widths), layouts.of(num_drafts)
        ends = TextEnds(requests, num_drafts, width, *where, layout, layouts)
        drafts = ahead.draft(ends).tolist()
        ours = [mine[:width] for mine, width in zip(drafts, widths, strict=True)]
        theirs = drafts_of_the_cpu(lens, widths, sampling)
        found.append((ours, theirs))
        spans = {n: (lens[n], lens[n] + w + 1) for n, w in zip(lens, widths, strict=True)}
        told.tell(**spans)  # the target has read all rows, right or not
        for name, width in zip([*lens], widths, strict=True):
            lens[name] += 1 + rng.randint(0, width)
        longest = longest + np.array(widths) + 1
        if not step:
            ahead._num_read += fault
    return found


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_drafts_are_those_of_the_cpu(temperature):
    """The head reads what was emitted, however much it was, and then its own drafts."""
    sampling = SamplingParams(temperature=temperature, max_tokens=100)
    steps = decode(sampling)
    assert [ours for ours, _ in steps] == [theirs for _, theirs in steps]


@torch.inference_mode()
def test_twin_a_head_that_has_read_too_little_drafts_otherwise():
    steps = decode(SamplingParams(temperature=0.0, max_tokens=100), fault=1)
    assert [ours for ours, _ in steps] != [theirs for _, theirs in steps]


@pytest.mark.parametrize("fault", ["", "head"])
def test_the_answers_are_those_of_bare_sglang(
    launch, deterministic, tmp_path, fault, record_property
):
    """Requests of every kind, retraction, clients that hang up. After a fault the CPU drafts."""
    drafters = {
        "eagle3": {"depth": 4},
        "random": {"path": str(random_head(tmp_path / "random")), "depth": 2},
        "adaptive": {},
    }
    environment = parity.profile(tmp_path, drafters, max_drafts=5)
    environment |= parity.RETRACTING | {"OUTRIDER_TEST_FAULT": fault}
    mode = [*parity.DETERMINISTIC, "--speculative-draft-model-path", str(HEAD)]
    bare = deterministic("head-steps", TARGET)
    ours = launch("head-steps", TARGET, *parity.TIGHT, *parity.OUTRIDER, *mode, **environment)
    with bare, ours:
        before = 0
        for name, options in drafters.items() if not fault else [("eagle3", drafters["eagle3"])]:
            asked = phases(True, 30)
            found = parity.compare_seeded(bare, ours, asked, (1, 12), {name: options})
            found.conclude(0.0)
            record_property("tokens compared", found.tokens)
            steps = ours.metrics()["outrider:device_steps_total"] - before
            before += steps
            assert steps > 30 or name == "adaptive"
        assert parity.faults(ours) == ({"device"} if fault else set())


def test_depth_is_for_chains():
    slot = told_of(STARTS).slot
    for options in ({"depth": 0}, {"depth": 32}, {"depth": 2, "width": 3}):
        with pytest.raises(ValueError, match="depth"):
            SglangHeadDrafter(slot, slot.vocab_size, **options)
