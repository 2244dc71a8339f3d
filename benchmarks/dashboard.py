"""Every query of the dashboard, asked of a real Prometheus that scrapes a real SGLang server.

    python benchmarks/dashboard.py      # in the environment of scripts/setup-sglang-cpu

Prometheus must be installed (Debian: `apt-get install prometheus`), or be named by --prometheus. It
runs with deploy/prometheus/prometheus.yml, but scrapes every five
seconds. The server has the adaptive
drafter, a draft model (the target itself, in 8 bits) and a drafter that fails; traffic changes
between plain decoding, adaptive, the model alone and the faulty one. Then each query of
deploy/grafana/outrider.json is asked over the whole run, and each alert is looked at.

What the dashboard calls speed-up is an estimate; plain decoding and the others take turns on the
same prompts here, so the result has beside it what the clients saw.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import requests
import yaml
from common import chat_ids, model_path, write
from common_sglang import Server, end_servers_at_sigterm, outrider_flags
from rich.console import Console
from rich.table import Table
from server import free_port
from transformers import AutoTokenizer

from outrider.bench.workloads import prompts
from outrider.control.decision import CpuDrafts
from outrider.core import Outcome, Outcomes, Proposal, SamplingParams, chain
from outrider.report import provenance
from outrider.serving.clock import StepClock
from outrider.serving.metrics import Metrics
from outrider.serving.tracing import Tracer
from outrider.serving.values import Columns, Launched, Members, ServedRequest, Settled

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import make_dashboard  # noqa: E402

FLAGS = [
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--max-total-tokens", "8192"),
    *("--max-running-requests", "8", "--context-length", "2048", "--enable-metrics"),
]
PROFILE = "drafter: adaptive\ndraft_bits: 8\ndrafters: {model: {}, raising: {}}\n"
MODES: dict[str, dict[str, Any]] = {
    "plain": {"max_drafts": 0},
    "adaptive": {},
    "model": {"drafter": "model"},
    "raising": {"drafter": "raising"},
}
SPEED_UP = make_dashboard.STATS[0][0]
SCRAPE = 5.0


def main() -> None:
    """Run the traffic, ask the queries, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default=shutil.which("prometheus"))
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=8, help="of each kind, mode and round")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.prometheus is None:
        sys.exit("no Prometheus here: install it, or name it by --prometheus")
    end_servers_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="outrider-dashboard-") as folder:
        result = {"microseconds_a_step": cost(Path(folder)), **run(args, Path(folder))}
    show(result)
    write("dashboard", {"provenance": provenance(), **result}, args.out)
    silent = [q["panel"] for q in result["queries"] if not q["series"]]
    broken = [rule["alert"] for rule in result["alerts"] if rule["health"] != "ok"]
    if silent or broken:
        sys.exit(f"no answer: {silent}; broken alerts: {broken}")


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what Prometheus answered, and what the clients saw."""
    (folder / "profile.yaml").write_text(PROFILE)
    model = Path(model_path(args.target))
    environment = {"OUTRIDER_CONFIG": str(folder / "profile.yaml")}
    environment["OMP_NUM_THREADS"] = args.threads
    flags = [*FLAGS, *outrider_flags(args.target, 8), "--served-model-name", args.target]
    with (
        Server(model, *flags, log=folder / "server.log", **environment) as server,
        prometheus(args.prometheus, server.port, folder) as url,
    ):
        started = time.time()
        phases = traffic(args, server, url)
        time.sleep(2 * SCRAPE)
        span = f"{math.ceil(time.time() - started)}s"
        chosen = {"model_name": args.target, "instance": f"127.0.0.1:{server.port}"}
        asked = make_dashboard.expressions(__rate_interval=span, __range=span, **chosen)
        (group,) = get(url, "rules")["groups"]
        (scraped,) = get(url, "targets")["activeTargets"]
        return {
            "target": args.target,
            "draft": f"{args.target}, 8 bits",
            "prometheus": get(url, "status/buildinfo")["version"],
            "scrape": {k: scraped[k] for k in ("health", "lastError", "lastScrapeDuration")},
            "seconds": span,
            "phases": phases,
            "queries": [{"panel": t, "query": q, "series": ask(url, q)} for t, q in asked],
            "variables": {
                name: get(url, f"label/{name}/values") for name in ("model_name", "instance")
            },
            "alerts": [
                {"alert": rule["name"], "health": rule["health"], "state": rule["state"]}
                for rule in group["rules"]
            ],
        }


def cost(folder: Path, steps: int = 500) -> dict[str, Any]:
    """Return what counting a step, and tracing it, takes of the scheduler's thread, by requests.

    Counters go to files, as in SGLang's processes; spans to a collector that is not there.
    """
    os.environ |= {"PROMETHEUS_MULTIPROC_DIR": str(folder), "OTEL_EXPORTER_OTLP_TIMEOUT": "0.1"}
    logging.disable(logging.CRITICAL)
    metrics, tracer = Metrics({"model_name": "m", "dp_rank": "0"}), Tracer({"model_name": "m"})
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR")
    found: dict[str, Any] = {"counters": {}, "spans": {}}
    for batch in (1, 8, 64):
        settled = settled_step(batch)
        started = time.thread_time()
        for _ in range(steps):
            metrics.record(settled)
        counted = time.thread_time()
        for _ in range(steps):
            tracer.step(settled)
        found["counters"][batch] = round(1e6 * (counted - started) / steps)
        found["spans"][batch] = round(1e6 * (time.thread_time() - counted) / steps)
    logging.disable(logging.NOTSET)
    return found


def settled_step(batch: int) -> Settled:
    """Return a step of so many requests, each with four drafts of which two were accepted."""
    asking = [ServedRequest(r, (1, 2), SamplingParams(), seed=0) for r in range(batch)]
    proposal, names = Proposal.of([chain([1, 2, 3, 4])] * batch), ["model"] * batch
    outcomes = Outcomes.of([Outcome(r, (1, 2, 3), (0, 1, 2), 4, 2, None) for r in asking])
    members = Members.whole(asking, np.ones(batch, np.int64), Columns.of(asking))
    clock = StepClock(None)
    for part in ("scheduler", "host", "draft", "host", "forward", "verify", "host"):
        clock.lap(part)
    decision = CpuDrafts(proposal, names)
    launched = Launched(members, decision, early=False, ticket=None, clock=clock)
    return Settled(launched, np.arange(batch), proposal, outcomes)


@contextmanager
def prometheus(command: str, port: int, folder: Path) -> Iterator[str]:
    """Start Prometheus on the committed configuration, and return its address."""
    source = ROOT / "deploy" / "prometheus"
    config = yaml.safe_load((source / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE:g}s", "evaluation_interval": f"{SCRAPE:g}s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(source / "alerts.yml", folder)
    where = f"127.0.0.1:{free_port()}"
    flags = ["--config.file", str(folder / "prometheus.yml"), "--web.listen-address", where]
    flags += ["--storage.tsdb.path", str(folder / "tsdb"), "--log.level", "warn"]
    process = subprocess.Popen([command, *flags])
    url = f"http://{where}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                sys.exit("Prometheus did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/-/ready", timeout=5).ok
    except requests.RequestException:
        return False


def get(url: str, path: str, **params: str) -> Any:
    """Return what Prometheus's API answers; an error ends the run."""
    reply = requests.get(f"{url}/api/v1/{path}", params=params, timeout=30).json()
    if reply["status"] != "success":
        sys.exit(f"{path} {params}: {reply['error']}")
    return reply["data"]


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """Return the series that a query gives now, with their labels."""
    found = get(url, "query", query=query)["result"]
    series = [{**one["metric"], "value": round(float(one["value"][1]), 4)} for one in found]
    return [one for one in series if math.isfinite(one["value"])]


