"""The budget of a decode step: one read from the device, two copies to it; without drafts none."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from paced import clock
from paced.log import finished_log
from paced.model import FLAGS, HEADED, write_head, write_model
from paced.plugin import VARIABLE
from paced.recorder import DEVICE, MixedDevices, Recorder, Step, is_labelled, label
from paced.recorder import VARIABLE as RECORD
from paced.tensor import Timed
from paced.texts import MIXED, prompts

READS, COPIES, BEGINS = 1, 2, 5
"""One of the copies is for slots that are reserved ahead: the device does not wait for it. A step
in which the device begins to draft reads, and tells it texts, where they are, lengths and rows."""
TOKENS = 40


@pytest.fixture
def record():
    """Record what this file does."""
    step = Step()
    with Recorder(lambda file: file == __file__, step):
        yield step


def on_device(values):
    tensor = torch.tensor(values)
    label(tensor)
    return tensor


def test_reads_are_found(record):
    x = on_device([1, 2, 3])
    y = (x + 1)[:2]
    assert y.device == DEVICE
    assert not record.reads
    assert y.tolist() == [2, 3]
    x[x > 1]
    copy = y.to("cpu", non_blocking=True)
    assert copy.tolist() == [2, 3]  # on the host: no second read
    assert [read.split()[1] for read in record.reads] == ["tolist", "__getitem__", "to"]
    assert all("sglang/test_recorder.py:" in read for read in record.reads)
    assert not record.copies


def test_copies_are_found(record):
    x = on_device([1, 2, 3])
    made = torch.tensor([1, 2], device=x.device)
    assert is_labelled(made)
    torch.arange(3).to(x.device, non_blocking=True)
    x[[0, 1]]
    x[torch.tensor([0, 1])] = made
    x.copy_(torch.arange(3))
    names = ["tensor", "to", "__getitem__", "__setitem__", "copy_"]
    assert [copy.split()[1] for copy in record.copies] == names
    assert not record.reads


def test_what_stays_on_one_side_is_free(record):
    x = on_device([1, 2, 3])
    torch.arange(3, device=DEVICE) + x
    x[0] = 5
    x[x.clone() % 2] += 1
    torch.zeros_like(x) + x.to(torch.int32).to(DEVICE)
    host = torch.arange(3)
    assert (host[host > 1] + 1).tolist() == [3]
    assert record == Step()


def test_mixing_is_refused(record):
    x = on_device([1, 2, 3])
    with pytest.raises(MixedDevices):
        x + torch.arange(3)
    assert (x + torch.tensor(1)).device == DEVICE  # a number may come from anywhere
    assert len(record.mixes) == 1


def test_what_a_pass_made_is_the_devices(record):
    tokens = Timed.of(torch.tensor([1, 2]), 0.0, lambda ready: None)
    (tokens + 1).tolist()
    assert len(record.reads) == 1


def test_others_are_not_counted():
    step = Step()
    x = on_device([1, 2, 3])
    with Recorder(lambda file: False, step):
        y = torch.cat([x, x])
        y.tolist()
    assert is_labelled(y)
    assert step == Step()


# -- Outrider's worker


def steps_of(launch, folder, profile, cases, *flags, layers=1):
    """Return what the decode steps of a server do, by case: its name, its batch, its options."""
    model, file = write_model(folder / "model", layers), folder / "steps.jsonl"
    setting = {"profile": "h100-8b-line", "log": str(folder / "passes.jsonl")}
    setting["price_device_work"] = False  # it labels the device's tensors too
    (folder / "device.json").write_text(json.dumps(setting))
    (folder / "profile.yaml").write_text(json.dumps({"max_drafts": 8, **profile}))
    server = launch(
        "recorded", model, *FLAGS, *flags,
        *("--max-running-requests", "8", "--max-total-tokens", "40000"),
        *("--mem-fraction-static", "0.1", "--context-length", "4096"),
        *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
        OUTRIDER_CONFIG=str(folder / "profile.yaml"),
        **{VARIABLE: str(folder / "device.json"), RECORD: str(file)},
    )  # fmt: skip
    server.wait()
    found = {}
    for name, batch, options in cases:
        file.unlink(missing_ok=True)
        asked, since = prompts(MIXED, batch, first=1), clock.now()
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        params["custom_params"] = {"outrider": options}
        body = {"input_ids": [prompt.ids for prompt in asked], "sampling_params": params}
        answers = server.ask("/generate", body)
        assert [a["output_ids"] for a in answers] == [p.output[:TOKENS] for p in asked]
        finished_log(folder / "passes.jsonl", since)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = [Step(**line) for line in lines if line["requests"] == batch]
    return found


@pytest.fixture(scope="module")
def steps(launch, tmp_path_factory):
    cases = (
        ("suffix", 1, {"drafter": "suffix"}),
        ("suffix, K = 2", 5, {"drafter": "suffix", "max_drafts": 2}),
        ("suffix, B = 5", 5, {"drafter": "suffix"}),
        ("adaptive, B = 5", 5, {"drafter": "adaptive"}),
        ("none, B = 5", 5, {"drafter": "none"}),
    )
    profile = {"drafter": "suffix", "drafters": {"adaptive": {}}}
    return steps_of(launch, tmp_path_factory.mktemp("recorder"), profile, cases)


def test_every_drafter_was_recorded(steps):
    for name, found in steps.items():
        assert len(found) > 3, name
        # drafts of the CPU need a read; without them the scheduler reads later, and nothing waits
        if not name.startswith("adaptive"):
            assert any(step.reads for step in found) == (not name.startswith("none")), name
        assert not any(step.mixes for step in found), name


def test_a_step_reads_once_and_copies_twice(steps):
    """Chains, any K, any batch. The message lists where the last step of each drafter does it."""
    over = {}
    for name, found in steps.items():
        for step in found:
            if any("calibration" in where for where in step.reads):
                continue  # the first decode step of a server also times passes
            most = BEGINS if step.reads and name.startswith("adaptive") else COPIES
            if len(step.reads) > READS or len(step.copies) > most:
                over[name] = {"reads": Counter(step.reads), "copies": Counter(step.copies)}
    assert not over, json.dumps(over, indent=1)


def test_a_head_on_the_device_reads_nothing_before_the_launch(launch, tmp_path):
    """Only the first step reads. Each one copies the slots that it reserves."""
    profile = {"drafter": "eagle3", "drafters": {"eagle3": {"depth": 4}}}
    flags = ("--speculative-draft-model-path", str(write_head(tmp_path / "head")))
    cases = [(f"B = {batch}", batch, {}) for batch in (1, 5)]
    for name, found in steps_of(launch, tmp_path, profile, cases, *flags, layers=HEADED).items():
        assert len(found) > 3, name
        assert not [mix for step in found for mix in step.mixes], name
        for step in found[1:]:
            assert not step.reads, name
            assert len(step.copies) <= COPIES, name
