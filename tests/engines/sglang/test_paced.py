"""The paced device: reads wait for their own pass, the pace holds, and answers are the texts."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from paced.clock import now
from paced.device import Device, Pass, parts_file
from paced.drafts import PacedBranches
from paced.log import finished_log, steady
from paced.model import FLAGS, HEADED, write_head, write_model
from paced.plugin import PLUGIN, VARIABLE, make_device
from paced.prices import LAUNCH
from paced.tensor import GreedyLogits, Timed
from paced.texts import KINDS, MIXED, STORIES, VOCABULARY, Answers, prompts, texts

from outrider.engines.costs import H100_8B, PROFILES

TOKENS = 60


# -- tensors


class Waits(list):
    """Notes for which moments somebody waited."""

    def __call__(self, ready):
        self.append(ready)

    def tensor(self, values, ready):
        return Timed.of(torch.as_tensor(values), ready, self)


@pytest.fixture
def waits():
    return Waits()


READS = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0]),
    "index": lambda x: [1, 2, 3, 4, 5][x[0]],
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to device": lambda x: x.to(torch.device("cpu"), torch.int32),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "mask of another": lambda x: torch.arange(3)[x > 1],
    "masked write": lambda x: x.__setitem__(x > 1, torch.tensor([7, 8])),
    "equal": lambda x: torch.equal(x, torch.arange(3)),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: torch.arange(3).repeat_interleave(x),
    "list of scalars": lambda x: [int(y) for y in x],
}
SILENT = {
    "arithmetic": lambda x: (x + 1) * x.float(),
    "shape": lambda x: (x.shape, len(x), x.device, x.dtype, x.numel()),
    "non-blocking": lambda x: x.to("cpu", non_blocking=True),
    "cast": lambda x: x.to(torch.int32),
    "gather": lambda x: torch.arange(9)[x],
    "scatter": lambda x: torch.zeros(9, dtype=torch.int64).index_add_(0, x, x),
    "write": lambda x: torch.zeros(3).__setitem__(slice(None), x),
    "cat": lambda x: torch.cat([x, torch.arange(2)]),
    "topk": lambda x: x.topk(2).values.argmax(),
    "masked fill": lambda x: x.clone().__setitem__(x > 1, 0),
    "where of three": lambda x: torch.where(x > 1, x, 0),
    "repeats of known size": lambda x: torch.arange(3).repeat_interleave(x, output_size=6),
}


@pytest.mark.parametrize("name", READS)
def test_reading_waits(waits, name):
    READS[name](waits.tensor([1, 2, 3], 5.0))
    assert set(waits) == {5.0}


@pytest.mark.parametrize("name", SILENT)
def test_what_needs_no_value_does_not_wait(waits, name):
    SILENT[name](waits.tensor([1, 2, 3], 5.0))
    assert not waits


def test_a_read_waits_for_its_own_pass(waits):
    """Under overlap the next pass is queued before the last one's tokens are read."""
    first, later = waits.tensor([1], 5.0), waits.tensor([2], 9.0)
    copy = first.to("cpu", non_blocking=True)
    assert copy.tolist() == [1]
    assert waits == [5.0]
    assert (copy + later).tolist() == [3]
    assert waits == [5.0, 9.0]


def test_what_is_computed_is_ready_with_the_last_input(waits):
    a, b, plain = waits.tensor([1, 2], 5.0), waits.tensor([0, 1], 9.0), torch.tensor([3, 4])
    cases = [a + b, b + a, plain[b] + a, torch.stack([a, b]), torch.where(a > 1, plain, b)]
    values, indices = torch.cat([a, b]).topk(2)
    assert [x.ready for x in (*cases, values, indices, (plain + a)[0])] == [9.0] * 7 + [5.0]


def test_a_tensor_that_was_written_to_is_ready_later(waits):
    relay, filled, sums = torch.zeros(4), torch.zeros(2), torch.zeros(2)
    relay[1:3] = waits.tensor([1.0, 2.0], 5.0)
    filled.copy_(waits.tensor([1.0, 2.0], 6.0), non_blocking=True)
    sums += waits.tensor([1.0, 2.0], 7.0)
    assert [relay.ready, filled.ready, sums.ready] == [5.0, 6.0, 7.0]
    assert relay.tolist() == [0, 1, 2, 0]
    assert waits == [5.0]


