"""What the benchmarks of SGLang share: two real servers side by side, of which one works."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from common import model_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "sglang"))
from server import Server, session


class Suspendable(Server):
    """A server that can be frozen while the other one works."""

    def family(self) -> list[psutil.Process]:
        """Return the server's processes."""
        tree = psutil.Process(self.process.pid)
        return [tree, *tree.children(recursive=True)]

    def suspend(self) -> None:
        """Stop all its processes."""
        for process in self.family():
            process.suspend()

    def resume(self) -> None:
        """Let them go on."""
        for process in self.family():
            process.resume()


def outrider_flags(draft: str, steps: int) -> list[str]:
    """Return the flags of Outrider's server. steps: the largest K that a request may ask for."""
    return [
        *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
        *("--speculative-draft-model-path", model_path(draft)),
        *("--speculative-num-steps", str(steps)),
    ]


@contextmanager
def side_by_side(
    target: str, flags: Sequence[str], ours: Sequence[str], threads: str, profile: str = ""
) -> Iterator[tuple[Suspendable, Suspendable]]:
    """Start bare SGLang and Outrider's server, both suspended.

    flags: of both; ours: of Outrider's
    profile: of Outrider, as YAML
    """
    end_servers_at_sigterm()
    model, logs = Path(model_path(target)), Path(tempfile.mkdtemp(prefix="outrider-bench-"))
    (logs / "profile.yaml").write_text(profile)
    environment = {"OMP_NUM_THREADS": threads}
    plain = ("--attention-backend", "torch_native")
    bare = Suspendable(
        model, *flags, *plain, log=logs / "bare.log", SGLANG_PLUGINS="none", **environment
    )
    with bare:  # one after the other: SGLang looks how much memory is left
        environment["OUTRIDER_CONFIG"] = str(logs / "profile.yaml")
        with Suspendable(model, *flags, *ours, log=logs / "ours.log", **environment) as drafting:
            bare.suspend()
            drafting.suspend()
            yield bare, drafting


def end_servers_at_sigterm() -> None:
    """Make SIGTERM an exception, so that servers started in a `with` are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def seconds_by_part(server: Server) -> dict[str, float]:
    """Return the time of decode steps so far, by part."""
    found = server.metrics()
    parts = ("draft_forward", "draft", "forward", "verify", "host", "scheduler")
    key = "outrider:step_seconds_total"
    return {
        part: sum(v for k, v in found.items() if k.startswith(key) and f'part="{part}"' in k)
        for part in parts
    }


def wish(ids: list[int], tokens: int, wishes: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Return a request for so many greedy tokens. wishes: of Outrider's server."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if wishes is not None:
        params["custom_params"] = {"outrider": wishes}
    return "/generate", {"input_ids": ids, "sampling_params": params}


def fill_cache(
    server: Suspendable, prompts: list[list[int]], wishes: dict[str, Any] | None
) -> None:
    """Let the server read the prompts, and nothing else stay in its prefix cache."""
    server.resume()
    server.post("/flush_cache", {})
    server.ask_all([wish(ids, 1, wishes) for ids in prompts], len(prompts))
    server.suspend()


def same_outputs(run: dict[str, Any], other: dict[str, Any]) -> int:
    """Count the answers of a run that are those of another, as far as both go."""
    pairs = zip(run["outputs"], other["outputs"], strict=True)
    return sum(a[: len(b)] == b[: len(a)] for a, b in pairs)


def measure(
    server: Suspendable, prompts: list[list[int]], tokens: int, wishes: dict[str, Any] | None
) -> dict[str, Any]:
    """Let all prompts be answered side by side, so many tokens of each in the mean.

    The time begins when the last of them has its first token, and ends when the sum is reached or
    one of them ends: so all of it has as many requests, and everybody writes as much of the same
    texts. What is in the prefix cache stays there.
    """
    server.resume()
    before, pieces = (
        seconds_by_part(server),
        [list[tuple[float, dict[str, Any]]]() for _ in prompts],
    )
    over = threading.Event()

    def listen(number: int) -> None:
        path, body = wish(prompts[number], 512, wishes)
        body["sampling_params"]["ignore_eos"] = False
        with session().post(server.url + path, json={**body, "stream": True}, stream=True) as reply:
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    pieces[number].append((time.perf_counter(), json.loads(line[6:])))
                if over.is_set():
                    break
        over.set()  # it has ended, or all have

    def written() -> int:
        return sum(mine[-1][1]["meta_info"]["completion_tokens"] for mine in pieces)

    threads = [threading.Thread(target=listen, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    while not all(pieces) and not over.is_set():
        time.sleep(0.01)
    enough = written() + tokens * len(prompts)
    while written() < enough and not over.wait(0.01):
        pass
    over.set()
    server.post("/abort_request", {"abort_all": True})
    for thread in threads:
        thread.join()
    while server.running_requests():
        time.sleep(0.05)
    after = seconds_by_part(server)
    server.suspend()
    start, end = max(mine[0][0] for mine in pieces), min(mine[-1][0] for mine in pieces)
    speed, metas = 0.0, []
    for mine in pieces:
        counts = [(t, reply["meta_info"]["completion_tokens"]) for t, reply in mine]
        inside = [(t, count) for t, count in counts if start <= t <= end + 0.01]
        (first, fewest), (last, most) = inside[0], inside[-1]
        speed += (most - fewest) / (last - first)
        metas.append(mine[-1][1]["meta_info"])
    return {
        "tokens_per_second": round(speed, 3),
        "seconds": round(end - start, 3),
        "tokens": sum(meta["completion_tokens"] for meta in metas),
        "parts": {part: round(after[part] - before[part], 3) for part in after},
        "outputs": [mine[-1][1]["output_ids"] for mine in pieces],
    }
