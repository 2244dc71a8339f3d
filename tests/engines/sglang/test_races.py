"""No two streams of a served step race: happens-before, on the paced device (see `paced.races`)."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paced.model import FLAGS, HEADED, write_head, write_model
from paced.plugin import VARIABLE
from paced.races.detector import PLANTS, Races, Report
from paced.races.modes import LABEL, following
from paced.races.server import VARIABLE as RACES
from paced.texts import MIXED, prompts

from outrider.engines.sglang.versions.contract import known_contract

HAS_FENCE = known_contract().VERSION != "0.5.11"
CLIENTS, REQUESTS, TOKENS = 5, 2, 40
"""Clients ask one request after the other: rows of the table and slots go to the next request."""

DRAFTERS = ("none", "suffix", "device", "adaptive", "forked")
"""`forked` has its drafts accepted on the second branch of a tree: slots change places."""


# -- the detector


@pytest.fixture
def races():
    """Follow what this file does, as if it was our own code."""
    found = Races(lambda file: file == __file__)
    with following(found):
        yield found


def on_device(*shape):
    return torch.zeros(shape, dtype=torch.int64, device=LABEL)


def on(stream):
    return torch.cpu.stream(stream)


@pytest.fixture
def streams():
    return torch.cpu.Stream(), torch.cpu.Stream()


def index(*values):
    return torch.tensor(values, device=LABEL)


def test_writes_without_a_wait_race(races, streams):
    a, b = streams
    x = on_device(4)
    torch.cpu.synchronize()
    b.wait_stream(a)  # too early
    with on(a):
        x += 1
    with on(b):
        x += 1
    (found,) = races.report().races
    assert "test_races.py" in found
    assert found.count(" writes on stream") == 2


def test_a_read_races_with_a_write_and_not_with_a_read(races, streams):
    a, b = streams
    x = on_device(4)
    torch.cpu.synchronize()
    with on(a):
        x + 1
    with on(b):
        x + 2
    assert not races.report().races
    with on(b):
        x.zero_()
    assert len(races.report().races) == 1


WAITS = {
    "wait_stream": lambda a, b, event: b.wait_stream(a),
    "wait_event": lambda a, b, event: b.wait_event(event),
    "event.wait": lambda a, b, event: event.wait(b),
    "event.synchronize": lambda a, b, event: event.synchronize(),
    "stream.synchronize": lambda a, b, event: a.synchronize(),
    "synchronize": lambda a, b, event: torch.cpu.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_put_operations_in_order(races, streams, name):
    a, b = streams
    x = on_device(4)
    torch.cpu.synchronize()
    event = torch.cpu.Event()
    with on(a):
        x += 1
        event.record()
    WAITS[name](a, b, event)
    with on(b):
        x += 1
    assert not races.report().races
    with on(a):
        x += 1  # nobody waits for b
    assert len(races.report().races) == 1


def test_a_read_on_the_cpu_waits_for_its_stream(races, streams):
    a, b = streams
    x = on_device(4)
    torch.cpu.synchronize()
    with on(a):
        x += 1
        x.tolist()
    with on(b):
        x += 1
    assert not races.report().races


def test_a_copy_to_the_cpu_is_read_there(races, streams):
    a, b = streams
    x = on_device(4)
    torch.cpu.synchronize()
    with on(a):
        copy = x.to("cpu", non_blocking=True)
    copy += 1
    with on(b):
        copy += 1  # the CPU's own
        x += 1
    assert len(races.report().races) == 1


def test_cells_are_told_apart(races, streams):
    a, b = streams
    x, rows, others = on_device(4, 8), index(0, 2), index(1, 3)
    torch.cpu.synchronize()
    with on(a):
        x[rows, rows] = rows
        x[rows]
        x[0, 4:] = 1
    with on(b):
        x[others, others] = others
        x[others] += 1
        x[1:2]
        x[3:] = 2
    assert not races.report().races
    with on(b):
        x[index(2), index(2)]
    (found,) = races.report().races
    assert "reads" in found


def test_what_is_computed_is_the_devices(races, streams):
    a, b = streams
    x = on_device(4) + 1
    assert x.device == LABEL
    assert torch.zeros(4).device != LABEL
    assert (x.clone()[:2] * 2).view(1, 2).device == LABEL
    assert x.to("cpu").device != LABEL


# -- a server


def follow(launch, folder, profile, names, *flags, layers=1, plant=None, count=REQUESTS) -> Report:
    """Return what a server is found to do while requests come and go.

    names: of their drafters
    count: how many requests each client sends
    """
    model = write_model(folder / "model", layers)
    for name, content in (
        ("device", {"profile": "h100-8b-line", "price_device_work": False}),
        ("races", {"log": str(folder / "found.json"), "plant": plant}),
        ("profile", {"max_drafts": 6, **profile}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    server = launch(
        f"races-{folder.name}", model, *FLAGS, *flags,
        *("--max-running-requests", "4", "--max-total-tokens", "4000"),
        *("--mem-fraction-static", "0.1", "--context-length", "4096"),
        *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
        OUTRIDER_CONFIG=str(folder / "profile.json"),
        **{VARIABLE: str(folder / "device.json"), RACES: str(folder / "races.json")},
    )  # fmt: skip
    server.wait()
    asked = [prompt for prompt in prompts(MIXED, 8, first=1) if len(prompt.ids) < 600]

    def client(number, names):
        drawn = random.Random(number)
        for _ in range(count):
            time.sleep(drawn.random() / 50)
            prompt, tokens = drawn.choice(asked), drawn.randrange(2, TOKENS)
            params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            params["custom_params"] = {"outrider": {"drafter": drawn.choice(names)}}
            answer = server.ask("/generate", {"input_ids": prompt.ids, "sampling_params": params})
            assert answer["output_ids"] == prompt.output[:tokens]

    # one drafter after the other, so that steps are of one kind; then all together
    mixes = [[name] for name in names] + [names] * (len(names) > 1)
    with ThreadPoolExecutor(CLIENTS) as pool:
        for mix in mixes:
            list(pool.map(client, range(CLIENTS), [mix] * CLIENTS))
    time.sleep(1.0)  # what is found is written when the server is idle
    found = Report(**json.loads((folder / "found.json").read_text()))
    forward = found.ours.pop("forward")
    assert forward > 1000, "it has seen next to nothing of the forward stream"
    assert sum(found.ours.values()) > 50, "and of the scheduler's"
    return found


PROFILE = {"drafter": "suffix", "drafters": {name: {} for name in DRAFTERS[2:]}}


def check(found: Report) -> None:
    """Raise if there is a race. Before 0.5.23 SGLang has no fence against its own."""
    assert not found.races, json.dumps(found.races, indent=1)
    assert not (HAS_FENCE and found.unfenced), json.dumps(found.unfenced, indent=1)


def test_no_race_with_drafts_of_the_cpu_and_of_the_device(launch, tmp_path):
    found = follow(launch, tmp_path, PROFILE, DRAFTERS)
    check(found)
    assert found.waits  # the paths that only a GPU takes: a tree's slots change places


def test_no_race_with_a_head_on_the_device(launch, tmp_path):
    profile = {"drafter": "eagle3", "drafters": {"eagle3": {"depth": 4}}}
    flags = ("--speculative-draft-model-path", str(write_head(tmp_path / "head")))
    check(follow(launch, tmp_path, profile, ("eagle3",), *flags, layers=HEADED))


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_race_is_found(launch, tmp_path, plant):
    name = {"no waits": "forked", "stray": "none"}[plant]
    found = follow(launch, tmp_path, PROFILE, (name,), plant=plant, count=6)
    assert any("reads on forward" in race for race in found.races), found