def test_greedy_logits_have_a_best_token_and_nothing_else(waits):
    logits = GreedyLogits.over(torch.tensor([7, 8, 9]), VOCABULARY, 5.0, waits)
    assert logits.shape == (3, VOCABULARY)
    assert logits.untyped_storage().nbytes() == 4
    best = torch.argmax(logits, -1)
    assert not waits
    assert best.tolist() == [7, 8, 9]
    assert logits[torch.tensor([2, 0])].argmax(dim=-1).tolist() == [9, 7]
    assert waits == [5.0, 5.0]
    with pytest.raises(NotImplementedError, match="greedy"):
        logits.div_(0.7)
    with pytest.raises(NotImplementedError, match="greedy"):
        torch.log_softmax(logits, -1)


# -- the queue, the texts, the log


def test_passes_queue_up():
    device = Device(H100_8B)
    cost = H100_8B.target.decode(2, 1000)
    before = now()
    first = device.enqueue("decode", 2, 1000, 2, 1000)
    second = device.enqueue("draft_decode", 1, 0, 1, 0)
    assert first >= before + cost
    assert second == pytest.approx(first + H100_8B.draft.decode(1, 0))
    for _ in range(1000):
        last = device.enqueue("decode", 1, 0, 1, 0)
    Timed.of(torch.zeros(1), first, device.wait).tolist()
    assert first <= now() < last


def test_prefills_take_what_the_setting_says(tmp_path):
    (tmp_path / "device.json").write_text(json.dumps({"profile": "h100-8b", "prefill_row": 2e-6}))
    profile = make_device(str(tmp_path / "device.json")).profile
    assert profile.target.prefill(1000) == pytest.approx(H100_8B.target.fixed + 2e-3)
    assert profile.draft.prefill(1000) == pytest.approx(H100_8B.draft.fixed + 2e-3)
    assert profile.target.decode(1000, 0) == H100_8B.target.decode(1000, 0)


def test_unknown_settings_are_refused(tmp_path):
    (tmp_path / "device.json").write_text(json.dumps({"profile": "h100-8b", "pace": 2}))
    with pytest.raises(ValueError, match="pace"):
        make_device(str(tmp_path / "device.json"))


def test_texts_keep_which_tokens_are_equal():
    with_drafts = dict.fromkeys(KINDS, 0.0)
    for text in texts():
        assert max(text.prompt + text.output) < VOCABULARY
        right = sum(a == b for a, b in zip(text.output, text.drafted, strict=True))
        with_drafts[text.kind] = right / len(text.output)
    # what the recorded draft model got right, with the texts that it finds easy first
    assert with_drafts["json"] > 0.8
    assert 0.4 < with_drafts["prose"] < with_drafts["code"]


def test_answers_follow_the_prompt_they_belong_to():
    answers = Answers()
    asked = prompts(MIXED, 10, context=3000, first=2)
    assert len({tuple(p.ids) for p in asked}) == 10
    headers = np.array([prompt.ids[:4] for prompt in asked])
    for step in (0, 1, 100, 400):
        positions = np.array([len(prompt.ids) - 1 + step for prompt in asked])
        said = answers.target(headers, positions)
        assert said.tolist() == [prompt.output[step] for prompt in asked]
    assert min(len(prompt.ids) for prompt in asked) == 3000


def test_the_log_leaves_prefill_and_drain_out():
    def decode(queued, start, requests, position, kind="decode"):
        return Pass(kind, queued, start, start + 1, requests, 0, requests, position)

    passes = [
        Pass("prefill", 0, 0, 1, 20, 0, 2, 0),
        decode(0, 1, 2, 20),
        decode(2.5, 2.5, 2, 22),
        decode(4, 4, 2, 0, "draft_decode"),
        decode(5.25, 5.25, 2, 26),
        decode(6, 6.25, 1, 14),
    ]
    found = steady(passes, 2)
    assert (found.steps, found.tokens, found.seconds) == (2, 6, 4.25)
    assert found.device_seconds == 3
    assert found.gaps == (0.5, 0.75)


