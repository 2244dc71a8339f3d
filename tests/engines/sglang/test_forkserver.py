"""Forked servers have their own environment, plugins and exit codes, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from forkserver import Forked, ForkServers
from server import Server

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
FLAGS = [
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "1024", "--enable-metrics"),
    *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
]


def family(pid):
    """Return a process and all that it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def gone(processes):
    return not psutil.wait_procs(processes, timeout=20)[1]


def test_its_processes_are_forked_and_have_plugins(launch, profile):
    with launch("forked", TINY / "target", *FLAGS, **profile(drafter="ngram")) as server:
        assert isinstance(server.process, Forked)
        processes = family(server.process.pid)
        imported = [p for p in processes if p.cmdline()[1].endswith("forkserver.py")]
        assert len(imported) >= 3  # the server, its scheduler and its detokenizer
        greedy = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        server.ask("/generate", {"text": "a b c d " * 8, "sampling_params": greedy})
        # the scheduler's counters: it has the plugin, and the environment that the server gave it
        assert "outrider:draft_tokens_total" in server.metrics()
        assert server.process.poll() is None
    assert server.process.returncode == -9
    assert gone(processes)


def test_its_exit_code_is_known(launch, profile):
    server = launch("refused", TINY / "target", *FLAGS, **profile(drafter="sufix"))
    assert isinstance(server.process, Forked)
    assert server.process.wait(60) == 1
    assert "outrider: drafter 'sufix'" in server.log.read_text()


def test_what_cannot_be_forked_starts_plainly(tmp_path, caplog):
    (tmp_path / "sglang.py").write_text("raise SystemExit('no SGLang')")
    forks, log = ForkServers(tmp_path), tmp_path / "plain.log"
    for _ in range(2):  # its fork server ends; it has ended
        caplog.clear()
        command = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
        paths = {"PYTHONPATH": str(tmp_path)}
        server = Server(TINY, *FLAGS, log=log, command=command, forks=forks, **paths)
        assert server.process.wait(20) == 0
        assert "--speculative-algorithm" in log.read_text()
        assert "plain is not forked" in caplog.text
    forks.close()
    assert "no SGLang" in (tmp_path / "forkserver0.log").read_text()


KILLED = """
import sys
from pathlib import Path
from forkserver import ForkServers
from server import Server

model, flags, logs = sys.argv[1], sys.argv[2:-1], Path(sys.argv[-1])
forks = ForkServers(logs)
Server(model, *flags, log=logs / "server.log", forks=forks).wait()
print("started", flush=True)
input()
"""


def test_nothing_outlives_tests_that_are_killed(tmp_path):
    command = [sys.executable, "-c", KILLED, str(TINY / "target"), *FLAGS, str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    files = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, **files) as tests:
        assert tests.stdout.readline() == b"started\n"
        processes = family(tests.pid)
        assert len(processes) > 4
        tests.kill()
        assert gone(processes)
