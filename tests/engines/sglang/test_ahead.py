"""Drafting ahead in the server: a draft server changes speed only, whatever becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import parity
import pytest
from draft_process import TINY, DraftProcess
from outrider_test_site import no_repeat_processor

TARGET = TINY / "target"


@pytest.fixture
def drafts(tmp_path):
    process = DraftProcess(tmp_path / "draft.sock")
    yield process
    process.stop()


def test_the_answers_are_those_of_bare_sglang(
    launch, deterministic, drafts, tmp_path, record_property
):
    """Requests of every kind; the draft server is killed and stalled again and again."""
    drafters = {
        "ahead": {"socket": str(drafts.socket), "wait": 0.05},
        "adaptive": {"ahead": str(drafts.socket)},
    }
    environment = parity.profile(tmp_path, drafters, max_drafts=6)
    bare = deterministic("ahead", TARGET)
    ours = [*parity.TIGHT, *parity.OUTRIDER, *parity.DETERMINISTIC]
    ours = launch("ahead", TARGET, *ours, **environment)
    phases = parity.seeded_phases("stories260k", 60, 32, no_repeat_processor())
    over = threading.Event()
    with bare, ours:
        trouble = threading.Thread(target=drafts.disturb, args=(over,))
        trouble.start()
        try:
            comparison = parity.compare_seeded(bare, ours, phases, (4, 16), drafters)
        finally:
            over.set()
            trouble.join()
        parity.check_traffic(ours, retracts=False, drafters=["ahead"])
        counters = ours.metrics()
        found = {k: v for k, v in counters.items() if "foreseen_total{" in k}
        hits = sum(v for k, v in found.items() if 'found="hit"' in k)
        assert hits > 0, found
        assert not parity.faults(ours)
        explain_until_a_hit(ours, tmp_path)
    comparison.conclude(0.0)
    assert min(drafts.trouble.values()) >= 1, drafts.trouble
    record_property("tokens compared", comparison.tokens)


def explain_until_a_hit(server, folder):
    """Ask as users do what each step did: the host looks for a draft server once a second."""
    for turn in range(10):
        out = ["--drafter", "ahead", "--out", str(folder / f"explained{turn}")]
        shown = run(["outrider", "explain", "Once upon a time", "--url", server.url, *out])
        steps = json.loads((folder / f"explained{turn}/explain.json").read_text())["steps"]
        assert {step["foreseen"] for step in steps[1:]} <= {"hit", "miss", "end", "none"}
        assert "drafts made ahead: " in shown
        if any(step["foreseen"] == "hit" for step in steps):
            return
    raise AssertionError(shown)


def run(command):
    """Run a command of the package, and return what it prints."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_without_its_draft_server_answers(launch, tmp_path):
    missing = {"ahead": {"socket": str(tmp_path / "none.sock")}}
    environment = parity.profile(tmp_path, missing, max_drafts=4)
    flags = [*parity.ROOMY, *parity.OUTRIDER, *parity.DETERMINISTIC]
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    sampling["custom_params"] = {"outrider": {"drafter": "ahead", "explain": True}}
    body = {"text": "Once upon a time", "sampling_params": sampling}
    with launch("no-ahead", TARGET, *flags, **environment) as server:
        answer = server.ask("/generate", body)
    assert len(answer["output_ids"]) == 8
    steps = answer["meta_info"]["outrider_steps"]
    assert [step["foreseen"] for step in steps] == ["none"] * 7  # all but the prompt's token