# -- servers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("paced") / "model", HEADED)


@pytest.fixture(scope="module")
def paced(launch, model, tmp_path_factory):
    """Return a function that starts a server on the paced device."""

    def start(name, *flags, **environment):
        folder = tmp_path_factory.mktemp(name)
        setting = {"profile": "h100-8b", "log": str(folder / "passes.jsonl")}
        (folder / "device.json").write_text(json.dumps(setting))
        size = ("--max-running-requests", "8", "--max-total-tokens", "40000")
        size += ("--mem-fraction-static", "0.1", "--context-length", "4096")
        server = launch(
            name, model, *FLAGS, *size, *flags,
            **{VARIABLE: str(folder / "device.json")}, **environment,
        )  # fmt: skip
        server.passes = folder / "passes.jsonl"
        return server

    return start


@pytest.fixture(scope="module")
def bare(paced):
    return paced("paced-bare", "--attention-backend", "torch_native", SGLANG_PLUGINS=PLUGIN)


@pytest.fixture(scope="module")
def ours(paced, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    profile, head = folder / "profile.yaml", write_head(folder / "head")
    drafters = {"model": {}, "eagle3": {"path": str(head)}, "tree": {"path": str(head), "width": 3}}
    profile.write_text(json.dumps({"drafter": "suffix", "drafters": drafters}))
    return paced(
        "paced-ours",
        *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
        *("--speculative-draft-model-path", str(model), "--speculative-num-steps", "4"),
        OUTRIDER_CONFIG=str(profile),
    )


@pytest.fixture(scope="module")
def both(bare, ours):
    """Both servers, which start at the same time."""
    return bare.wait(), ours.wait()


def answers(server, asked, **options):
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    if options:
        params["custom_params"] = {"outrider": options}
    body = {"input_ids": [prompt.ids for prompt in asked], "sampling_params": params}
    since = now()
    found = server.ask("/generate", body)
    return [answer["output_ids"] for answer in found], finished_log(server.passes, since)


def test_bare_sglang_writes_the_texts_at_the_devices_pace(both):
    bare, _ = both
    asked = prompts(MIXED, 1)
    started = now()
    tokens, passes = answers(bare, asked)
    assert tokens == [prompt.output[:TOKENS] for prompt in asked]
    decodes = [p for p in passes if p.kind == "decode"]
    assert len(decodes) >= TOKENS - 1
    cost = H100_8B.target.decode(1, len(asked[0].ids))
    assert now() - started > (TOKENS - 1) * cost
    assert decodes[0].context == len(asked[0].ids)
    assert decodes[0].done - decodes[0].start == pytest.approx(cost)
    # overlap: most passes are launched before the one before them is done
    hidden = [b.queued < a.done for a, b in pairwise(decodes)]
    assert sum(hidden) > len(hidden) / 2
    # a read never comes back before its pass is done, and none is forgotten
    assert sum(p.read > 0 for p in decodes) >= TOKENS - 1
    assert steady(passes, 1).tokens_per_second < 1 / cost


@pytest.mark.parametrize("options", [{}, {"drafter": "model"}, {"max_drafts": 0}])
def test_outrider_writes_the_same_texts(both, options):
    _, ours = both
    asked = prompts(MIXED, 5, first=1)
    tokens, passes = answers(ours, asked, **options)
    assert tokens == [prompt.output[:TOKENS] for prompt in asked]
    found = steady(passes, 5)
    kinds = {p.kind for p in passes}
    assert ("draft_decode" in kinds) == (options.get("drafter") == "model")
    if options.get("max_drafts") == 0:
        assert found.tokens == 5 * found.steps
    else:
        assert found.tokens > 5.5 * found.steps


@pytest.mark.parametrize("drafter", ["eagle3", "tree"])
def test_a_head_drafts_what_a_real_one_did(both, drafter):
    _, ours = both
    asked = prompts(STORIES, 5)
    tokens, passes = answers(ours, asked, drafter=drafter)
    assert tokens == [prompt.output[:TOKENS] for prompt in asked]
    assert {p.kind for p in passes} == {"prefill", "decode", "head_decode"}
    found = steady(passes, 5)
    assert found.tokens > 15 * found.steps


def test_sampled_requests_are_refused(both):
    for server in both:
        params = {"temperature": 0.7, "max_new_tokens": 4}
        asked = prompts(MIXED, 1)[0]
        response = server.post("/generate", {"input_ids": asked.ids, "sampling_params": params})
        assert response.status_code == 400
        assert "greedy" in response.text


def test_the_devices_work_is_priced_in_both_servers(both):
    """A step without drafts has as many launches, and as little of it is left to the CPU."""
    found = []
    for server, options in zip(both, ({}, {"max_drafts": 0}), strict=True):
        tokens, passes = answers(server, asked := prompts(MIXED, 5, first=11), **options)
        assert tokens == [prompt.output[:TOKENS] for prompt in asked]
        parts = json.loads(parts_file(server.passes).read_text())
        assert "sampler" in parts
        found.append(steady(passes, 5))
    bare, ours = found
    for own in found:
        assert own.excused > 0
        assert own.launching == pytest.approx(own.launches * LAUNCH, rel=0.4)  # and views
        assert 14 <= own.launches / own.steps <= 30
    assert abs(bare.launches / bare.steps - ours.launches / ours.steps) < 8


def test_long_prompts_are_read_in_chunks(both):
    bare, _ = both
    asked = prompts("edit", 6, context=3500)
    tokens, passes = answers(bare, asked)
    assert tokens == [prompt.output[:TOKENS] for prompt in asked]
    assert sum(p.kind == "prefill" for p in passes) > 1


# -- a head


def test_a_head_knows_a_place_by_its_states(tmp_path):
    """In order, it says what was recorded at each depth; with other states, something else."""
    device = Device(H100_8B)
    head = device.head(write_head(tmp_path / "head"), HEADED)
    [asked] = prompts(STORIES, 1, first=3)
    which, shift = asked.ids[:2]
    start, text = len(asked.ids), [*asked.ids, *asked.output]

    def drafts(first, count, wrong=0):
        """What the head drafts behind output token `first`, if the text goes on as it does."""
        state = Answers().states(np.array([asked.ids[:4]]), np.array([start + first - 1 + wrong]))
        x, found = torch.zeros(1, head.config.hidden_size), []
        x[:, :4] = torch.from_numpy(state)
        for i in range(first, first + count):
            x = head(torch.tensor([text[start + i]]), x, None, None)
            found.append(head.logits(x).argmax(-1).tolist()[0])
        return found

    said = texts()[which].head
    expected = [(said[41 + i][i][0][0] + shift) % VOCABULARY for i in range(4)]
    assert drafts(40, 4) == expected
    assert drafts(40, 4, wrong=1) != expected
    assert sum(drafts(i, 1)[0] == asked.output[i + 1] for i in range(100)) > 80
    with pytest.raises(ValueError, match="no costs of a head"):
        Device(PROFILES["mi300x-32b"]).head(tmp_path / "head", HEADED)


# -- a draft server's


def test_what_is_likely_on_the_text_and_off_it():
    cost = PROFILES["h100x4-70b"].draft
    model, (asked,) = PacedBranches(cost), prompts("code", 1)
    sequence, foreseen = model.open(), 0
    model.extend([(sequence, asked.ids)])
    for token, following in pairwise(asked.output[:60]):
        (logits,) = model.extend([(sequence, [token])])
        foreseen += following in logits.topk(3).indices.tolist()
    assert sequence.is_on_text
    assert foreseen > 45
    branch, began = model.fork(sequence), now()
    model.extend([(branch, [(asked.output[60] + 1) % VOCABULARY])])
    assert now() - began >= cost.fixed
    assert sequence.is_on_text > branch.is_on_text
    (logits,) = model.extend([(branch, [asked.output[61]])])
    assert asked.output[62] not in logits.topk(3).indices.tolist()
