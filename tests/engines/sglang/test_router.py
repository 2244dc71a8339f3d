"""Replicas behind SGLang's router give the same answers, whoever drafts in them; one may die."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from server import Server, free_port, session

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
KEY = "key-of-the-replicas"
FLAGS = [
    *("--attention-backend", "outrider", "--enable-deterministic-inference"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "4096"),
    *("--speculative-algorithm", "OUTRIDER", "--api-key", KEY),
]
PROMPTS = ["On a misty morning,", "The road was", "In the blue carriage"]  # odd, for round robin


class Router(Server):
    """SGLang's router in front of these servers."""

    def __init__(self, workers: list[Server], log: Path):
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--prometheus-port", str(free_port())]
        command += ["--policy", "round_robin", "--api-key", KEY]
        command += ["--worker-urls", *(worker.url for worker in workers)]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def test_two_replicas(launch, logs, profile, monkeypatch):
    monkeypatch.setitem(session().headers, "Authorization", f"Bearer {KEY}")
    draft = ["--speculative-draft-model-path", str(TINY / "draft")]
    replicas = [
        launch("replica-model", TINY / "target", *FLAGS, *draft, **profile(drafter="model")).wait(),
        launch("replica-ngram", TINY / "target", *FLAGS, **profile(drafter="ngram")).wait(),
    ]
    with Router(replicas, logs / "router.log") as router:

        def ask() -> tuple[list[list[int]], set[int]]:
            """Return the answers, and how many passes the first prompt has taken."""
            sampling = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 40}
            bodies = [{"text": text, "sampling_params": sampling} for text in PROMPTS * 3]
            answers = [router.ask("/generate", body) for body in bodies]
            passes = {a["meta_info"]["spec_verify_ct"] for a in answers[:: len(PROMPTS)]}
            return [answer["output_ids"] for answer in answers], passes

        wait_for(router, 2)
        answers, passes = ask()
        assert answers == answers[: len(PROMPTS)] * 3
        assert len(passes) == 2  # both replicas were asked: one drafts better than the other
        replicas[0].stop()
        assert ask()[0] == answers


def wait_for(router: Router, workers: int) -> None:
    """Wait until the router knows so many workers."""
    for _ in range(120):
        reply = session().get(router.url + "/workers", timeout=10)
        if reply.ok and len(reply.json().get("workers", [])) >= workers:
            return
        time.sleep(0.5)
    raise AssertionError(router.tail())
