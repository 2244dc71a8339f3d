"""What our part of a decode step costs the CPU, against a fixed piece of work.

The figures in `cpu_time.json` are ratios, of each version of SGLang. They are written by

    OUTRIDER_TEST_CPU_WRITE=1 pytest tests/engines/sglang/test_cpu_time.py -n 0

A step that has become cheaper fails nothing: write the figures anew, so that it stays cheap.

Processors differ by more than MARGIN, and so does a busy machine from an idle one: the daily test
allows WIDE. The one with MARGIN, and its twin, are marked `slow`. Run them before and after a
change of the served step, on one machine, with figures that were written there.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import numpy as np
import pytest
from paced import clock
from paced.cpu_time import VARIABLE as METER
from paced.log import finished_log
from paced.model import FLAGS, write_model
from paced.plugin import VARIABLE
from paced.texts import MIXED, prompts

from outrider.engines.sglang.versions.contract import known_contract

FIGURES, VERSION = Path(__file__).with_name("cpu_time.json"), known_contract().VERSION
WRITE = "OUTRIDER_TEST_CPU_WRITE"
"""If it is set, the figures are written, not compared."""

DRAFTERS, BATCHES = ("none", "suffix", "device", "adaptive"), (1, 16, 64)
TOKENS, FIRST = {1: 200, 16: 160, 64: 120}, 6
"""FIRST steps are left out: requests come, and control begins."""

ROUNDS, MARGIN, WIDE, PLANTED = 3, 0.15, 0.6, 0.25
"""How often a case is measured at most: the cheapest round counts. How much more a step may cost
than in the middle round of the figures. A step that costs PLANTED more must fail."""

CHOOSES, LOOSE = "adaptive", 0.25
"""Control takes other decisions from round to round, and steps of one kind cost up to twice as much
as those of another. They may cost so much more than in the dearest round of the figures."""


class Metered:
    """A server, and what its steps cost."""

    def __init__(self, launch, folder: Path) -> None:
        self._log, self._passes = folder / "steps.jsonl", folder / "passes.jsonl"
        self.planted = folder / "steps.jsonl.planted"
        device = {"profile": "h100-8b-line", "log": str(self._passes), "spin": 0}
        device["price_device_work"] = False  # CPU time is what is measured
        profile = {"max_drafts": 8, "drafter": "suffix", "drafters": {"adaptive": {}, "device": {}}}
        (folder / "device.json").write_text(json.dumps(device))
        (folder / "profile.json").write_text(json.dumps(profile))
        self._server = launch(
            "metered", write_model(folder / "model"), *FLAGS,
            *("--max-running-requests", "64", "--max-total-tokens", "300000"),
            *("--mem-fraction-static", "0.1", "--context-length", "4096"),
            *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
            OUTRIDER_CONFIG=str(folder / "profile.json"),
            **{VARIABLE: str(folder / "device.json"), METER: str(self._log)},
        ).wait()  # fmt: skip

    def steps(self, drafter: str, batch: int) -> np.ndarray:
        """Return our seconds and the reference's, [steps, 2], with all requests in the batch."""
        self._log.unlink(missing_ok=True)
        asked, since = prompts(MIXED, batch, first=1), clock.now()
        params = {"temperature": 0, "max_new_tokens": TOKENS[batch], "ignore_eos": True}
        params["custom_params"] = {"outrider": {"drafter": drafter, "max_drafts": 3}}
        body = {"input_ids": [prompt.ids for prompt in asked], "sampling_params": params}
        answers = self._server.ask("/generate", body)
        assert [a["output_ids"] for a in answers] == [p.output[: TOKENS[batch]] for p in asked]
        finished_log(self._passes, since)
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        full = np.array([line[1:] for line in lines if line[0] == batch])
        assert len(full) > 2 * FIRST, "too few steps"
        return full[FIRST:]


@pytest.fixture(scope="module")
def metered(launch, tmp_path_factory):
    return Metered(launch, tmp_path_factory.mktemp("metered"))


def cost(steps: np.ndarray) -> float:
    """Return what a step costs, in references. Others on the machine make dear steps dearer."""
    ours, reference = np.quantile(steps, 0.25, axis=0)
    return float(ours / reference)


def names():
    return [f"{drafter}, B = {batch}" for drafter in DRAFTERS for batch in BATCHES]


def measured(metered: Metered, name: str) -> float:
    """Return the cost of a step of a case."""
    drafter, batch = name.split(", B = ")
    return cost(metered.steps(drafter, int(batch)))


def limit(name: str, margin: float) -> float:
    """Return what a step of a case may cost."""
    rounds: list[float] = json.loads(FIGURES.read_text())[VERSION][name]
    if name.startswith(CHOOSES):
        return max(rounds) * (1 + max(margin, LOOSE))
    return statistics.median(rounds) * (1 + margin)


def over(metered: Metered, cases, margin: float) -> dict[str, list[float]]:
    """Return the cases that cost too much in each of some rounds, and what they cost."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name in found:
            found[name].append(round(measured(metered, name), 2))
        found = {name: costs for name, costs in found.items() if min(costs) > limit(name, margin)}
    return found


def write(metered: Metered) -> None:
    """Write the figures of this version: what each round of each case costs."""
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    figures["written by"] = f"{WRITE}=1 pytest tests/engines/sglang/{Path(__file__).name} -n 0"
    figures[VERSION] = {
        name: sorted(round(measured(metered, name), 2) for _ in range(ROUNDS)) for name in names()
    }
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("margin", [WIDE, pytest.param(MARGIN, marks=pytest.mark.slow)])
def test_a_step_costs_no_more_than_it_did(metered, margin):
    """The message lists what the steps of each case cost in each round."""
    if os.environ.get(WRITE):
        write(metered)
        pytest.skip("the figures were written")
    found = over(metered, names(), margin)
    limits = {name: limit(name, margin) for name in found}
    assert not found, json.dumps({name: (limits[name], found[name]) for name in found}, indent=1)


@pytest.mark.slow
def test_a_step_that_costs_more_is_found(metered):
    metered.planted.write_text(str(PLANTED))
    try:
        assert over(metered, ["none, B = 16", "device, B = 16"], MARGIN)
    finally:
        metered.planted.unlink()
