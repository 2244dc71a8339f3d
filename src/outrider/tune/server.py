"""A server to try on: `outrider serve` with every drafter allowed, on a port of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from outrider.errors import Unsupported, UsageError

__all__ = ["serving"]

COUNTS = ("--speculative-num-steps", "--speculative-num-draft-tokens")
START = 600.0
"""Seconds that a server may take to load."""


@contextmanager
def serving(
    flags: Sequence[str], most_drafts: int, draft_bits: int | None, log: Path
) -> Iterator[str]:
    """Start a server with SGLang's own flags, yield its address, and end it.

    log: where its output goes
    """
    has_draft = "--speculative-draft-model-path" in " ".join(flags)
    names = ["suffix", "ngram", "adaptive", *(["model"] if has_draft else [])]
    content: dict[str, object] = {"drafters": {name: {} for name in names}}
    # where SGLang's flags say how many, a profile that says more would be refused
    if not any(flag.startswith(COUNTS) for flag in flags):
        content["max_drafts"] = most_drafts
    if draft_bits is not None and has_draft:
        content["draft_bits"] = draft_bits
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(yaml.safe_dump(content))
        command = [sys.executable, "-m", "outrider", "serve", "--profile", str(profile)]
        command += [*flags, "--host", "127.0.0.1", "--port", str(port), "--enable-metrics"]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    """Return a port that nobody has; SGLang takes one 10,000 above it too.

    Both below 32,768: from there on clients get theirs, and may take it while the server loads.
    """
    for port in range(20_000, 22_000, 7):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port
    raise Unsupported("no free port", fix="name a running server with --engine")


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            why = "; ".join(line[:300] for line in lines[-3:])
            # argparse's code and ours: an option or the profile cannot be understood
            kind = UsageError if code == 2 else Unsupported
            raise kind(f"the server did not start: {why}", fix=f"all of it is in {log}")
        with suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
            return
        time.sleep(0.5)
    raise Unsupported(f"no answer from the server in {START:.0f} s", fix=f"look into {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children: they are a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if number == signal.SIGTERM:
            time.sleep(1)
