"""Drafting ahead in the server: a draft server changes speed only, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import parity
import pytest
from outrider_test_site import no_repeat_processor

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
TARGET = TINY / "target"


class DraftProcess:
    """`outrider draft-server`, which can be killed, stopped for a while, and started anew."""

    def __init__(self, socket):
        self.socket, self.trouble = socket, {"killed": 0, "stalled": 0}
        self.start()

    def start(self):
        command = [sys.executable, "-m", "outrider", "draft-server", str(TINY / "draft")]
        self.process = subprocess.Popen(
            [*command, "--socket", str(self.socket), "--threads", "1"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert "draft server:" in self.process.stdout.readline()

    def stop(self):
        self.process.kill()
        self.process.wait(30)

    def disturb(self, over):
        """Kill it, start it again, stop it for a while: until told to end."""
        while not over.wait(2):
            self.stop()
            self.trouble["killed"] += 1
            over.wait(0.5)
            self.start()
            if over.wait(2):
                break
            self.process.send_signal(signal.SIGSTOP)
            over.wait(1)
            self.process.send_signal(signal.SIGCONT)
            self.trouble["stalled"] += 1


@pytest.fixture
def drafts(tmp_path):
    process = DraftProcess(tmp_path / "draft.sock")
    yield process
    process.stop()


def test_the_answers_are_those_of_bare_sglang(launch, drafts, tmp_path, record_property):
    """Requests of every kind; the draft server is killed and stalled again and again."""
    drafters = {
        "ahead": {"socket": str(drafts.socket), "wait": 0.05},
        "adaptive": {"ahead": str(drafts.socket)},
    }
    environment = parity.profile(tmp_path, drafters, max_drafts=6)
    bare = launch("ahead-bare", TARGET, *parity.BARE, *parity.DETERMINISTIC)
    ours = [*parity.TIGHT, *parity.OUTRIDER, *parity.DETERMINISTIC]
    ours = launch("ahead", TARGET, *ours, **environment)
    phases = parity.seeded_phases("stories260k", 90, 32, no_repeat_processor())
    over = threading.Event()
    with bare, ours:
        trouble = threading.Thread(target=drafts.disturb, args=(over,))
        trouble.start()
        try:
            comparison = parity.compare_seeded(bare, ours, phases, (4, 16), drafters)
        finally:
            over.set()
            trouble.join()
        parity.check_traffic(ours, drafters=["ahead"])
        counters = ours.metrics()
        found = {k: v for k, v in counters.items() if "foreseen_total{" in k}
        hits = sum(v for k, v in found.items() if 'found="hit"' in k)
        assert hits > 0, found
        assert not {k: v for k, v in counters.items() if "fallbacks_total{" in k and v}
    comparison.conclude(0.0)
    assert min(drafts.trouble.values()) >= 1, drafts.trouble
    record_property("tokens compared", comparison.tokens)


def test_a_server_without_its_draft_server_answers(launch, tmp_path):
    missing = {"ahead": {"socket": str(tmp_path / "none.sock")}}
    environment = parity.profile(tmp_path, missing, max_drafts=4)
    flags = [*parity.ROOMY, *parity.OUTRIDER, *parity.DETERMINISTIC]
    body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}}
    body["sampling_params"]["custom_params"] = {"outrider": {"drafter": "ahead"}}
    with launch("no-ahead", TARGET, *flags, **environment) as server:
        assert len(server.ask("/generate", body)["output_ids"]) == 8
