"""Faults planted in a real SGLang server: after how many requests does the KV sanitizer find them?

    python benchmarks/sanitizer.py [--alarms 10000]
    PYTHONPATH=.sglang23 python benchmarks/sanitizer.py [--alarms 10000]

Run it in the environment of scripts/setup-sglang-cpu, once for each version of SGLang. Each fault
of tests/engines/sglang/site/outrider_planted.py gets a server of its own, which answers
conversations and sessions, eight at once. Then the same traffic goes to a server without a fault
and to SGLang
without speculation, `--alarms` requests each: there the sanitizer must find nothing. The result is
added to benchmarks/results/sanitizer.json, by version, after each server.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sglang
from common import write
from common_sglang import Server, end_servers_at_sigterm
from rich.progress import Progress

from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/sglang"))
import test_sanitizer as traffic

RESULT = Path(__file__).parent / "results" / "sanitizer.json"


def start(folder: Path, name: str, *flags: str, **environment: str) -> Server:
    """Start a server that checks its KV slots."""
    profile = folder / "profile.yaml"
    asked = {"drafter": "ngram", "drafters": traffic.DRAFTERS, "sanitize": True}
    profile.write_text(json.dumps(asked))
    environment["OUTRIDER_CONFIG"] = str(profile)
    return Server(traffic.TINY / "target", *flags, log=folder / f"{name}.log", **environment)


def planted(folder: Path, fault: str) -> dict[str, Any]:
    """Return after how many requests a fault was found, and what was said."""
    with start(folder, fault, *traffic.FLAGS, OUTRIDER_TEST_PLANTED=fault) as server:
        count = traffic.requests_until_found(server, fault)
        said = traffic.said(server)
    return {"requests": count if said else None, "said": said[0] if said else None}


def alarms(folder: Path, is_bare: bool, count: int) -> dict[str, int]:
    """Return how many violations were found in so many requests, where there is no fault."""
    name = "bare" if is_bare else "ours"
    flags = [flag for flag in traffic.FLAGS if not (is_bare and flag in traffic.SPECULATION)]
    with start(folder, name, *flags) as server:
        asked = traffic.ask(server, "", count, traffic.MAX_AT_ONCE, is_bare)
        return {"requests": asked, "violations": len(traffic.said(server))}


def main() -> None:
    """Plant, count, and write benchmarks/results/sanitizer.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alarms", type=int, default=10_000, help="requests without a fault")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    args = parser.parse_args()
    end_servers_at_sigterm()
    folder, made = Path(tempfile.mkdtemp(prefix="outrider-sanitizer-")), provenance()
    found: dict[str, Any] = {"provenance": made, "planted": {}, "alarms": {}}
    results = json.loads(args.out.read_text()) if args.out.exists() else {"versions": {}}
    results["versions"][sglang.__version__] = found
    results["provenance"] = made
    with Progress() as progress:
        task = progress.add_task("servers", total=len(traffic.FAULTS) + 2)
        for fault in traffic.FAULTS:
            found["planted"][fault] = planted(folder, fault)
            write("sanitizer", results, args.out)
            progress.advance(task)
        for name in ("bare", "ours"):
            found["alarms"][name] = alarms(folder, name == "bare", args.alarms)
            write("sanitizer", results, args.out)
            progress.advance(task)
    print(json.dumps({k: v for k, v in found.items() if k != "provenance"}, indent=2))
    missed = [fault for fault, one in found["planted"].items() if one["requests"] is None]
    if missed or any(one["violations"] for one in found["alarms"].values()):
        sys.exit(f"not found: {missed}, or found where there is nothing")


if __name__ == "__main__":
    main()
