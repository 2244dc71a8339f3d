"""The simulated engine: its clock, its order of work, and the served step on it."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import recorded
import table
import torch

from outrider.control.decision import CpuDrafts, DeviceDrafts
from outrider.core import Proposal
from outrider.engines import in_process
from outrider.engines.simulated import SimulatedDevice, SimulatedServer, run_clients
from outrider.serving import device
from outrider.serving.device import DeviceTexts
from outrider.serving.step import ServedStep

GRID = table.GRIDS["h100-8b-line"]


def server_of(batch, drafter, options=None):
    return table.server_of(GRID.profile, batch, drafter, options)


def requests_of(*cell):
    return table.requests_of(GRID, *cell)


def served(arrivals, text, batch, drafter):
    server = server_of(batch, drafter)
    requests = requests_of(arrivals, text, batch, *table.DRAFTERS[drafter])
    run_clients(server, batch, requests)
    return server, requests


def idle_of(server):
    """Return how long the device waited before each decode pass but the first."""
    passes = [entry for entry in server.device.log if entry[0] == "decode"]
    return [begun - before[4] for before, (*_, begun, _) in pairwise(passes)]


@pytest.fixture
def settled(monkeypatch):
    """Return the steps that were settled, as they are."""
    steps, settle = [], ServedStep._settle

    def noted(self, launched, running):
        steps.append(settle(self, launched, running))
        return steps[-1]

    monkeypatch.setattr(ServedStep, "_settle", noted)
    return steps


@pytest.mark.parametrize(
    ("arrivals", "text", "drafter"),
    [*(("fixed", text, "device 4") for text in table.TEXTS), ("closed", "json", "adaptive")],
)
def test_the_device_accepts_what_the_cpu_settles(settled, arrivals, text, drafter):
    served(arrivals, text, 4, drafter)
    of_device = [s for s in settled if isinstance(s.launched.decision, DeviceDrafts)]
    assert len(of_device) > 20
    for step in of_device:
        goes_on = [reason is None for reason in step.outcomes.finish_reasons]
        accepted = step.launched.ticket.accepted[step.running]
        assert (accepted == step.outcomes.num_accepted_drafts)[goes_on].all()
    assert sum(int(s.outcomes.num_accepted_drafts.sum()) for s in of_device) > 0
    assert any(s.launched.early for s in of_device)


def test_twin_another_acceptance_is_noticed(monkeypatch):
    """The engine itself compares them."""
    advance = in_process.DeviceDrafters.advance

    def wrong(self, rows, emitted):
        lens, fetched = advance(self, rows, emitted)
        return lens + 1, fetched

    monkeypatch.setattr(in_process.DeviceDrafters, "advance", wrong)
    with pytest.raises(AssertionError, match="differ in what was accepted"):
        served("fixed", "edit", 1, "device 4")


def test_plain_steps_never_make_the_device_wait():
    server, _ = served("fixed", "prose", 16, "none")
    assert max(idle_of(server)) == 0


def test_requests_without_a_drafter_are_launched_early_whatever_they_allow(settled):
    server = server_of(4, "suffix 4")
    run_clients(server, 4, requests_of("fixed", "prose", 4, "none", 8))
    assert all(step.launched.early for step in settled[1:])


@pytest.mark.parametrize("drafter", table.DRAFTERS)
def test_an_answer_of_one_token_has_one(drafter):
    """Its decode step was launched before the first token was read."""
    server = server_of(4, drafter)
    requests = requests_of("fixed", "chat", 4, *table.DRAFTERS[drafter])
    for req in requests[:2]:
        req.sampling = dataclasses.replace(req.sampling, max_tokens=1)
    run_clients(server, 4, requests)
    assert [len(req.output) for req in requests[:2]] == [1, 1]
    assert all(req.output == req.answer[: req.sampling.max_tokens] for req in requests)


def test_what_may_be_cached_follows_what_was_settled(monkeypatch):
    """A bound that grows by all drafts, accepted or not, would end drafting on the device."""
    gaps, launch = [], ServedStep.launch

    def noted(self, batch):
        known = [req.length - 1 for req in batch.reqs]
        gaps.append(int((batch.longest - known).max()))
        return launch(self, batch)

    monkeypatch.setattr(ServedStep, "launch", noted)
    served("fixed", "prose", 4, "device 4")
    assert len(gaps) > 40
    assert max(gaps[2:]) <= 2 * (4 + 1)


def test_the_device_waits_for_what_an_informed_step_takes(settled):
    server, _ = served("fixed", "edit", 16, "suffix 4")
    informed = [s for s in settled if isinstance(s.launched.decision, CpuDrafts)]
    assert len(informed) > 30
    assert idle_of(server)[2:12] == pytest.approx([server.device.cpu.waiting(16)] * 10)


def test_a_pass_starts_when_it_is_launched_and_the_device_is_free():
    device = SimulatedDevice(recorded.PROFILE, 100)
    first = device.queue("decode", 1, 0.006)
    device.clock.spend(0.001)
    assert device.queue("decode", 1, 0.006) == pytest.approx(first + 0.006)
    device.clock.wait_until(0.1)
    assert device.queue("decode", 1, 0.006) == pytest.approx(0.106)
    device.clock.wait_until(0.05)  # over already
    assert device.clock.now() == 0.1


def test_the_target_emits_the_answer_while_drafts_agree_with_it():
    device = SimulatedDevice(recorded.PROFILE, 200_000)
    req = recorded.request(0, "chat", 1, 128, "suffix", 4)
    req.row = 0
    tokens, _ = device.prefill([req])
    assert tokens.tolist() == [req.answer[0]]
    req.on_device.extend(tokens.tolist(), None)
    right, wrong = req.answer[1:4], [req.answer[1], 7, req.answer[3]]
    for drafts, expected in ((right, req.answer[1:5]), (wrong, [*req.answer[1:3], -1, -1])):
        proposal = Proposal.unclaimed(drafts, [3], [-1, 0, 1])
        emitted, _ = device.decode([req], proposal, informed=True)
        assert emitted.tolist() == [199_999 if e == -1 else e for e in expected]
    tree = Proposal.unclaimed([7, req.answer[1], req.answer[2]], [3], [-1, -1, 1])
    emitted, _ = device.decode([req], tree, informed=True)
    assert torch.equal(
        emitted, torch.tensor([req.answer[1], 199_999, req.answer[2], req.answer[3]])
    )


def test_every_way_to_draft_is_used(settled):
    """Otherwise the table would say nothing of it."""
    names = set()
    for text, drafter in (("json", "adaptive+model"), ("code", "adaptive+model")):
        server, _ = served("closed", text, 1, drafter)
        assert {entry[0] for entry in server.device.log} >= {"prefill", "draft prefill", "decode"}
    for step in settled:
        decision = step.launched.decision
        if isinstance(decision, CpuDrafts):
            names.update(decision.names)
        elif isinstance(decision, DeviceDrafts) and decision.num_drafts.any():
            names.add(decision.drafter)
    assert {"model", "device"} <= names


def test_where_the_device_may_not_draft_the_cpu_looks_up(settled):
    server = server_of(4, "adaptive", {"device": False})
    run_clients(server, 4, requests_of("fixed", "edit", 4, *table.DRAFTERS["adaptive"]))
    decisions = [step.launched.decision for step in settled]
    assert not any(isinstance(decision, DeviceDrafts) for decision in decisions)
    assert any("suffix" in d.names for d in decisions if isinstance(d, CpuDrafts))


# -- requests that join while the device drafts


def answers_are_right(requests):
    return all(req.output == [*req.answer[: req.sampling.max_tokens]] for req in requests)


def joined(settled):
    """Return the steps that have requests which the step before did not have."""
    ids = [{request.id for request in step.launched.requests} for step in settled]
    return [
        step for step, (before, now) in zip(settled[1:], pairwise(ids), strict=True) if now - before
    ]


@pytest.mark.parametrize("drafter", ["device 4", "adaptive"])
@pytest.mark.parametrize("text", ["chat", "json"])
def test_no_step_waits_for_requests_that_join(settled, text, drafter):
    _, requests = served("closed", text, 4, drafter)
    assert answers_are_right(requests)
    assert len(joined(settled)) > 3
    # the first one waits for passes to be timed
    assert all(step.launched.early for step in settled[1:])
    assert sum(step.outcomes.num_accepted_drafts.sum() for step in settled) > 50


def test_twin_they_do_if_the_device_lacks_their_texts(settled, monkeypatch):
    enter = DeviceTexts.enter
    monkeypatch.setattr(
        DeviceTexts, "enter", lambda self, *joining: None if settled else enter(self, *joining)
    )
    _, requests = served("closed", "json", 4, "device 4")
    assert answers_are_right(requests)
    assert not any(step.launched.early for step in joined(settled))


@pytest.mark.parametrize("drafter", ["device 4", "adaptive"])
def test_requests_beside_those_without_drafts(settled, drafter):
    server = server_of(4, drafter)
    requests = requests_of("closed", "json", 4, *table.DRAFTERS[drafter])
    for req in requests[::3]:
        req.drafter, req.max_drafts = "none", 0
    run_clients(server, 4, requests)
    assert answers_are_right(requests)
    assert not server.pool.fallback_totals()
    assert any(step.launched.decision.num_drafts.any() for step in settled[1:])
    for step in settled[1:]:
        decision, own = step.launched.decision, step.launched.requests
        assert isinstance(decision, DeviceDrafts)
        for request, count in zip(own, decision.num_drafts.tolist(), strict=True):
            assert not count or request.max_drafts


@pytest.mark.parametrize("drafter", ["device 4", "adaptive"])
def test_more_requests_than_lines(settled, monkeypatch, drafter):
    monkeypatch.setattr(device, "MAX_TEXT_BYTES", 2 * 4 * 2048)
    server = server_of(4, drafter)
    requests = requests_of("closed", "json", 4, *table.DRAFTERS[drafter])[:6]
    for req in requests[2:]:
        req.sampling = dataclasses.replace(req.sampling, max_tokens=20)
    run_clients(server, 4, requests)
    assert answers_are_right(requests)
    sizes = {
        len(step.launched.requests)
        for step in settled
        if isinstance(step.launched.decision, DeviceDrafts)
    }
    assert sizes, "the device drafts for those that are left"
    assert max(sizes) <= 2


@pytest.mark.parametrize("drafter", ["device 4", "adaptive"])
def test_texts_that_are_longer_than_lines(settled, drafter):
    longest = max(len(req.prompt) for req in requests_of("fixed", "chat", 4))
    server = SimulatedServer(
        SimulatedDevice(recorded.PROFILE, recorded.VOCABULARY),
        table.DRAFTERS[drafter][0],
        max_drafts=4,
        max_requests=4,
        max_length=longest - 1,
    )
    requests = requests_of("fixed", "chat", 4, *table.DRAFTERS[drafter])
    run_clients(server, 4, requests)
    assert answers_are_right(requests)
    assert any(isinstance(step.launched.decision, CpuDrafts) for step in settled)
