"""The smallest engine: its answers are the echo, whoever drafts, and steps overlap."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from echo import Echo, EchoServer

from outrider.core import FinishReason, SamplingParams
from outrider.engines.in_process import InProcessRequest
from outrider.serving.device import DeviceTexts
from outrider.serving.device_drafters import DeviceDrafters

PROMPTS = {(7,): 9, (1, 2, 1, 3, 1, 4): 40, (5, 6, 7): 1, (8, 9, 8, 8, 9, 5, 0): 23}
"""Prompts, and how many tokens to answer. What followed a token before is not always right."""


def served(*drafters):
    """Serve the prompts with these drafters in turn. Return server, requests and steps."""
    most = {"none": 0, "ngram": 3, "device": 3}
    asked = zip(PROMPTS.items(), cycle(drafters), strict=False)
    reqs = [
        InProcessRequest(
            i, prompt, SamplingParams(max_tokens=n), 0, drafter=name, max_drafts=most[name]
        )
        for i, ((prompt, n), name) in enumerate(asked)
    ]
    server = EchoServer(reqs)
    return server, reqs, server.serve()


def is_echo(req):
    return req.output == [*islice(cycle(req.prompt), PROMPTS[req.prompt])]


def accepted(steps):
    return sum(int(step.outcomes.num_accepted_drafts.sum()) for step in steps)


@pytest.mark.parametrize(
    "drafters", [("none",), ("ngram",), ("device",), ("none", "ngram", "device")]
)
def test_answers_are_the_echo(drafters):
    _, reqs, _ = served(*drafters)
    assert [is_echo(req) for req in reqs] == [True] * len(PROMPTS)
    assert {req.finish_reason for req in reqs} == {FinishReason.LENGTH}


@pytest.mark.parametrize("drafter", ["ngram", "device"])
def test_drafts_are_accepted_and_save_steps(drafter):
    _, _, steps = served(drafter)
    drafted = sum(int(step.outcomes.num_drafts.sum()) for step in steps)
    assert 20 < accepted(steps) < drafted, "some are wrong"
    assert len(steps) < len(served("none")[2]) / 2


def ahead(steps):
    """Return the log if each step is launched before the last is read; the one after all: never."""
    return ["run", *["run", "read"] * (len(steps) - 1)]


def test_plain_steps_are_launched_before_the_last_is_read():
    server, _, steps = served("none")
    assert all(step.launched.early for step in steps)
    assert server.engine.log == ahead(steps)
    assert accepted(steps) == 0


@pytest.mark.parametrize("drafters", [("device",), ("device", "none")])
def test_steps_of_the_device_are_too(drafters):
    """The first one as well, with the prefill in flight, and beside requests without drafts."""
    server, _, steps = served(*drafters)
    assert {step.launched.device_drafter for step in steps} == {"device"}
    assert all(step.launched.early for step in steps)
    assert server.engine.log == ahead(steps)


def test_drafts_of_the_cpu_wait_for_the_last_outcome():
    server, _, steps = served("ngram")
    assert not any(step.launched.early for step in steps)
    assert server.engine.log == [*["run", "read"] * (len(steps) - 1), "run"]


def test_beside_drafts_of_the_cpu_all_wait():
    _, _, steps = served("none", "ngram", "device")
    early = [step.launched.requests for step in steps if step.launched.early]
    assert early
    assert {each.drafter for requests in early for each in requests} == {"none"}


def test_twin_rows_in_wrong_places_are_seen(monkeypatch):
    target = Echo._target
    monkeypatch.setattr(Echo, "_target", lambda self, i, lens: target(self, i, lens + 1))
    assert not is_echo(served("none")[1][1])


def test_twin_texts_that_the_device_does_not_have_make_a_step_wait(monkeypatch):
    monkeypatch.setattr(DeviceTexts, "enter", lambda *_: None)
    _, reqs, steps = served("device")
    assert [is_echo(req) for req in reqs] == [True] * len(PROMPTS)
    assert not any(step.launched.early for step in steps)


def test_twin_tokens_that_are_not_appended_are_seen(monkeypatch):
    """The token behind a prompt is the first one to draft from."""
    _, _, steps = served("device")
    monkeypatch.setattr(DeviceDrafters, "append", lambda *_: None)
    monkeypatch.setattr(DeviceTexts, "append", lambda *_: None)
    assert accepted(served("device")[2]) < accepted(steps)


def test_twin_lengths_that_the_device_counts_wrongly_are_seen(monkeypatch):
    advance = DeviceDrafters.advance

    def wrong(self, rows, emitted):
        lens, fetched = advance(self, rows, emitted)
        return lens + 1, fetched

    monkeypatch.setattr(DeviceDrafters, "advance", wrong)
    assert not is_echo(served("device")[1][1])
