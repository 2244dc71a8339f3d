"""Real SGLang servers on loopback: start, probe, ask, stop."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import requests
from forkserver import Forked, ForkServers

logger = logging.getLogger(__name__)


def unused_models() -> str:
    """Return the names of SGLang's model files that no test needs: each process reads them all."""
    found = find_spec("sglang")
    folders = found.submodule_search_locations if found else ()
    files = [file for folder in folders for file in Path(folder).glob("srt/models/*.py")]
    return ",".join(sorted({file.stem for file in files} - {"__init__", "llama", "gpt2"}))


ENVIRONMENT = {
    "SGLANG_DISABLED_MODEL_ARCHS": unused_models(),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
CPU = ["--device", "cpu", "--host", "127.0.0.1", "--skip-server-warmup", "--sleep-on-idle"]
STARTUP_SECONDS = 240


def free_port() -> int:
    """Return a port that nobody has now; SGLang adds 10,000 for a second one of its own.

    Both below 32,768: from there on clients get theirs, and may take it while a server loads.
    """
    while True:
        port = random.randrange(10_000, 22_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


class Server:
    """One server, with its log. `flags` are SGLang's own.

    forks: who starts it; without, or if that fails, it starts as servers do
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        log: Path,
        command: list[str] | None = None,
        forks: ForkServers | None = None,
        **environment: str,
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        start = command or [sys.executable, "-m", "sglang.launch_server"]
        where = ["--model-path", str(model), "--port", str(self.port)]
        env = {**os.environ, **ENVIRONMENT, **environment}
        env.setdefault("OMP_NUM_THREADS", "1")
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        arguments = [*where, *CPU, *flags]
        self.process: subprocess.Popen[bytes] | Forked
        if forks:
            try:
                self.process = forks.start(arguments, env, log)
                return
            except OSError as error:
                logger.warning("%s is not forked: %r", log.stem, error)
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*start, *arguments], stdout=out, stderr=subprocess.STDOUT, env=env
            )

    def wait(self) -> Server:
        """Return when the server answers; raise with the end of its log if it dies."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server died ({self.process.returncode}):\n{self.tail()}")
            try:
                if requests.get(self.url + "/health", timeout=5).ok:
                    return self
            except requests.RequestException:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.tail()}")

    def stop(self) -> None:
        """End the server and its children, by their pids."""
        try:
            tree = psutil.Process(self.process.pid)
            family = [*tree.children(recursive=True), tree]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=20)
        self.process.wait(20)

    def __enter__(self) -> Server:
        return self.wait()

    def __exit__(self, *exc) -> None:
        self.stop()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    # -- asking

    def post(self, path: str, body: dict, timeout: float = 300) -> requests.Response:
        return session().post(self.url + path, json=body, timeout=timeout)

    def post_text(self, path: str, body: str) -> requests.Response:
        """Post JSON that Python would not write."""
        headers = {"Content-Type": "application/json"}
        return session().post(self.url + path, data=body, headers=headers, timeout=300)

    def ask_for(self, path: str) -> dict:
        response = session().get(self.url + path, timeout=30)
        assert response.ok, f"{response.status_code}: {response.text[:500]}"
        return response.json()

    def ask(self, path: str, body: dict) -> dict | list:
        """Return the answer; a stream's is put together from its pieces."""
        if body.get("stream"):
            return self._stream(path, body)
        response = self.post(path, body)
        assert response.ok, f"{response.status_code}: {response.text[:500]}"
        return response.json()

    def _stream(self, path: str, body: dict) -> dict:
        pieces = []
        with session().post(self.url + path, json=body, stream=True, timeout=300) as response:
            assert response.ok, response.text[:500]
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    pieces.append(json.loads(line[6:]))
        return merge_stream(pieces)

    def cancel(self, path: str, body: dict, after: int = 2) -> None:
        """Start a stream and hang up after a few pieces."""
        with session().post(self.url + path, json={**body, "stream": True}, stream=True) as r:
            for number, _ in enumerate(r.iter_lines()):
                if number >= after:
                    break

    def ask_all(self, wishes: list[tuple[str, dict]], concurrency: int) -> list:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda wish: self.ask(*wish), wishes))

    def metrics(self) -> dict[str, float]:
        """Return the counters of /metrics, those of one name summed."""
        totals: dict[str, float] = {}
        for line in session().get(self.url + "/metrics", timeout=30).text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                for key in (name, name.split("{")[0]):
                    totals[key] = totals.get(key, 0.0) + float(value)
        return totals

    def running_requests(self) -> int:
        """Return how many requests the server has."""
        answer = session().get(self.url + "/get_load", timeout=10)
        if answer.ok:
            return sum(load["num_reqs"] for load in answer.json())
        loads = session().get(self.url + "/v1/loads", timeout=10).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def settle_down(self) -> None:
        """Wait until idle: there SGLang counts its slots, and dies if one is missing."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if not self.running_requests():
                break
            time.sleep(0.2)
        # each answer is of another turn of the scheduler's loop: it has counted before the last
        for _ in range(4):
            self.ask_for("/get_server_info")
        assert self.process.poll() is None, self.tail()
        assert session().post(self.url + "/flush_cache", timeout=30).ok, self.tail()
        answer = self.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}})
        assert answer.ok, self.tail()


def proposed(meta: dict) -> int:
    """Return how many drafts an answer had, by the name that its SGLang has for it."""
    return meta.get("spec_proposed_drafts", meta.get("spec_num_proposed_drafts"))


def accepted(meta: dict) -> int:
    """Return how many of them were accepted."""
    return meta.get("spec_accepted_drafts", meta.get("spec_num_correct_drafts"))


def histogram(meta: dict) -> list[int]:
    """Return how many steps had 0, 1, 2, ... accepted drafts."""
    return meta.get("spec_accept_histogram", meta.get("spec_correct_drafts_histogram"))


_LOCAL = threading.local()


def session() -> requests.Session:
    """Return this thread's session. No connection is kept: a server may have been suspended."""
    if not hasattr(_LOCAL, "session"):
        _LOCAL.session = requests.Session()
        _LOCAL.session.headers["Connection"] = "close"
    return _LOCAL.session


def merge_stream(pieces: list[dict]) -> dict:
    """Return what the same request would have answered without streaming."""
    last = pieces[-1]
    if "meta_info" in last:  # /generate sends the text so far each time
        ids = last["output_ids"]
        return {**last, "output_ids": ids}
    choice = {"text": "", "finish_reason": None}
    usage = None
    for piece in pieces:
        usage = piece.get("usage") or usage
        for part in piece["choices"]:
            delta = part.get("delta", part)
            choice["text"] += delta.get("content", delta.get("text", "")) or ""
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    return {"choices": [choice], "usage": usage}
