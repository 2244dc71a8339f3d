"""`outrider doctor` beside the real SGLang, and asking a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
FLAGS = ["--attention-backend", "outrider", "--mem-fraction-static", "0.1"]
FLAGS += ["--max-total-tokens", "4096", "--context-length", "400"]


def doctor(*args):
    command = [sys.executable, "-m", "outrider", "doctor", "--json", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)


def said(document, area):
    return [(f["level"], f["what"]) for f in document["findings"] if f["area"] == area]


def test_the_sglang_here_is_the_one_we_know():
    """It imports all that the contract names, and lays the hooks: stdout is the document's."""
    found = said(doctor(TINY / "target", TINY / "draft"), "hosts")
    assert ("ok", "SGLang finds the plugin, and all of its hooks hold") in found
    assert any(level == "ok" and "as the contract says" in what for level, what in found)


def test_a_server_says_what_it_runs(launch):
    ours = ["--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "3"]
    ours += ["--speculative-draft-model-path", str(TINY / "draft")]
    with launch("doctor", TINY / "target", *FLAGS, *ours) as server:
        document = doctor("--url", server.url)
    assert document["server"]["versions"] == {"sglang": "0.5.11"}
    assert document["draft"]["name"] == str(TINY / "draft")
    plan = document["plan"]
    assert (plan["drafts"], plan["context"], plan["tp"]) == (3, 400, 1)
    found = said(document, "server")
    assert any("OUTRIDER is on: K = 3" in what for _, what in found)
    assert any("room for 4,096 tokens" in what for _, what in found)
    assert said(document, "known bad") == []