def traffic(args: argparse.Namespace, server: Server, url: str) -> list[dict[str, Any]]:
    """Let the modes take turns on the same prompts. Return what clients and dashboard say."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    kinds = ("code", "edit", "chat")
    texts = [text for kind in kinds for text in prompts(kind, args.requests, 0)]
    asked = [chat_ids(tokenizer, text) for text in texts][: 3 * args.requests]

    def wish(ids: list[int], mode: str) -> tuple[str, dict[str, Any]]:
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": args.tokens}
        params |= {"ignore_eos": True, "custom_params": {"outrider": MODES[mode]}}
        return "/generate", {"input_ids": ids, "sampling_params": params}

    def one(mode: str, clients: int) -> dict[str, Any]:
        started = time.time()
        answers = server.ask_all([wish(ids, mode) for ids in asked], clients)
        took = time.time() - started
        time.sleep(2 * SCRAPE)
        span = f"{math.ceil(time.time() - started)}s"
        (query,) = {q for t, q in make_dashboard.expressions(__range=span) if t == SPEED_UP}
        tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        estimate = [series["value"] for series in ask(url, query)]
        return {
            "mode": mode,
            "clients": clients,
            "tokens_per_second": round(tokens / took, 2),
            "dashboard_speed_up": estimate[0] if estimate else None,
        }

    # prompts into the prefix cache, read by the draft model too: it reads none of a plain request
    server.ask_all([wish(ids, "model") for ids in asked], args.clients[-1])
    for clients in args.clients:  # the first steps are slow
        server.ask_all([wish(ids, "plain") for ids in asked], clients)
    phases = [
        one(mode, clients)
        for _ in range(args.rounds)
        for clients in args.clients
        for mode in ("plain", "adaptive", "model")
    ]
    phases.append(one("raising", args.clients[-1]))
    for phase in phases:
        speeds = [
            p["tokens_per_second"]
            for p in phases
            if (p["mode"], p["clients"]) == ("plain", phase["clients"])
        ]
        mean = sum(speeds) / len(speeds)
        phase["client_speed_up"] = round(phase["tokens_per_second"] / mean, 2)
    return phases


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    table = Table("panel", "series", "values")
    for query in result["queries"]:
        values = [
            " ".join([*(str(v) for k, v in one.items() if k != "value"), f"{one['value']:g}"])
            for one in query["series"]
        ]
        table.add_row(query["panel"], str(len(values)), ", ".join(values[:8]))
    Console().print(table)
    table = Table("mode", "clients", "tokens/s", "x plain, clients", "x plain, dashboard")
    for phase in result["phases"]:
        names = ("mode", "clients", "tokens_per_second", "client_speed_up", "dashboard_speed_up")
        table.add_row(*(str(phase[name]) for name in names))
    Console().print(table)
    Console().print("microseconds a step, by requests:", result["microseconds_a_step"])


if __name__ == "__main__":
    main()
